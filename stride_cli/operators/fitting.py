"""Operators of an index's models by either fit, with the step at which `exact` measures them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.data.batches import BEFORE
from stride_cli.errors import NumericalError
from stride_cli.models.loading import Opener
from stride_cli.operators.designs import Designs
from stride_cli.operators.exact_response import paper_measurement
from stride_cli.operators.gates import PackedGates
from stride_cli.operators.initial_residuals import load_initial_residuals
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import array_name
from stride_cli.output import note

if TYPE_CHECKING:
    from index_format.reader import Index
    from index_format.writer import GroupWriter
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.checkpoints import Checkpoint
    from stride_cli.operators.corpus_pass import PassWorkers
    from stride_cli.operators.store import Operators


@dataclass(frozen=True)
class FitRun:
    """Saving and sharing of a fit.

    Attributes
    ----------
    scratch : directory, or None      where an interrupted fit continues from
    save_seconds : float              how often it is saved there
    base : path or None               of the model before its training; None: what its recipe says
    workers : PassWorkers or None     who goes over the corpus (closed); None: this process
    """

    scratch: Path | None = None
    save_seconds: float = 60.0
    base: str | None = None
    workers: PassWorkers | None = None


def fit_operators(
    model: AttributableModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    n_subsets: int,
    settings: Any,
    *,
    run: FitRun = FitRun(),
) -> Operators:
    """Fit one operator per subset, of one model.

    Parameters
    ----------
    columns : (n, d) unsigned        the subsets of each chunk
    settings : ClosedSettings or SgdSettings
    run : FitRun

    Raises
    ------
    NumericalError      a loss or a gate is not finite
    """
    from stride_cli.operators.closed import ClosedSettings, fit_closed

    columns = np.asarray(columns)
    given: dict[str, Any] = {"scratch": run.scratch, "save_seconds": run.save_seconds}
    if isinstance(settings, ClosedSettings):
        operators = fit_closed(model, chunks, columns, n_subsets, settings, **given, workers=run.workers)
    else:
        recipe = published_recipe()
        rows = recipe.build_rows(columns, n_subsets)
        operators = recipe.fit_sgd(model, chunks, *rows, settings, **given)
    if not all(np.isfinite(gate).all() for gate in operators.gates if not isinstance(gate, PackedGates)):
        raise NumericalError("fitted gates are not finite", fix="raise --damping, or run with --dtype fp32")
    return operators


def published_recipe() -> Any:
    """Import the paper's recipe, `stride_cli.research.paper.sgd`, by name."""
    return import_module("stride_cli.research.paper.sgd")


def fit_models(
    writer: GroupWriter,
    models: list[AttributableModel],
    chunks: ChunkReader,
    index: Index,
    settings_for: Callable[[AttributableModel], Any],
    checkpoints: Sequence[Checkpoint],
    run: FitRun,
) -> list[dict[str, Any]]:
    """Fit the index's own model, then each checkpoint; one model with its operators in memory at a time.

    With checkpoints, what is fitted is committed, and not fitted again by a fit that resumes.

    Parameters
    ----------
    writer : GroupWriter      of the index's operators, which are appended to it
    models : [the index's own model]; emptied, so that the caller need not keep it from being freed
    settings_for : ClosedSettings or SgdSettings of a model
    run : FitRun      whose scratch directory is the writer's

    Returns
    -------
    list of dict, one a model: ``attributes`` (what the group says of it) and ``report`` (its loss in nats or
    None, and seconds: load, fit, write)

    Raises
    ------
    NumericalError, ModelError, UsageError
    """
    scratch = writer.scratch_path("pass").parent
    done: list[dict[str, Any]] = list((writer.state or {}).get("fitted", ()))
    opener = Opener.like(models[0])
    given: dict[str, Any] = {"scratch": scratch, "save_seconds": run.save_seconds}
    load_initial_residuals(models[0], chunks, settings_for(models[0]), base=run.base, **given)
    for number in range(len(done), 1 + len(checkpoints)):
        # 1. The model: the index's own is there, a checkpoint takes its place
        begun, workers = time.perf_counter(), run.workers
        checkpoint = checkpoints[number - 1] if number else None
        if checkpoint is not None:
            models.clear()  # freed before the next one is loaded
            note(f"checkpoint {number} of {len(checkpoints)}: {checkpoint.path}")
            models.append(opener.load(checkpoint.path))
            workers = workers and workers.at(checkpoint.path, checkpoint.design_seed)
        loaded = time.perf_counter() - begun
        # 2. Its fit, on subsets of its own; without checkpoints there is one fit only
        place = scratch / f"checkpoint-{number}" if checkpoints else scratch
        place.mkdir(exist_ok=True)
        at = replace(run, scratch=place, workers=workers)
        design = Designs.of(index, checkpoint.design_seed if checkpoint else None)
        attributes, report = _fit_into(writer, number, models[0], chunks, design, settings_for(models[0]), at)
        # 3. What a fit that resumes need not do again
        if checkpoint is not None:
            attributes["design_seed"] = checkpoint.design_seed
        done.append({"attributes": attributes, "report": report | {"load": loaded}})
        if checkpoints:
            writer.commit({"fitted": done})
            shutil.rmtree(place)
    models.clear()
    return done


def _fit_into(
    writer: GroupWriter,
    number: int,
    model: AttributableModel,
    chunks: ChunkReader,
    design: Designs,
    settings: Any,
    run: FitRun,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit the operators of one model, and append them to the index's group: attributes, report."""
    begun = time.perf_counter()
    operators = fit_operators(model, chunks, np.asarray(design.columns), design.n_subsets, settings, run=run)
    agreement = None
    if operators.fit == "closed":  # how far its gates may go: where linear and exact agree on two chunks
        paper, steered = paper_measurement(), SteeredModel.of(model, operators)
        probes = paper.probe_batch(chunks, settings.seed)
        operators.step, agreement = paper.choose_step(steered, probes, seed=settings.seed)
    fitted = time.perf_counter()
    arrays, attributes = operators.to_arrays()
    attributes |= {"settings": asdict(settings), "step_agreement": agreement}
    attributes["model_fingerprint"] = model.fingerprint
    for name, values in arrays.items():
        writer.append(array_name(name, number), values)
    if number == 0 and operators.averaged and chunks.before is not None:
        writer.append(BEFORE, np.asarray(chunks.before))
    curve = operators.log.get("loss", np.zeros(0))
    loss = float(curve[-1]) if len(curve) else None
    return attributes, {"loss": loss, "fit": fitted - begun, "write": time.perf_counter() - fitted}
