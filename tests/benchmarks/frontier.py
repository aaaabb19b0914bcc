"""Attribution quality against what is kept of each chunk: how many subsets, how many numbers.

The gates of closed-form operators answer linearly, so what K subsets would measure follows from every chunk's
own gate gradient: one pass over the corpus gives the direct readout (Q, n), its sums over the members of any
design give that design's measurements, and the Lasso recovers influences from them. LDS of each against the
retrained models in the index's ``truth/``, with the joint bootstrap standard error over queries and subsets.

`subsets`: K from n / 100 to n, with random subsets (the default), or subsets that take documents whole, so
that neighbours share theirs. `read`: recovery, then so many of its
likeliest chunks read from their own gradients (``--read``), chosen by the recovery alone, or by the pairs
of tokens that chunks share with the query too, by projections of so many bytes of every chunk
(``--project``), or by pairs and projections; `recall10` and `recall50`: how many of the chunks that are
strongest by the direct readout are among those read. `lds_shrunk`: the same scores, small ones made smaller
as `stride query` does in pre-training. `bytes_per_chunk`: of gates in int8, the design and projections;
`projection_bytes` of the latter alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from index_format.design import build_columns
from stride_cli.attribution.defaults import SHRINKAGE, recovery_defaults
from stride_cli.attribution.direct import query_gradients
from stride_cli.attribution.estimates import Estimates
from stride_cli.attribution.pipeline import additive_measurement
from stride_cli.data.workspace import WorkspacePath
from stride_cli.models.language.language_recipe import was_finetuned
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.corpus_pass import go_over_corpus
from stride_cli.operators.gradient_sums import PassSettings
from stride_cli.operators.gradients import gradient_products
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import emit, note
from stride_cli.recovery.candidates import candidates, with_weights
from stride_cli.recovery.lasso import solve_batch
from stride_cli.recovery.problem import LassoSettings, Solution
from stride_cli.recovery.shrinkage import shrink
from stride_cli.research.evaluation.metrics import lds, measured_response, predicted_response
from stride_cli.research.evaluation.resampling import Resampler
from stride_cli.research.training.truth import Truth
from tests.benchmarks._machine import machine

PER_SUBSET = (100, 30, 10, 5, 3, 2, 1.5, 1)  # n / K
READ, READ_PER_SUBSET = (50, 100, 200, 400, 800), (100, 30, 10, 3)
BYTES = (128, 512, 1024, 2048)  # a chunk
RECALL = (10, 50)
_QUERY_TOKENS = 4096


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    task = WorkspacePath(Path(given.index), ModelSpec(given.model)).open()
    truth = Truth.from_index(task.index, alpha=given.alpha)
    settings = resolve_settings(ClosedOptions(space=given.space), task.model, task.index)
    degree = task.index.degree
    note("a pass over the corpus for each size of projections, and one")
    direct, seconds, size = readouts(task, truth.queries, settings)
    about, quality = facts(task, truth, settings, size, len(truth.queries)), judge(task, truth)

    def cost(columns: np.ndarray, n_subsets: int, projection_bytes: float = 0.0) -> dict[str, float]:
        # int8 gates with their scales, and the design's own rows
        held = (n_subsets * size * (1 + 4 / 256) + columns.nbytes) / task.n_chunks + projection_bytes
        per_subset = task.n_chunks / n_subsets
        return {"subsets": n_subsets, "chunks_per_subset": per_subset, "bytes_per_chunk": held}

    yield {"what": "direct", **quality(direct - direct.mean(axis=1, keepdims=True))} | about
    defaults = recovery_defaults(task.index, task.model, "closed", None)
    for ratio in READ_PER_SUBSET:
        n_subsets = max(2 * degree, round(task.n_chunks / ratio))
        columns = columns_of(task, n_subsets, degree, "random")
        solutions = solve(direct, columns, n_subsets, defaults["lambda_ratio"])
        for (by, kept), second in seconds.items():
            held = kept + 4.0 if kept else 0.0
            about_it = {"what": "read", "by": by, "projection_bytes": held}
            same = {**about_it, **cost(columns, n_subsets, held)}
            for count in READ:
                scores, found = read(direct, columns, solutions, n_subsets, count, second)
                yield {**same, "read": count, **found, **quality(scores)} | about
    for ratio in PER_SUBSET:
        n_subsets = max(2 * degree, round(task.n_chunks / ratio))
        for design in ("random", "documents"):
            columns = columns_of(task, n_subsets, degree, design)
            scores = recover(direct, columns, n_subsets, defaults["lambda_ratio"])
            same = {"what": "subsets", "design": design, **cost(columns, n_subsets)}
            yield {**same, **quality(scores)} | about


def facts(task: Any, truth: Truth | None, settings: Any, size: int, queries: int) -> dict[str, Any]:
    """What all records of a run share."""
    retrained = {}
    if truth is not None:
        retrained = {"subsets_retrained": truth.n_subsets, "seeds": truth.n_seeds}
    return {
        "benchmark": "frontier",
        "training": "fine-tuning" if was_finetuned(task.model.path) else "pre-training",
        "chunks": task.n_chunks,
        "space": "+".join(settings.spaces),
        "gates": size,
        **retrained,
        "queries": queries,
    } | machine("torch", "numpy", "numba")


def judge(task: Any, truth: Truth) -> Callable[[np.ndarray], dict[str, float]]:
    """LDS of scores (Q, n), and of the same scores shrunk, each with its standard error."""
    resampler = Resampler(measured_response(truth.losses), seed=task.index.seed)

    def quality(scores: np.ndarray) -> dict[str, float]:
        record = {}
        for name, values in (("lds", scores), ("lds_shrunk", shrink(scores, SHRINKAGE))):
            found = lds(values, truth.masks, truth.losses).spearman
            drawn = resampler.draw("spearman", predicted_response(values, truth.masks), found).estimate()
            record |= {name: drawn.mean, f"{name}_se": drawn.joint.se}
        return record

    return quality


def readouts(
    task: Any, queries: Any, settings: Any
) -> tuple[np.ndarray, dict[tuple[str, int], np.ndarray | None], int]:
    """Direct readout (Q, n), second estimates by kind and bytes, and p."""
    steered = fit_spaces(task.model, task.chunks, settings)
    batches = [queries.batch(group) for group in queries.groups(_QUERY_TOKENS)]
    asked = query_gradients(steered, batches)
    tokens = settings.batch_tokens
    products = gradient_products(steered, asked, task.chunks, batch_tokens=tokens)
    seconds: dict[tuple[str, int], np.ndarray | None] = {("recovery", 0): None}
    for size in BYTES:
        _, made = go_over_corpus(steered, task.chunks, PassSettings(tokens, size, settings.seed))
        seen = np.ones(task.n_chunks, np.uint8)
        kept = Operators(list(steered.spaces), [], steered.layer, "closed", seen, projections=made)
        projected = SteeredModel.of(task.model, kept)
        found, every = Estimates.of(projected, queries, batches, task), slice(0, task.n_chunks)
        each = [found.of_query(query) for query in range(len(queries))]
        seconds["pairs", 0] = np.stack([own.pairs.standard(every) for own in each])
        seconds["projections", size] = np.stack([own.by_projections(every) for own in each])
        seconds["pairs and projections", size] = np.stack([own.strength(every) for own in each])
    return products.sum(axis=0).astype(np.float32), seconds, sum(space.gate_size for space in steered.spaces)


def columns_of(task: Any, n_subsets: int, degree: int, design: str) -> np.ndarray:
    """Subsets of every chunk, (n, d): drawn for each, or for each document."""
    seed = task.index.seed
    if design == "random":
        return build_columns(0, task.n_chunks, n_subsets=n_subsets, degree=degree, seed=seed)
    document = np.asarray(task.index.array("corpus/chunk_document"))
    drawn = build_columns(0, int(document.max()) + 1, n_subsets=n_subsets, degree=degree, seed=seed)
    return drawn[document]


def measured(direct: np.ndarray, columns: np.ndarray, n_subsets: int) -> np.ndarray:
    """What operators of that design would measure, (Q, K) float64."""
    sizes = np.bincount(columns.reshape(-1), minlength=n_subsets)
    sums = np.zeros((len(direct), n_subsets))
    for row, total in zip(direct, sums, strict=True):
        for drawn in columns.T:
            total += np.bincount(drawn, weights=row, minlength=n_subsets)
    return additive_measurement(sums / np.maximum(sizes, 1), sizes)


def recover(direct: np.ndarray, columns: np.ndarray, n_subsets: int, ratio: float) -> np.ndarray:
    """Influences (Q, n) by the Lasso from what operators of that design would measure."""
    return dense(solve(direct, columns, n_subsets, ratio))


def solve(direct: np.ndarray, columns: np.ndarray, n_subsets: int, ratio: float) -> list[Solution]:
    """The Lasso of each query."""
    y = measured(direct, columns, n_subsets)
    return solve_batch(columns, y, LassoSettings(lambda_ratio=ratio, intercept=True), n_subsets=n_subsets)


def dense(solutions: list[Solution]) -> np.ndarray:
    """Weights (Q, n) float32."""
    scores = np.zeros((len(solutions), solutions[0].n_chunks), np.float32)
    for row, solution in zip(scores, solutions, strict=True):
        row[solution.indices] = solution.values
    return scores


def read(
    direct: np.ndarray,
    columns: np.ndarray,
    solutions: list[Solution],
    n_subsets: int,
    count: int,
    second: np.ndarray | None,
) -> tuple[np.ndarray, dict[str, float]]:
    """The solutions' weights, with those of the likeliest chunks replaced by the direct readout; and how many
    of its strongest are among these, by `RECALL`."""
    influences = (direct - direct.mean(axis=1, keepdims=True)) * n_subsets / columns.size
    estimates = [None] * len(solutions) if second is None else second
    chosen = [
        candidates(columns, solution, count, None if estimate is None else estimate.__getitem__)
        for solution, estimate in zip(solutions, estimates, strict=True)
    ]
    order = np.argsort(-direct, axis=1)
    found = {
        f"recall{most}": float(
            np.mean([np.isin(top[:most], own.chunks).mean() for top, own in zip(order, chosen, strict=True)])
        )
        for most in RECALL
    }
    weights = [
        with_weights(solution, own.chunks, row[own.chunks], others=own.others)
        for solution, own, row in zip(solutions, chosen, influences, strict=True)
    ]
    return dense(weights), found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks frontier", description=__doc__)
    parser.add_argument("--index", required=True, help="with a truth, of a language model")
    parser.add_argument("--model")
    parser.add_argument("--space")
    parser.add_argument("--alpha", type=float, default=0.5)
    for row in run(parser.parse_args(arguments)):
        emit(row)
