"""From an index and its model to the settings that predict best: responses, sweep, choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import local_directory
from stride_cli.errors import NumericalError, StrideError, UsageError
from stride_cli.output import note, progress
from stride_cli.prove.resampling import mean_interval
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
    choose_lambda,
    failed,
    layer_matters,
    run_trial,
    sweep,
    trial_key,
)

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.models.kinds import Kind
    from stride_cli.research.tuning.records import (
        LambdaScore,
        QueryMean,
        SettingsRecord,
        TrialRecord,
        TuneRecord,
    )

_HELD_OUT = 48
_WRITTEN = ("space", "layer", "rank", "damping")  # the others are of an index


@dataclass(frozen=True, eq=False)
class Tuned:
    """The chosen settings.

    Attributes
    ----------
    best, first : Trial            the chosen one, and the one that the sweep began with
    lambda_ratio, first_lambda : float
    start, usual_lambda :          the settings that there were before
    target : Target
    trials : int
    response_seconds, trial_seconds : float
    """

    best: Trial
    first: Trial
    lambda_ratio: float
    first_lambda: float
    start: Mapping[str, Any]
    usual_lambda: float
    target: Target
    trials: int
    response_seconds: float
    trial_seconds: float

    def changed(self) -> dict[str, Any]:
        """What the chosen settings have otherwise than those before."""
        return {name: value for name, value in self.best.settings.items() if value != self.start[name]}

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """The criterion of every query, (Q,) each: with the chosen settings, and with the first ones."""
        chosen = self.best.scores[self.best.lambdas.index(self.lambda_ratio)]
        return chosen, self.first.scores[self.first.lambdas.index(self.first_lambda)]


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


def default_grid(workspace: Workspace) -> dict[str, list[Any]]:
    """Values worth trying of what an index need not be built anew for."""
    depth = workspace.model.n_layers
    layers = sorted({max(1, round(depth * share)) for share in (1 / 3, 2 / 3, 1)})
    grid = _GRIDS[workspace.model.kind]
    spaces = list(dict.fromkeys([default_space(workspace), *grid["space"]]))
    return {"space": spaces, "layer": layers, "damping": grid["damping"], "rank": grid["rank"]}


def default_space(workspace: Workspace) -> str:
    """The operator space that this model and index are fitted in where none is asked for."""
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    return "+".join(resolve_settings(ClosedOptions(), workspace.model, workspace.index).spaces)


def tune(where: WorkspacePath, options: TuneOptions, found: list[Tuned]) -> Iterator[tuple[Trial, bool]]:
    """Measure responses, then yield trials as they finish, and whether each is the best so far.

    The outcome is appended to `found` at the end. Responses and trials are kept in ``INDEX.tuning`` beside
    the index, so that an interrupted sweep goes on.

    Raises
    ------
    UsageError, StageMissing      options that cannot be; ``truth`` without one
    NumericalError                no trial could be fitted
    """
    from stride_cli.attribution.defaults import recovery_defaults

    lambdas = tuple(sorted(set(map(float, options.lambdas))))
    check_grid(options.grid or {}, lambdas)
    local_directory(where.index)  # refused before a model is opened
    workspace = where.open()
    usual = float(recovery_defaults(workspace.index, workspace.model, "closed", None)["lambda_ratio"])
    grid = dict(options.grid) if options.grid is not None else default_grid(workspace)
    start = {name: options.start.get(name) for name in DIMENSIONS}
    start["space"] = start["space"] or default_space(workspace)
    for name, own in (("subsets", workspace.index.n_subsets), ("degree", workspace.index.degree)):
        if name in grid:  # the index's own design is asked for by naming none
            grid[name] = [None if value == own else value for value in grid[name]]
    place = workspace.index.directory.with_name(workspace.index.directory.name + ".tuning")
    begun = time.perf_counter()
    workspace, target = _target(workspace, where, options, place)
    measured = time.perf_counter()
    store = TrialStore(place / "trials")

    def evaluate(settings: dict[str, Any]) -> Trial:
        try:
            key = trial_key(workspace, target, settings, lambdas)
            trial = store.read(key)
            if trial is None:
                trial = run_trial(workspace, target, settings, lambdas)
                store.add(key, trial)
            return trial
        except (UsageError, NumericalError) as error:
            return failed(settings, lambdas, error)

    def matters(name: str, settings: Mapping[str, Any]) -> bool:
        return name != "layer" or layer_matters(settings)

    def identity(settings: Mapping[str, Any]) -> str:
        try:
            return trial_key(workspace, target, settings, lambdas)
        except StrideError:  # they cannot be fitted, and the trial will say so
            return repr(sorted(settings.items(), key=str))

    most = 1 + sum(len(values) for values in grid.values())
    if options.search == "grid":
        most = 1 + int(np.prod([len(values) for values in grid.values()]))
    best: Trial | None = None
    first: Trial | None = None
    seconds, count = 0.0, 0
    with progress("tuning", min(most, options.trials or most), unit="trials") as bar:
        for trial, better in sweep(
            grid,
            start,
            evaluate,
            search=options.search,
            limit=options.trials,
            seed=workspace.seed,
            matters=matters,
            identity=identity,
        ):
            count += 1
            seconds += trial.seconds
            first = trial if first is None and trial.error is None else first
            best = trial if better else best
            yield trial, better
            bar.advance()
    if best is None or first is None:
        raise NumericalError("no trial could be fitted", fix="see the errors of the trials")
    found.append(
        Tuned(
            best=best,
            first=first,
            lambda_ratio=choose_lambda(best, usual, seed=workspace.seed),
            first_lambda=usual if usual in first.lambdas else first.lambdas[first.best],
            start=start,
            usual_lambda=usual,
            target=target,
            trials=count,
            response_seconds=measured - begun,
            trial_seconds=seconds,
        )
    )


def _target(
    workspace: Workspace, where: WorkspacePath, options: TuneOptions, place: Path
) -> tuple[Workspace, Target]:
    """The workspace that operators are fitted on, and what they are judged by."""
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
    epochs = options.epochs if options.epochs is not None else EPOCHS[workspace.model.kind]
    withheld = np.zeros(0, np.int64)
    kept_back = getattr(workspace.model, "held_out", ())
    if options.queries is not None:
        queries = read_queries(workspace, options.queries)
    elif len(kept_back) and options.held_out is None:
        queries = read_queries(workspace, Path("held-out"))
    else:
        queries, withheld = withheld_queries(
            workspace, options.held_out or min(_HELD_OUT, workspace.n_chunks // 8)
        )
        workspace = replace(workspace, chunks=WithheldChunks(workspace.index, withheld))
    masks = random_halves(workspace, withheld, options.responses)
    prints = workspace.index.attributes["fingerprints"]
    trainer: Trainer
    if options.criterion == "retrained":
        trainer = open_trainer(workspace, queries)
    else:
        trainer = ContinuedTrainer(
            where=replace(where, dtype="fp32"),
            queries=queries,
            n_chunks=workspace.n_chunks,
            fingerprints=prints["model"] + prints["corpus"],
            epochs=epochs,
            lr=options.lr,
            source=options.queries,
            peak_bytes=training_bytes(workspace.model, MOST_TOKENS) if workspace.model.table is None else 0,
        )
    seeds = [
        stream_key(workspace.seed, "tuning response", number) % (1 << 31) for number in range(len(masks))
    ]
    jobs = [Job(mask, seed) for mask, seed in zip(masks, seeds, strict=True)]
    missing = count_missing(trainer, jobs, store=place / "responses")
    what = "training the model anew" if options.criterion == "retrained" else "training the model further"
    note(f"{what} on {len(jobs)} random halves, {missing} of them to do; kept in {place}")
    outcomes = retrain(
        trainer, jobs, store=place / "responses", engine=options.engine, workers=options.workers
    )
    losses = np.array([outcome.losses for outcome in outcomes])  # (R, Q)
    return workspace, Target(queries, masks, -losses.T, options.criterion)


def tune_index(
    where: WorkspacePath, options: TuneOptions, on_trial: Callable[[TrialRecord], None]
) -> dict[str, Any]:
    """See `stride_cli.api.tune`."""
    import yaml

    workspace = where.open()
    found: list[Tuned] = []
    for number, (trial, better) in enumerate(tune(where, options, found), 1):
        on_trial(trial_record(number, trial, better, workspace, seed=workspace.seed))
    tuned = found[0]
    chosen, before = tuned.scores()
    shown = resolved(tuned.best.settings, workspace)
    # what nothing was gained by stays as it is, and is not made explicit: other indexes have other defaults
    settings = {f"train.{name}": value for name, value in tuned.changed().items() if name in _WRITTEN}
    own = workspace.index
    following = f"stride train --index {own.path} --overwrite" if settings else ""
    if settings or tuned.lambda_ratio != tuned.usual_lambda:
        settings["query.lambda_ratio"] = tuned.lambda_ratio
    if (shown["subsets"], shown["degree"]) != (own.n_subsets, own.degree):
        design = f"--subsets {shown['subsets']} --degree {shown['degree']}"
        following = f"build the index anew with {design}, then stride train"
    record: TuneRecord = {
        "schema": "stride.tune/1",
        "index": str(own.path),
        "criterion": tuned.target.name,
        "queries": len(tuned.target.queries),
        "responses": len(tuned.target.masks),
        **shown,
        "lambda_ratio": tuned.lambda_ratio,
        "score": _mean(chosen, workspace.seed),
        "gain": _mean(chosen - before, workspace.seed),
        "trials": tuned.trials,
        "written": "\n".join(
            f"{key}: {yaml.safe_dump(value).splitlines()[0]}" for key, value in settings.items()
        ),
        "path": "",
        "next": following,
        "seconds": {"responses": tuned.response_seconds, "trials": tuned.trial_seconds},
    }
    return {**record, "settings": settings}


def _mean(scores: np.ndarray, seed: int) -> QueryMean:
    found = mean_interval(scores, seed=seed, name="tuning")
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}


def trial_record(
    number: int, trial: Trial, better: bool, workspace: Workspace, *, seed: int = 0
) -> TrialRecord:
    """One trial as ``stride.trial/1``."""
    scored: list[LambdaScore] = [
        {"lambda_ratio": ratio, "score": interval.mean, "se": interval.se}
        for ratio, interval in (
            (ratio, mean_interval(scores, seed=seed, name="tuning"))
            for ratio, scores in zip(trial.lambdas, trial.scores, strict=False)
        )
    ]
    best = scored[trial.best] if scored else None
    record: TrialRecord = {
        "schema": "stride.trial/1",
        "trial": number,
        **resolved(trial.settings, workspace),
        "lambda_ratio": best["lambda_ratio"] if best else None,
        "score": best["score"] if best else None,
        "se": best["se"] if best else None,
        "lambdas": scored,
        "best": better,
        "kept": trial.kept,
        "seconds": trial.seconds,
    }
    if trial.error is not None:
        record["error"] = trial.error
    return record


def resolved(settings: Mapping[str, Any], workspace: Workspace) -> SettingsRecord:
    """Settings with the defaults of this model and index in place of None."""
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    plain = resolve_settings(ClosedOptions(space=settings["space"]), workspace.model, workspace.index)
    own = {
        "layer": plain.layer,
        # a classifier's training time stands in for damping unless one is given
        "damping": plain.damping if plain.time is None else None,
        "subsets": workspace.index.n_subsets,
        "degree": workspace.index.degree,
    }
    shown = {name: own[name] if settings[name] is None else settings[name] for name in own}
    return {
        "space": settings["space"],
        "layer": shown["layer"],
        "rank": settings["rank"],
        "damping": shown["damping"],
        "subsets": shown["subsets"],
        "degree": shown["degree"],
    }
