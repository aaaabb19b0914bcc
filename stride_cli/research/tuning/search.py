"""The sweep: one setting after another, scored on the same measured responses, each trial kept on disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory, replace_file
from stride_cli.errors import StrideError
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.options import entries
from stride_cli.output import note
from stride_cli.research.evaluation.metrics import correlate, predicted_response
from stride_cli.research.evaluation.resampling import mean_interval
from stride_cli.version import __version__

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

# in the order in which they are swept: what matters most comes first
DIMENSIONS = ("space", "layer", "damping", "rank")
_SCHEMA = "stride.trial/1"
_ERRORS = 2  # standard errors that a setting has to gain: one is exceeded by chance in one trial of six


@dataclass(frozen=True)
class Trial:
    """One fit of the operators, and its score.

    Attributes
    ----------
    settings : dict                    `DIMENSIONS` → value, None for the default
    scores : (Q,) float64              Spearman's ρ over subsets of predicted and measured response
    seconds : float                    of fit and scoring
    error : str, optional              why the fit failed; there are no scores then
    kept : bool                        read from an earlier run
    """

    settings: dict[str, Any]
    scores: np.ndarray
    seconds: float
    error: str | None = None
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Target:
    """Measured responses that trials are judged by.

    Attributes
    ----------
    queries : QuerySet                 Q
    masks : (R, n) bool                subsets
    measured : (Q, R) float64          −loss after training on the subset, nats per scored token
    name : str                         "continued" (trained further), "retrained", or "truth" (the index's)
    digest : str                       SHA-256 of all that
    """

    queries: QuerySet
    masks: np.ndarray
    measured: np.ndarray
    name: str

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.name}{self.queries.fingerprint()}".encode())
        digest.update(np.packbits(self.masks).tobytes())
        digest.update(np.ascontiguousarray(self.measured, "<f8").tobytes())
        return digest.hexdigest()


class TrialStore:
    """A directory of finished trials, one JSON file each, named by what decides it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_directory(directory)

    def path(self, key: str) -> Path:
        return self.directory / f"{key}.json"

    def read(self, key: str) -> Trial | None:
        """Read a finished trial; None where there is none, or where its file is damaged."""
        try:
            stored = json.loads(self.path(key).read_text(encoding="utf-8"))
            if stored["key"] != key:
                raise ValueError("another trial's")
            scores = np.asarray(stored["scores"], np.float64)
            return Trial(stored["settings"], scores, stored["seconds"], kept=True)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            note(f"{self.path(key)} is damaged: that trial is run again")
            return None

    def add(self, key: str, trial: Trial) -> None:
        """Keep a trial, whole or not at all; failures are not kept."""
        record = {
            "schema": _SCHEMA,
            "key": key,
            "settings": trial.settings,
            "scores": trial.scores.tolist(),
            "seconds": trial.seconds,
        }
        replace_file(self.path(key), json.dumps(record).encode())


def run_trial(workspace: Workspace, target: Target, settings: Mapping[str, Any]) -> Trial:
    """Fit operators, recover as queries do by default, compare with the measured responses.

    Raises
    ------
    UsageError      settings that cannot be for this model and index
    """
    from stride_cli.research.evaluation.scoring import score_blocks
    from stride_cli.research.methods.stride import StrideMethod

    started = time.perf_counter()
    method = StrideMethod(fit="closed", **settings)
    method.fit(workspace)
    blocks = score_blocks(method, target.queries, workspace.n_chunks)
    predicted = np.concatenate([predicted_response(block, target.masks) for block in blocks])
    scores = correlate(predicted, target.measured).spearman
    return Trial(dict(settings), scores, time.perf_counter() - started)


def trial_key(workspace: Workspace, target: Target, settings: Mapping[str, Any]) -> str:
    """Hash what decides a trial: settings with their defaults filled in, target, index, version."""
    own = dict(settings)
    if not layer_matters(settings):
        own["layer"] = None
    resolved = asdict(resolve_settings(ClosedOptions(**own), workspace.model, workspace.index))
    index = workspace.index
    design = [index.n_subsets, index.degree]
    prints = index.attributes["fingerprints"]
    parts = [resolved, design, index.seed, target.digest, prints, __version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def layer_matters(settings: Mapping[str, Any]) -> bool:
    """Tell whether the operators act at a layer of one's choice."""
    from stride_cli.operators.spaces import parse_space, space_classes

    named = space_classes(parse_space(str(settings["space"])))
    return any(each.site == "residual" for each in named)


def sweep(
    grid: Mapping[str, Sequence[Any]],
    start: Mapping[str, Any],
    evaluate: Callable[[dict[str, Any]], Trial],
    *,
    limit: int | None = None,
    seed: int = 0,
    matters: Callable[[str, Mapping[str, Any]], bool] = lambda name, settings: True,
    identity: Callable[[Mapping[str, Any]], str] = lambda settings: json.dumps(settings, sort_keys=True),
) -> Iterator[tuple[Trial, bool]]:
    """Yield trials one after another, and whether each is the best so far.

    Begins with `start` and varies one setting at a time, in the order of `DIMENSIONS`, going on from the
    best. A trial is the best only where its mean is the highest so
    far and exceeds that of `start` by more than chance explains.

    Parameters
    ----------
    grid : dimension → values to try
    start : dimension → value, of every dimension
    evaluate : settings → Trial
    limit : int, optional      at most so many trials
    matters : (dimension, settings) → whether another value of it changes anything
    identity : settings → str     equal for settings that mean the same, which are tried once
    """
    best: Trial | None = None
    first: Trial | None = None
    done: set[str] = set()

    def rounds() -> Iterator[dict[str, Any]]:
        yield dict(start)
        for name in DIMENSIONS:
            for value in grid.get(name, ()):
                known = best.settings if best is not None else start
                if matters(name, known):
                    yield {**known, name: value}

    for settings in rounds():
        key = identity(settings)
        if key in done:
            continue
        if limit is not None and len(done) >= limit:
            return
        done.add(key)
        trial = evaluate(settings)
        better = trial.error is None and (
            best is None
            or first is None
            or (bool(trial.scores.mean() > best.scores.mean()) and exceeds(trial, first, seed=seed))
        )
        if better:
            best = trial
            first = first or trial
        yield trial, better


def exceeds(trial: Trial, other: Trial, *, seed: int = 0) -> bool:
    """Tell whether a trial's mean is higher by more than two standard errors of the difference."""
    difference = trial.scores - other.scores
    error = mean_interval(difference, seed=seed, name="tuning").se if len(difference) > 1 else 0.0
    return bool(difference.mean() > _ERRORS * error)


def check_grid(grid: Mapping[str, Sequence[Any]]) -> None:
    """Raise UsageError where a value to try cannot be."""
    for name in ("layer", "rank", "damping"):
        for value in grid.get(name, ()):
            entries(ClosedOptions)[name].check(value)


def failed(settings: Mapping[str, Any], error: StrideError) -> Trial:
    """Make the trial of settings that cannot be fitted: it is reported, and the sweep goes on."""
    return Trial(dict(settings), np.zeros(0), 0.0, error.message)
