"""Fit the operators of an index, or add projections to those that are there, and publish them in it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.data.workspace import open_model
from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of_index
from stride_cli.models.spec import GivenModel, ModelSpec
from stride_cli.operators.options import (
    ClosedOptions,
    FitRunOptions,
    SgdOptions,
    TrainOptions,
    like_own,
    resolve_settings,
)
from stride_cli.output import note, progress
from stride_cli.remembered import find_recorded
from stride_cli.startup import keep_imported, without_collection

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from index_format.reader import Index
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.corpus_pass import PassWorkers
    from stride_cli.schema.train_records import TrainRecord

_MANY = 10  # chunks a subset: with more the recovery by itself finds little


@progress("fitting operators")
def fit_index(
    index_path: str | Path | RemotePath,
    options: TrainOptions | None = None,
    *,
    model: AttributableModel | GivenModel | None = None,
    overwrite: bool = False,
    run: FitRunOptions | None = None,
    resumes: bool = False,
) -> TrainRecord:
    """Fit the operators of an index and publish them in it; an interrupted fit continues.

    Where there are operators, and projections are asked for without `overwrite`, only these are added.

    Parameters
    ----------
    index_path : path of the index; `IndexReadOnly` for a URL or a zip file
    options : ClosedOptions or SgdOptions
    model : one that is loaded, its path or `ModelSpec`; default: where the index says that it is
    overwrite : replace operators that are already there
    run : who fits, and how often an unfinished fit is saved; workers open the model where it was
        loaded from
    resumes : where operators are there, fitted by default, and no calibration: do nothing, which comes next

    Returns
    -------
    dict      what was fitted: fit, space, layer, K, gate size, coverage, seconds, …

    Raises
    ------
    IndexMismatch      the model or tokenizer is not the index's; a checkpoint has another tokenizer
    ModelError         a checkpoint cannot be loaded
    IndexExists        operators (and all projections that are asked for) are there, ``overwrite`` is False
    """
    from index_format.durable import require_space
    from index_format.errors import IndexExists
    from index_format.location import local_directory
    from index_format.reader import Index
    from index_format.writer import GroupWriter

    (SgdOptions if isinstance(options, SgdOptions) else ClosedOptions).given(options)
    with without_collection():  # most of it is importing
        from stride_cli.data.batches import ChunkReader
        from stride_cli.operators.checkpoints import find_checkpoints
        from stride_cli.operators.fitting import FitRun, fit_models
        from stride_cli.operators.projections import FORM
        from stride_cli.operators.spaces import known_gates
        from stride_cli.training.dry_run import stored_bytes

        started = time.perf_counter()
        index = Index.open(local_directory(index_path))
        keep_imported()
    # 1. Refuse what cannot be, before a model is loaded
    options, run = options or ClosedOptions(), FitRunOptions.given(run)
    if run.in_ranges and isinstance(options, SgdOptions):
        raise UsageError(
            "--workers and --engine divide a pass over the corpus, and --fit sgd steps one after the other",
            fix="leave them out, or --fit sgd",
        )
    adds = index.has("operators") and not overwrite
    if adds and not (isinstance(options, ClosedOptions) and options.project):
        # a kill may have fallen between the fit and its calibration
        judged = index.has("calibration") or kind_of_index(index) == "classifier"
        if resumes and not judged and options == ClosedOptions():
            note("the operators are there: going on with their calibration")
            own = index.group_attributes("operators")
            listed = own.get("checkpoints", [])
            not_now = {"loss": math.nan, "load": 0.0, "fit": 0.0, "write": 0.0}
            return _train_record(index_path, index, own, listed, [not_now] * (1 + len(listed)), (0.0, 0.0))
        raise IndexExists(
            f"index '{index_path}' has operators already" + ("" if judged else ", and no calibration"),
            fix=f"{'query them' if judged else 'stride calibrate'}, or fit anew with --overwrite",
        )
    checkpoints = [] if adds else find_checkpoints(index, options.checkpoints)
    # 2. The model, and the settings that fit it
    if model is None or isinstance(model, str | Path | ModelSpec):
        model = open_model(index, model)
    if adds:
        assert isinstance(options, ClosedOptions)
        return _project(index_path, index, options, model, started, run)
    options = like_own(options, model, index)
    settings = resolve_settings(options, model, index)
    chunks = ChunkReader(index, model)
    _check_chunks(index_path, index, chunks, model, projects=bool(getattr(settings, "project", 0)))
    model.check_padding(int(chunks.lengths.max(initial=2)))
    if isinstance(options, ClosedOptions) and not model.classes:
        gates = known_gates(settings.spaces, settings.ranks, model, settings.n_buckets)
        n_bytes = (1 + len(checkpoints)) * stored_bytes(index, model, gates, settings.project)
        require_space(index.directory, n_bytes, what=f"fitting {index_path}")
    for said in model.remarks(settings.spaces):
        note(said)
    # 3. What decides the operators: an interrupted fit goes on only where all of it is the same
    base = getattr(options, "base", None)
    identity: dict[str, Any] = {"settings": asdict(settings), "fit": type(settings).__name__}
    identity |= {"dtype": str(model.dtype), "index": index.digest}  # chunks may have been appended
    identity |= {"base": base} if base else {}
    identity |= {"projections": FORM} if getattr(settings, "project", 0) else {}  # their form may change
    if checkpoints:
        identity["checkpoints"] = [(found.fingerprint, found.settings) for found in checkpoints]
    build_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    workers = _workers(run, index, model)
    models = [model]
    del model  # `fit_models` frees it before the next one is loaded
    loaded = time.perf_counter() - started
    # 4. Fit, and publish in one step
    with GroupWriter(index_path, "operators", build_key, overwrite=overwrite) as writer:
        fitted = fit_models(
            writer,
            models,
            chunks,
            index,
            lambda model: resolve_settings(options, model, index),
            checkpoints,
            FitRun(save_seconds=run.save_seconds, workers=workers, base=base),
        )
        publishing = time.perf_counter()
        own, *others = (entry["attributes"] for entry in fitted)
        listed = [
            {**found.record(Path(str(index_path))), **entry}
            for found, entry in zip(checkpoints, others, strict=True)
        ]
        own |= {"recipe": options.recipe} | ({"base": base} if base else {})
        writer.publish(own | ({"checkpoints": listed} if listed else {}))
    reports = [entry["report"] for entry in fitted]
    published = time.perf_counter() - publishing
    return _train_record(index_path, index, own, listed, reports, (loaded, published))


def _check_chunks(
    index_path: Any, index: Index, chunks: ChunkReader, model: AttributableModel, *, projects: bool
) -> None:
    """Refuse an index without a scored token; warn where its subsets alone tell few chunks apart."""
    if chunks.scored_tokens() == 0:
        raise UsageError(
            f"no token of index '{index_path}' is scored, so there is nothing to fit",
            fix="build the index from documents longer than one token, with non-empty responses",
        )
    if index.n_chunks > _MANY * index.n_subsets and not model.classes and not projects:
        note(
            f"without projections {index.n_subsets:,} subsets are all there is to tell {index.n_chunks:,} "
            f"chunks apart; an index built with --subsets {index.n_chunks // 3:,} tells more of them"
        )


def _workers(run: FitRunOptions, index: Index, model: AttributableModel) -> PassWorkers | None:
    """Choose the workers that fit the operators of an index; None: this process alone."""
    from stride_cli.models.loading import Opener
    from stride_cli.operators.corpus_pass import ModelPlace, PassWorkers
    from stride_cli.parallel import available_bytes, available_cores, check_engine

    check_engine(run.engine)
    if not run.in_ranges:
        return None
    opener = Opener.like(model)
    threads = 1 if run.engine == "ray" else max(1, available_cores() // (run.workers or 1))
    # on several GPUs each worker sees its own
    kind = opener.spec.device.partition(":")[0]
    spec = replace(model.spec.absolute(), device=kind, dtype=opener.spec.dtype)
    place = ModelPlace(Path(str(index.path)).absolute(), index.digest, spec)
    free = available_bytes() if run.engine == "local" and kind == "cpu" else None
    return PassWorkers(place, run.engine, run.workers, threads, free)


def _project(
    index_path: str | Path | RemotePath,
    index: Index,
    options: ClosedOptions,
    model: AttributableModel,
    started: float,
    run: FitRunOptions,
) -> TrainRecord:
    """Add projections to operators that are there."""
    from index_format.writer import GroupWriter
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.projection_pass import check_projectable, project_index
    from stride_cli.operators.projections import FORM

    check_projectable(index, options, model)
    operators = index.group_attributes("operators")["build_key"]
    size = options.project or 0
    identity = [index.digest, operators, size, str(model.dtype), FORM]
    build_key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    workers = _workers(run, index, model)
    loaded = time.perf_counter() - started
    with GroupWriter(index_path, "operators", build_key) as writer:
        own, reports = project_index(
            writer,
            index,
            model,
            ChunkReader(index, model),
            size,
            save_seconds=run.save_seconds,
            workers=workers,
        )
        publishing = time.perf_counter()
        writer.publish({name: value for name, value in own.items() if name not in ("arrays", "build_key")})
    published = time.perf_counter() - publishing
    return _train_record(index_path, index, own, own.get("checkpoints", []), reports, (loaded, published))


def _train_record(
    index_path: str | Path | RemotePath,
    index: Index,
    own: dict[str, Any],
    listed: Sequence[dict[str, Any]],
    reports: Sequence[dict[str, Any]],
    around: tuple[float, float],
) -> TrainRecord:
    """Make the record that `fit_index` returns; `around` are seconds of loading, and of publishing."""
    return {
        "schema": "stride.train/1",
        "index": str(index_path),
        "fit": own["fit"],
        "space": own["space"],
        "layer": own["layer"],
        "subsets": index.n_subsets,
        "gate_size": own["gate_size"],
        "project": own["project"],
        "projected": own["projected"],
        # of all chunks that there are now: projections may be made of those that no operator has seen
        "coverage": own["coverage"] * index.fitted_share,
        "step": own["step"],
        "step_agreement": own["step_agreement"],
        "loss": reports[0]["loss"],
        "checkpoints": [
            {
                "path": find_recorded(entry["path"], index.path) or entry["path"],
                "fingerprint": entry["model_fingerprint"],
                "space": entry["space"],
                "layer": entry["layer"],
                "step_agreement": entry["step_agreement"],
                "loss": report["loss"],
                "seconds": report["load"] + report["fit"] + report["write"],
            }
            for entry, report in zip(listed, reports[1:], strict=True)
        ],
        "seconds": {
            "load": around[0] + sum(report["load"] for report in reports),
            "fit": sum(report["fit"] for report in reports),
            "write": around[1] + sum(report["write"] for report in reports),
        },
    }
