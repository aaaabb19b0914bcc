"""From an index and its model to the settings that predict best: responses, sweep, choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import local_directory
from stride_cli.errors import NumericalError, StrideError, UsageError
from stride_cli.output import note, progress
from stride_cli.research.evaluation.resampling import mean_interval, mean_records
from stride_cli.research.tuning.options import TuneOptions
from stride_cli.research.tuning.responses import (
    EPOCHS,
    MOST_TOKENS,
    ContinuedTrainer,
    WithheldChunks,
    random_halves,
    withheld_queries,
)
from stride_cli.research.tuning.search import (
    DIMENSIONS,
    Target,
    Trial,
    TrialStore,
    check_grid,
    failed,
    layer_matters,
    run_trial,
    sweep,
    trial_key,
)

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.models.kinds import Kind
    from stride_cli.research.tuning.records import SettingsRecord, TrialRecord, TuneRecord

_HELD_OUT = 48
_GRIDS: dict[Kind, dict[str, list[Any]]] = {
    "language": {
        "space": ["residual-matrix+logit", "residual-matrix"],
        "damping": [0.03, 0.1, 0.3, 1.0],
        "rank": [32, 96, 192],
    },
    "classifier": {
        "space": ["residual-matrix+logit", "residual-matrix", "logit"],
        "damping": [0.1, 0.3, 1.0, 3.0, 10.0, 30.0],
        "rank": [16, 64, 512],
    },
}


def tune_index(
    where: WorkspacePath, options: TuneOptions, on_trial: Callable[[TrialRecord], None]
) -> dict[str, Any]:
    """Measure responses, sweep the settings, choose; see `stride_cli.research.api.tune`.

    Responses and trials are kept in ``INDEX.tuning`` beside the index: an interrupted sweep goes on.

    Raises
    ------
    UsageError, StageMissing      options that cannot be; ``truth`` without one
    NumericalError                no trial could be fitted
    """
    # 1. where the sweep begins, and what it tries
    check_grid(options.grid or {})
    local_directory(where.index)  # refused before a model is opened
    workspace = where.open()
    start = {name: options.start.get(name) for name in DIMENSIONS}
    start["space"] = start["space"] or default_space(workspace)
    grid = dict(options.grid) if options.grid is not None else default_grid(workspace)
    # 2. what trials are judged by
    place = workspace.index.directory.with_name(workspace.index.directory.name + ".tuning")
    begun = time.perf_counter()
    workspace, target = _target(workspace, where, options, place)
    response_seconds = time.perf_counter() - begun
    # 3. the sweep
    trials = _Trials(workspace, target, TrialStore(place / "trials"))
    most = 1 + sum(map(len, grid.values()))
    best: Trial | None = None
    first: Trial | None = None
    seconds, count = 0.0, 0
    with progress("tuning", min(most, options.trials or most), unit="trials") as bar:
        for trial, better in sweep(
            grid,
            start,
            trials.evaluate,
            limit=options.trials,
            seed=workspace.seed,
            matters=lambda name, settings: name != "layer" or layer_matters(settings),
            identity=trials.identity,
        ):
            count += 1
            seconds += trial.seconds
            first = trial if first is None and trial.error is None else first
            best = trial if better else best
            on_trial(trial_record(count, trial, better, workspace, seed=workspace.seed))
            bar.advance()
    if best is None or first is None:
        raise NumericalError("no trial could be fitted", fix="see the errors of the trials")
    # 4. the choice; what gains nothing stays as it is, and is not made explicit: other indexes have other
    # defaults
    own, shown = workspace.index, resolved(best.settings, workspace)
    settings = {
        f"train.{name}": best.settings[name] for name in DIMENSIONS if best.settings[name] != start[name]
    }
    following = f"stride train --index {own.path} --overwrite" if settings else ""
    values = {"score": best.scores, "gain": best.scores - first.scores}
    means = mean_records(values, seed=workspace.seed, name="tuning")
    record: TuneRecord = {
        "schema": "stride.tune/1",
        "index": str(own.path),
        "criterion": target.name,
        "queries": len(target.queries),
        "responses": len(target.masks),
        **shown,
        "score": means["score"],
        "gain": means["gain"],
        "trials": count,
        "written": "\n".join(f"{key}: {_as_yaml(value)}" for key, value in settings.items()),
        "path": "",
        "next": following,
        "seconds": {"responses": response_seconds, "trials": seconds},
    }
    return {**record, "settings": settings}


class _Trials:
    """Trials on one target, each kept on disk."""

    def __init__(self, workspace: Workspace, target: Target, store: TrialStore) -> None:
        self._workspace, self._target, self._store = workspace, target, store

    def evaluate(self, settings: dict[str, Any]) -> Trial:
        """Run a trial, or read the finished one; settings that cannot be fitted give a failed one."""
        try:
            key = self._key(settings)
            trial = self._store.read(key)
            if trial is None:
                trial = run_trial(self._workspace, self._target, settings)
                self._store.add(key, trial)
            return trial
        except (UsageError, NumericalError) as error:
            return failed(settings, error)

    def identity(self, settings: Mapping[str, Any]) -> str:
        """Name settings so that those that mean the same have one name."""
        try:
            return self._key(settings)
        except StrideError:  # they cannot be fitted, and the trial will say so
            return repr(sorted(settings.items(), key=str))

    def _key(self, settings: Mapping[str, Any]) -> str:
        return trial_key(self._workspace, self._target, settings)


def default_grid(workspace: Workspace) -> dict[str, list[Any]]:
    """List values worth trying of what an index need not be built anew for."""
    depth = workspace.model.n_layers
    layers = sorted({max(1, round(depth * share)) for share in (1 / 3, 2 / 3, 1)})
    grid = _GRIDS[workspace.model.kind]
    spaces = list(dict.fromkeys([default_space(workspace), *grid["space"]]))
    return {"space": spaces, "layer": layers, "damping": grid["damping"], "rank": grid["rank"]}


def default_space(workspace: Workspace) -> str:
    """Name the operator space that this model and index are fitted in by default."""
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    return "+".join(resolve_settings(ClosedOptions(), workspace.model, workspace.index).spaces)


def _target(
    workspace: Workspace, where: WorkspacePath, options: TuneOptions, place: Path
) -> tuple[Workspace, Target]:
    """Measure what trials are judged by; also the workspace that operators are fitted on."""
    from stride_cli.data.query_files import read_queries
    from stride_cli.randomness import stream_key
    from stride_cli.research.evaluation.bench import Bench
    from stride_cli.training.jobs import Job, Trainer
    from stride_cli.training.language_trainer import training_bytes
    from stride_cli.training.retraining import count_missing, open_trainer, retrain

    if options.criterion == "truth":
        bench = Bench(where, queries=options.queries)
        ground = bench.ground()
        return bench.workspace, Target(bench.queries, bench.truth.masks, ground.measured, "truth")
    withheld = np.zeros(0, np.int64)
    if options.queries is not None:
        queries = read_queries(workspace, options.queries)
    elif len(getattr(workspace.model, "held_out", ())) and options.held_out is None:
        queries = read_queries(workspace, Path("held-out"))
    else:
        count = options.held_out or min(_HELD_OUT, workspace.n_chunks // 8)
        queries, withheld = withheld_queries(workspace, count)
        workspace = replace(workspace, chunks=WithheldChunks(workspace.index, withheld))
    masks = random_halves(workspace, withheld, options.responses)
    trainer: Trainer
    if options.criterion == "retrained":
        trainer, how = open_trainer(workspace, queries), "anew"
    else:
        how, prints = "further", workspace.index.attributes["fingerprints"]
        trainer = ContinuedTrainer(
            where=replace(where, model=replace(where.model, dtype="fp32")),
            queries=queries,
            n_chunks=workspace.n_chunks,
            fingerprints=prints["model"] + prints["corpus"],
            epochs=options.epochs if options.epochs is not None else EPOCHS[workspace.model.kind],
            lr=options.lr,
            source=options.queries,
            peak_bytes=training_bytes(workspace.model, MOST_TOKENS) if workspace.model.table is None else 0,
        )
    jobs = [
        Job(mask, stream_key(workspace.seed, "tuning response", number) % (1 << 31))
        for number, mask in enumerate(masks)
    ]
    store = place / "responses"
    missing = count_missing(trainer, jobs, store=store)
    note(f"training the model {how} on {len(jobs)} random halves, {missing} of them to do; kept in {place}")
    outcomes = retrain(trainer, jobs, store=store, engine=options.engine, workers=options.workers)
    losses = np.array([outcome.losses for outcome in outcomes])  # (R, Q)
    return workspace, Target(queries, masks, -losses.T, options.criterion)


def trial_record(
    number: int, trial: Trial, better: bool, workspace: Workspace, *, seed: int = 0
) -> TrialRecord:
    """Make ``stride.trial/1``."""
    found = mean_interval(trial.scores, seed=seed, name="tuning") if trial.error is None else None
    record: TrialRecord = {
        "schema": "stride.trial/1",
        "trial": number,
        **resolved(trial.settings, workspace),
        "score": None if found is None else found.mean,
        "se": None if found is None else found.se,
        "best": better,
        "kept": trial.kept,
        "seconds": trial.seconds,
    }
    if trial.error is not None:
        record["error"] = trial.error
    return record


def resolved(settings: Mapping[str, Any], workspace: Workspace) -> SettingsRecord:
    """Fill in the defaults of this model and index."""
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    plain = resolve_settings(ClosedOptions(space=settings["space"]), workspace.model, workspace.index)

    def shown(name: str, default: Any) -> Any:
        return default if settings[name] is None else settings[name]

    return {
        "space": settings["space"],
        "layer": shown("layer", plain.layer),
        "rank": settings["rank"],
        # a classifier's training time stands in for damping unless one is given
        "damping": shown("damping", plain.damping if plain.time is None else None),
        "subsets": workspace.index.n_subsets,
        "degree": workspace.index.degree,
    }


def _as_yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value).splitlines()[0])
