"""Operators of one model by either fit, with the step at which `exact` measures them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import NumericalError
from stride_cli.operators.gates import PackedGates

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.corpus_pass import PassWorkers
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators


@dataclass(frozen=True)
class FitRun:
    """How a fit is run.

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
    """Fit one operator per subset.

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

    saving: dict[str, Any] = {"scratch": run.scratch, "save_seconds": run.save_seconds}
    if isinstance(settings, ClosedSettings):
        operators = fit_closed(
            model, chunks, np.asarray(columns), n_subsets, settings, **saving, workers=run.workers
        )
    else:
        recipe = published_recipe()
        rows = recipe.build_rows(np.asarray(columns), n_subsets)
        operators = recipe.fit_sgd(model, chunks, *rows, settings, **saving)
    if not all(np.isfinite(gate).all() for gate in operators.gates if not isinstance(gate, PackedGates)):
        raise NumericalError(
            "the fitted gates are not finite", fix="raise --damping, or run with --dtype fp32"
        )
    return operators


def published_recipe() -> Any:
    """Import the paper's recipe, `stride_cli.research.paper.sgd`, by name."""
    return import_module("stride_cli.research.paper.sgd")


def set_step(steered: SteeredModel, chunks: ChunkReader, seed: int) -> float | None:
    """Choose the step of operators in closed form on two chunks; how well linear and exact agree there."""
    from stride_cli.operators.exact_response import choose_step

    operators = steered.operators
    if operators.fit != "closed":
        return None
    operators.step, agreement = choose_step(steered, _probe_batch(chunks, seed), seed=seed)
    return agreement


def _probe_batch(chunks: ChunkReader, seed: int) -> Batch:
    """Two scored chunks, cut to 128 tokens: enough to see where the response stops being linear."""
    from stride_cli.data.batches import pad_batch
    from stride_cli.randomness import stream

    rows, tokens, weights = [], [], []
    for row in stream(seed, "step probes", 1).permutation(chunks.n_chunks):
        ids, mask = chunks.chunk(int(row))
        start = max(0, int(mask.argmax()) - 64)
        if mask[start : start + 128].sum() > 0:
            rows.append(int(row))
            tokens.append(ids[start : start + 128])
            weights.append(mask[start : start + 128])
        if len(rows) == 2:
            break
    return pad_batch(np.asarray(rows), tokens, weights)
