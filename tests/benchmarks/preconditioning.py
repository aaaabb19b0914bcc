"""What is left to gain in gate space: the direct readout ``w = G g_x``, corrected in ways that it leaves out.

G (n, p) holds every chunk's whitened gate gradient as the fit weighs it, g_x a query's. Against the
retrained models in the index's ``truth/``, each with its difference to the direct readout, paired over
queries:

`direct`: as it is. `redundancy`: ``(I + K / γ)⁻¹ w`` with ``K = G Gᵀ`` and γ times its mean diagonal: the
query's gradient preconditioned by the chunks' own second moments, which Kronecker factors cannot hold, so
that chunks that say the same share what they explain (kernel ridge regression). With `rank`, along so many
leading directions of K alone; with `diagonal` false of what K has beside its diagonal, which takes the same
part of every chunk: what `stride query` does, by projections. `layers`: non-negative weights of every layer
and space, which predict the retrained models' responses to every second query best by least squares; judged
on the others. `query residuals`: the query's tokens, too, count as on average over training. `power`:
sign(w) |w|^e. Of several models (`--checkpoints`) their readouts, each at unit spread, added up; and
`less`: the final model's without a share of another's. Of the model before its fine-tuning that is what the
fine-tuning did not teach (Wu et al. 2024, arXiv:2410.01285).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import UsageError
from stride_cli.operators.beginnings import know_beginnings
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.gradients import chunk_gradients, gate_gradients, weighted_gradients
from stride_cli.operators.options import ClosedOptions, like_own, resolve_settings
from stride_cli.output import emit, note
from stride_cli.research.evaluation.metrics import lds, measured_response, predicted_response
from stride_cli.research.methods.gradients.passes import load_checkpoint
from stride_cli.training.truth import Truth
from tests.benchmarks._machine import machine

RIDGES = (30.0, 10.0, 5.0, 3.0, 1.0)  # γ, times the mean diagonal of K
RANKS = (1, 16, 64, 256)
POWERS = (0.85, 1.1, 1.15)
SHARES = (0.25, 0.5, 1.0)
_KEPT = 64  # directions that `stride query` looks at, at most
_COMBINED = 10.0  # γ of sums over models, and of `power`
_MOST_BYTES = 8 << 30
_QUERY_TOKENS = 4096
_COLUMNS = 1 << 14
_LARGEST = 64.0  # length of a row as it is held in half precision


@dataclass(frozen=True)
class Products:
    """What one model's gradients come to.

    Attributes
    ----------
    parts : (P, Q, n) float64      products of queries' and chunks' gradients, by layers and spaces
    averaged : (Q, n) float64      of queries whose tokens count as on average over training
    kernel : (n, n) float64        K
    """

    parts: np.ndarray
    averaged: np.ndarray
    kernel: np.ndarray

    @property
    def direct(self) -> np.ndarray:
        return self.parts.sum(axis=0)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    task = WorkspacePath(Path(given.index), given.model).open()
    truth = Truth.from_index(task.index, alpha=given.alpha)
    about = {
        "benchmark": "preconditioning",
        "suite": given.suite,
        "chunks": task.n_chunks,
        "subsets_retrained": truth.n_subsets,
        "seeds": truth.n_seeds,
        "queries": len(truth.queries),
    } | machine("torch", "numpy", "scipy")
    models = [task.model, *(load_checkpoint(task, Path(path)) for path in given.checkpoints or ())]
    found = [products(task, model, truth) for model in models]
    for row in compare(truth, found[0]):
        yield {"model": "final", **row} | about
    names = ["final", *(Path(path).name for path in given.checkpoints or ())]
    judge = against(truth, found[0].direct)
    for name, each in zip(names[1:], found[1:], strict=True):
        yield {"model": name, "what": "direct", **judge(each.direct)} | about
        for ridge in RIDGES:
            scores = corrected(each, ridge)
            yield {"model": name, "what": "redundancy", "ridge": ridge, **judge(scores)} | about
        for share in SHARES:
            scores = added([found[0].direct, -each.direct], [1.0, share])
            yield {"model": name, "what": "less", "share": share, **judge(scores)} | about
    if len(found) > 1:
        together = "+".join(names)
        direct, less = ([each.direct for each in found], [corrected(each, _COMBINED) for each in found])
        yield {"model": together, "what": "direct", **judge(added(direct))} | about
        scores = added(less)
        yield {"model": together, "what": "redundancy", "ridge": _COMBINED, **judge(scores)} | about


def products(task: Any, model: Any, truth: Truth) -> Products:
    """One pass over the corpus; gradients are held in half precision, every row by its own length.

    Raises
    ------
    UsageError      they do not fit in memory
    """
    # checkpoints have no recipe that says how they were trained: the spaces are those of the final model
    settings = resolve_settings(like_own(ClosedOptions(), task.model, task.index), model, task.index)
    if task.chunks.before is None:
        know_beginnings(task.model, task.chunks, settings)
    steered = fit_spaces(model, task.chunks, settings)
    sizes = [space.gate_size for space in steered.spaces]
    n, p = task.n_chunks, sum(sizes)
    if 2 * n * p > _MOST_BYTES:
        raise UsageError(
            f"gradients of {n:,} chunks in {p:,} gates do not fit in {_MOST_BYTES:,} bytes",
            fix="use a smaller suite",
        )
    starts = np.cumsum([0, *sizes])
    bounds = [
        (int(start) + part.start, int(start) + part.stop)
        for start, space in zip(starts, steered.spaces, strict=False)
        for part in space.parts()
    ]
    batches = [truth.queries.batch(group) for group in truth.queries.groups(_QUERY_TOKENS)]
    order = np.concatenate([batch.rows for batch in batches])
    asked = torch.cat([torch.cat(gate_gradients(steered, batch)[0], dim=1) for batch in batches])
    # lengths of chunks are evened out, and queries' are not
    plain = replace(steered, averaged=True, normalized=0.0)
    late = torch.cat([torch.cat(chunk_gradients(plain, batch)[0], dim=1) for batch in batches])
    held, lengths = np.empty((n, p), np.float16), np.zeros(n, np.float32)
    for batch, gradients in weighted_gradients(steered, task.chunks, np.arange(n)):
        rows = torch.cat(gradients, dim=1).numpy()
        length = np.linalg.norm(rows, axis=1) / _LARGEST
        lengths[batch.rows] = length
        held[batch.rows] = rows / np.where(length > 0, length, 1.0)[:, None]
    kernel = np.zeros((n, n))
    parts = np.zeros((len(bounds), len(order), n))
    averaged = np.zeros((len(order), n))
    for number, (start, stop) in enumerate(bounds):
        for first in range(start, stop, _COLUMNS):
            columns = slice(first, min(stop, first + _COLUMNS))
            block = torch.from_numpy(held[:, columns].astype(np.float32) * lengths[:, None])
            kernel += (block @ block.T).numpy()
            parts[number, order] += (asked[:, columns] @ block.T).numpy()
            averaged[order] += (late[:, columns] @ block.T).numpy()
    return Products(parts, averaged, kernel)


def compare(truth: Truth, found: Products) -> Iterator[dict[str, Any]]:
    """Every correction of one model's readout."""
    judge = against(truth, found.direct)
    yield {"what": "direct", **judge(found.direct)}
    for ridge in RIDGES:
        yield {"what": "redundancy", "ridge": ridge, **judge(corrected(found, ridge))}
    for rank in RANKS:
        scores = corrected(found, _COMBINED, rank)
        yield {"what": "redundancy", "ridge": _COMBINED, "rank": rank, **judge(scores)}
    scores = corrected(found, _COMBINED, _KEPT, diagonal=False)
    yield {"what": "redundancy", "ridge": _COMBINED, "rank": _KEPT, "diagonal": False, **judge(scores)}
    yield {"what": "query residuals", **judge(found.averaged)}
    for power in POWERS:
        for what, scores in (("power", found.direct), ("redundancy, power", corrected(found, _COMBINED))):
            yield {"what": what, "power": power, **judge(np.sign(scores) * np.abs(scores) ** power)}
    # each half of the queries is judged by what the other says
    chosen = np.arange(len(truth.queries)) % 2 == 0
    scores = found.direct
    for half in (chosen, ~chosen):
        scores[~half] = np.tensordot(layer_weights(truth, found.parts, half), found.parts, 1)[~half]
    yield {"what": "layers", **judge(scores)}


def corrected(found: Products, ridge: float, rank: int | None = None, *, diagonal: bool = True) -> np.ndarray:
    """(I + K / γ)⁻¹ w of every query, (Q, n), with γ = ridge × the mean diagonal of K; along so many leading
    directions, of K or of what it has beside its diagonal."""
    kernel = found.kernel / (np.trace(found.kernel) / len(found.kernel))
    if not diagonal:
        kernel -= np.diag(np.diag(kernel))
        ridge += 1.0
    values, vectors = np.linalg.eigh(kernel)  # ascending
    values = values.clip(0)
    if rank is not None:
        values[:-rank] = 0.0
    scores: np.ndarray = (found.direct @ vectors * (ridge / (ridge + values))) @ vectors.T
    return scores


def added(scores: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> np.ndarray:
    """Scores of several models, each query's at unit spread, added up."""
    factors = weights or [1.0] * len(scores)
    parts = [
        factor * each / each.std(axis=1, keepdims=True) for factor, each in zip(factors, scores, strict=True)
    ]
    return np.sum(parts, axis=0)


def layer_weights(truth: Truth, parts: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Non-negative weights (P,) with which parts' predictions are closest to what was measured of some
    queries, (Q,) bool, all at unit spread over subsets."""

    def centred(values: np.ndarray) -> np.ndarray:
        away: np.ndarray = values - values.mean(axis=-1, keepdims=True)
        return away

    measured = centred(measured_response(truth.losses))[queries]  # (q, R)
    measured /= np.linalg.norm(measured, axis=1, keepdims=True)
    predicted = np.stack([centred(predicted_response(part, truth.masks)[queries]) for part in parts])
    predicted /= np.linalg.norm(predicted.sum(axis=0), axis=1)[None, :, None]
    weights: np.ndarray = nnls(predicted.reshape(len(parts), -1).T, measured.reshape(-1))[0]
    return weights


def against(truth: Truth, reference: np.ndarray) -> Callable[[np.ndarray], dict[str, float]]:
    """LDS of scores (Q, n), and how far it is from the reference's; standard errors are over queries."""
    base = lds(reference, truth.masks, truth.losses).spearman

    def judge(scores: np.ndarray) -> dict[str, float]:
        found = lds(scores, truth.masks, truth.losses).spearman
        away, root = found - base, np.sqrt(len(found))
        return {
            "lds": float(found.mean()),
            "lds_se": float(found.std(ddof=1) / root),
            "difference": float(away.mean()),
            "difference_se": float(away.std(ddof=1) / root),
        }

    return judge


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks preconditioning", description=__doc__)
    parser.add_argument("--index", required=True, help="with a truth, of a language model")
    parser.add_argument("--model")
    parser.add_argument("--suite", default="instructions")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--checkpoints", nargs="*", help="further models, added up with the final one")
    given = parser.parse_args(arguments)
    note("a pass over the corpus for each model, and the chunks' products with each other")
    for row in run(given):
        emit(row)
