"""Methods on the same ground: the same truth, the same resamples, each against the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.nats import fit_line
from stride_cli.errors import UsageError
from stride_cli.research.evaluation import metrics
from stride_cli.research.evaluation.distribution import FIELDS, Distribution
from stride_cli.research.evaluation.options import RESPONSES
from stride_cli.research.evaluation.records import estimate_record
from stride_cli.research.evaluation.resampling import DRAWS, Draws, Estimate, Resampler
from stride_cli.research.evaluation.scoring import Run, failure
from stride_cli.research.training.truth import seeds_in_words
from stride_cli.schema.verify_records import Interval

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import (
        ComparisonRecord,
        DistributionRecord,
        GroupMean,
        GroupRecord,
        LdsRecord,
        PartialRecord,
        ScoredRecord,
        SlopeRecord,
        SpreadRecord,
    )

KINDS = ("spearman", "pearson", "kendall")
_MOST_GROUPS = 12


@dataclass(frozen=True)
class Ground:
    """R subsets of one size, retrained from S seeds, and Q queries: what methods are compared on.

    Attributes
    ----------
    measured : (Q, R) float64        −loss or margin, mean over seeds
    response : "loss" or "margin"
    alpha : float                    share of the chunks in a subset
    n_seeds : int
    ceiling : float, optional         the highest LDS that the noise between seeds allows
    own_seed : bool                  the seed is the model's own
    """

    measured: np.ndarray
    response: str
    alpha: float
    n_seeds: int
    ceiling: float | None
    own_seed: bool = False

    @property
    def seeds(self) -> str:
        """The seeds in words."""
        return seeds_in_words(self.n_seeds, self.own_seed)

    @property
    def warnings(self) -> list[str]:
        """Warnings for a reader of any number on this ground, a clause each."""
        enough = metrics.ENOUGH_SUBSETS
        if self.n_subsets >= enough:
            return []
        return [
            f"{self.n_subsets} retrained subsets are few (expected {enough} or more): the correlations are "
            "rough, and so are their intervals"
        ]

    @property
    def n_queries(self) -> int:
        return self.measured.shape[0]

    @property
    def n_subsets(self) -> int:
        return self.measured.shape[1]

    @classmethod
    def of(
        cls,
        losses: np.ndarray,
        margins: np.ndarray | None,
        *,
        alpha: float,
        response: str = "loss",
        seed: int = 0,
        own_seed: bool = False,
    ) -> Ground:
        """Build it from losses and margins (R, S, Q) of one α.

        Raises
        ------
        UsageError      fewer than three subsets, or margins are asked for and there are none
        """
        if response not in RESPONSES:
            raise UsageError(f"unknown response '{response}'", fix="use loss or margin")
        if response == "margin" and margins is None:
            raise UsageError(
                "these retrained models were measured by their losses only", fix="use --response loss"
            )
        if len(losses) < metrics.FEWEST_SUBSETS:
            raise UsageError(
                f"there are {len(losses)} retrained subsets with α = {alpha:g} "
                f"(expected {metrics.FEWEST_SUBSETS} or more)",
                fix="retrain more: stride evaluate truth --subsets 50",
            )
        used = margins if response == "margin" else None
        values = losses if used is None else used
        return cls(
            metrics.measured_response(losses, used),
            response,
            float(alpha),
            int(losses.shape[1]),
            metrics.noise_ceiling(np.asarray(values, np.float64), seed=seed),
            own_seed,
        )


@dataclass(frozen=True)
class Entry:
    """One method's result, or its failure.

    Attributes
    ----------
    method : str                     its spec
    error, fix : str, optional       why it failed; everything else is None then
    run : Run
    correlations : metrics.Correlations
    estimates : dict                 "spearman", "pearson", "kendall" → Estimate
    difference : Estimate, optional  Spearman minus the reference's; None for the reference itself
    n_subsets : int                  subsets it was judged on: not those that it was fitted on
    """

    method: str
    error: str | None = None
    fix: str | None = None
    run: Run | None = None
    correlations: metrics.Correlations | None = None
    estimates: dict[str, Estimate] | None = None
    difference: Estimate | None = None
    n_subsets: int | None = None

    @property
    def distribution(self) -> Distribution | None:
        return self.run.distribution if self.run else None

    @property
    def seconds(self) -> float | None:
        """Seconds of fit and all queries."""
        return self.run.fit_seconds + self.run.score_seconds if self.run else None


def compare_methods(
    specs: Sequence[str], ground: Ground, run: Callable[[str], Run], *, draws: int = DRAWS, seed: int = 0
) -> Iterator[Entry]:
    """Compare the methods one after the other; a failure does not stop the rest.

    Parameters
    ----------
    specs : methods; the first one is the reference of all differences
    run : spec → Run, whose `predicted` is (Q, R)
    draws : int      bootstrap resamples, the same for every method

    Yields
    ------
    Entry, each as soon as it is done
    """
    judge = _Judge(ground, draws=draws, seed=seed)
    reference: Run | None = None
    for position, spec in enumerate(specs):
        try:
            found = run(spec)
            fair = _fair(found, ground)
            correlations = metrics.correlate(found.predicted[:, fair], ground.measured[:, fair])
        except Exception as error:
            yield Entry(spec, *failure(error))
            continue
        if position == 0:
            reference = found
        yield Entry(
            spec,
            run=found,
            correlations=correlations,
            estimates={kind: judge.draw(kind, found, fair).estimate() for kind in KINDS},
            difference=judge.difference(found, reference) if position and reference else None,
            n_subsets=int(fair.sum()),
        )


class _Judge:
    """Resampled correlations of runs, on the subsets that may judge them."""

    def __init__(self, ground: Ground, *, draws: int, seed: int) -> None:
        self._ground, self._draws, self._seed = ground, draws, seed
        self._resamplers: dict[bytes, Resampler] = {}
        self._drawn: dict[tuple[int, str, bytes], tuple[Run, Draws]] = {}

    def draw(self, kind: str, run: Run, fair: np.ndarray) -> Draws:
        """Resample on the subsets `fair`, (R,) bool; the draws are the same for every run."""
        predicted, measured = run.predicted[:, fair], self._ground.measured[:, fair]
        subsets = fair.tobytes()
        key = (id(run), kind, subsets)
        if key not in self._drawn:
            if subsets not in self._resamplers:
                self._resamplers[subsets] = Resampler(measured, draws=self._draws, seed=self._seed)
            observed = getattr(metrics.correlate(predicted, measured), kind)
            drawn = self._resamplers[subsets].draw(kind, predicted, observed)
            self._drawn[key] = (run, drawn)  # the run with it, so that its id stays its own
        return self._drawn[key][1]

    def difference(self, run: Run, reference: Run) -> Estimate | None:
        """Subtract the reference's Spearman from a run's, on the subsets that neither was fitted on.

        None where these are fewer than three.
        """
        fair = _fair(run, self._ground) & _fair(reference, self._ground)
        if fair.sum() < metrics.FEWEST_SUBSETS:
            return None
        own, other = (self.draw("spearman", each, fair) for each in (run, reference))
        return own.minus(other).estimate()


def _fair(run: Run, ground: Ground) -> np.ndarray:
    """Mark the subsets that a run was not fitted on, (R,) bool."""
    return np.ones(ground.n_subsets, bool) if run.held_out is None else run.held_out


def describe_methods(specs: Sequence[str], run: Callable[[str], Run]) -> Iterator[Entry]:
    """Describe the distribution of each method's scores; a failure does not stop the rest."""
    for spec in specs:
        try:
            yield Entry(spec, run=run(spec))
        except Exception as error:
            yield Entry(spec, *failure(error))


# -------------------------------------------------------------------------------------------------- records


def distribution_record(entry: Entry, n_chunks: int, n_queries: int) -> DistributionRecord:
    """Make ``stride.distribution/1`` of an entry; every number is null where the method failed."""
    found = entry.distribution
    numbers = found.to_record() if found else dict.fromkeys(FIELDS)
    record: DistributionRecord = {
        "schema": "stride.distribution/1",
        "method": entry.method,
        "chunks": n_chunks,
        "queries": n_queries,
        **numbers,  # type: ignore[typeddict-item]
        "curve": found.curve() if found else [],
    }
    if entry.error is not None:
        record["error"] = entry.error
    return record


def lds_record(entry: Entry, ground: Ground) -> LdsRecord:
    """Make ``stride.lds/1`` of an entry; every number is null where the method failed."""
    return {"schema": "stride.lds/1", **_scored(entry, ground)}


def _scored(entry: Entry, ground: Ground) -> ScoredRecord:
    """Make the part that the records of `lds` and `compare` share."""
    estimates, run, correlations = entry.estimates or {}, entry.run, entry.correlations
    spearman = estimates.get("spearman")
    joint = {kind: estimates[kind].joint if kind in estimates else None for kind in KINDS}
    record: ScoredRecord = {
        "method": entry.method,
        "response": ground.response,
        "alpha": ground.alpha,
        "subsets": ground.n_subsets if entry.n_subsets is None else entry.n_subsets,
        "seeds": ground.n_seeds,
        "own_seed": ground.own_seed,
        "queries": ground.n_queries,
        "spearman": estimate_record(joint["spearman"]),
        "pearson": estimate_record(joint["pearson"]),
        "kendall": estimate_record(joint["kendall"]),
        "over_queries": _spread(spearman.queries if spearman else None),
        "over_subsets": _spread(spearman.subsets if spearman else None),
        "constant_queries": int(correlations.constant.sum()) if correlations is not None else None,
        "ceiling": ground.ceiling,
        "seconds": {
            "fit": run.fit_seconds if run else None,
            "query": run.score_seconds / ground.n_queries if run else None,
        },
        "bytes_per_chunk": run.bytes_per_chunk if run else None,
    }
    if entry.error is not None:
        record["error"] = entry.error
    return record


def comparison_record(
    entry: Entry, ground: Ground, reference: str, *, names: Sequence[str] = (), given: Entry | None = None
) -> ComparisonRecord:
    """Make ``stride.comparison/1`` of an entry.

    Parameters
    ----------
    names : of the queries; groups of them (`query_groups`) are reported apart
    given : the entry of a method whose part in the correlation is taken out
    """
    run = entry.run
    groups: list[GroupRecord] = []
    partial: PartialRecord = {"given": None, **mean_over_queries(np.zeros(0)), "groups": []}
    if run is not None and entry.correlations is not None:
        apart = query_groups(names)
        groups = _grouped(entry.correlations.spearman, apart)
        if given is not None and given.run is not None and given is not entry:
            fair = _fair(run, ground) & _fair(given.run, ground)
            left = metrics.partial_spearman(
                run.predicted[:, fair], ground.measured[:, fair], given.run.predicted[:, fair]
            )
            partial = {"given": given.method, **mean_over_queries(left), "groups": _grouped(left, apart)}
    return {
        "schema": "stride.comparison/1",
        **_scored(entry, ground),
        "reference": reference,
        "difference": estimate_record(entry.difference.joint if entry.difference else None),
        "slope": _slope(entry, ground),
        "groups": groups,
        "partial": partial,
        "peak_memory": run.memory_bytes if run else None,
        "peak_device_memory": run.device_bytes if run else None,
    }


def query_groups(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Group queries by the part of their name before the first ``/``: group → (q,) int64.

    Empty where names have no such part, or there is only one group, or more than a dozen.
    """
    if not all("/" in name for name in names):
        return {}
    prefixes = np.array([name.partition("/")[0] for name in names])
    found = {str(prefix): np.flatnonzero(prefixes == prefix) for prefix in dict.fromkeys(prefixes.tolist())}
    return found if 1 < len(found) <= _MOST_GROUPS else {}


def mean_over_queries(values: np.ndarray) -> GroupMean:
    """Average a correlation per query, (q,); the error is over queries only."""
    n = len(values)
    return {
        "queries": n,
        "mean": float(np.mean(values)) if n else None,
        "se": float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None,
    }


def _grouped(values: np.ndarray, groups: dict[str, np.ndarray]) -> list[GroupRecord]:
    return [{"group": group, **mean_over_queries(values[rows])} for group, rows in groups.items()]


def _slope(entry: Entry, ground: Ground) -> SlopeRecord:
    """Regress measured on predicted responses of all queries, each query's mean taken off."""
    nothing: SlopeRecord = {"value": None, "se": None, "correlation": None}
    if entry.run is None:
        return nothing
    fair = _fair(entry.run, ground)
    predicted, measured = (
        (each - each.mean(axis=1, keepdims=True)).T
        for each in (entry.run.predicted[:, fair], ground.measured[:, fair])
    )
    if not predicted.any():
        return nothing
    found = fit_line(predicted, measured)
    error = found.error if ground.n_queries > 1 else None
    return {"value": found.slope, "se": error, "correlation": found.correlation}


def _spread(found: Interval | None) -> SpreadRecord:
    record = estimate_record(found)
    return {"se": record["se"], "low": record["low"], "high": record["high"]}
