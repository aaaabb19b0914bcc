"""Attribution quality against what is kept of each chunk: how many subsets, how many numbers.

The gates of closed-form operators answer linearly, so what K subsets would measure follows from every chunk's
own gate gradient: one pass over the corpus gives the direct readout (Q, n), its sums over the members of any
design give that design's measurements, and the Lasso recovers influences from them. LDS of each against the
retrained models in the index's ``truth/``, with the joint bootstrap standard error over queries and subsets.

`subsets`: K from n / 100 to n, with random subsets (the default), or subsets that take documents whole, so
that neighbours share theirs. `debiased`: least squares on what the Lasso chose. `two-level`: half of the
subsets over all chunks, the other half, for each query anew, over the quarter of the chunks that the first
half points at; their gates would have to be fitted for each query. `read`: recovery, then so many of its
likeliest chunks read from their own gradients (``--refine``), chosen by the recovery alone (no bits), or by
sketches of so many bits of every chunk too (``--sketch``). `lds_shrunk`: the same scores, small ones made
smaller as `stride query` does in pre-training. `bytes_per_chunk`: of gates in int8, the design and sketches;
`sketch_bytes` of the latter alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from index_format.design import build_columns
from stride_cli.evaluation.metrics import lds, measured_response, predicted_response
from stride_cli.evaluation.resampling import Resampler
from stride_cli.evaluation.scoring import TaskPath, open_task
from stride_cli.evaluation.truth import Truth
from stride_cli.measurement.additive import additive_measurement
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.gradients import gate_gradients, gradient_products
from stride_cli.operators.options import TrainOptions, resolve_settings
from stride_cli.operators.sketches import Sketches, encode, principal_directions
from stride_cli.output import emit, note
from stride_cli.recovery.defaults import SHRINKAGE, recovery_defaults
from stride_cli.recovery.lasso import solve_batch
from stride_cli.recovery.problem import Solution
from stride_cli.recovery.refinement import candidates, with_weights
from stride_cli.recovery.shrinkage import shrink
from tests.benchmarks._machine import machine

PER_SUBSET = (100, 30, 10, 5, 3, 2, 1.5, 1)  # n / K
READ, READ_PER_SUBSET = (50, 100, 200, 400, 800), (100, 30, 10, 3)
BITS = (0, 64, 256, 512, 768)
_CHUNKS_AT_ONCE = 256
_QUERY_TOKENS = 4096


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    task = open_task(TaskPath(Path(given.index), given.model))
    truth = Truth.from_index(task.index, alpha=given.alpha)
    settings = resolve_settings(TrainOptions(fit="closed", space=given.space), task.model, task.index)
    degree = task.index.degree
    designs = {
        count: columns_of(task, count, degree, "random")
        for count in (max(2 * degree, round(task.n_chunks / ratio)) for ratio in READ_PER_SUBSET)
    }
    note("two passes over the corpus")
    direct, sketches, size = readouts(task, truth.queries, settings, designs)
    resampler = Resampler(measured_response(truth.losses), seed=task.index.seed)
    about = {
        "benchmark": "frontier",
        "chunks": task.n_chunks,
        "space": "+".join(settings.spaces),
        "gates": size,
        "subsets_retrained": truth.n_subsets,
        "seeds": truth.n_seeds,
        "queries": len(truth.queries),
    } | machine("torch", "numpy", "numba")

    def quality(scores: np.ndarray) -> dict[str, float]:
        record = {}
        for name, values in (("lds", scores), ("lds_shrunk", shrink(scores, SHRINKAGE))):
            found = lds(values, truth.masks, truth.losses).spearman
            drawn = resampler.draw("spearman", predicted_response(values, truth.masks), found).estimate()
            record |= {name: drawn.mean, f"{name}_se": drawn.joint.se}
        return record

    def cost(columns: np.ndarray, n_subsets: int, sketch_bytes: float = 0.0) -> dict[str, float]:
        # int8 gates with their scales, and the design's own rows
        held = (n_subsets * size * (1 + 4 / 256) + columns.nbytes) / task.n_chunks + sketch_bytes
        per_subset = task.n_chunks / n_subsets
        return {"subsets": n_subsets, "chunks_per_subset": per_subset, "bytes_per_chunk": held}

    yield {"what": "direct", **quality(direct - direct.mean(axis=1, keepdims=True))} | about
    defaults = recovery_defaults(task.index, task.model, "closed", None)
    for n_subsets, columns in designs.items():
        solutions = solve(direct, columns, n_subsets, defaults["lambda_ratio"])
        for bits, kept in sketches[n_subsets].items():
            held = 0.0 if kept is None else kept.codes.shape[1] + 4.0
            second = None if kept is None else sketched(kept, direct, columns, n_subsets)
            same = {"what": "read", "bits": bits, "sketch_bytes": held, **cost(columns, n_subsets, held)}
            for count in READ:
                scores = read(direct, columns, solutions, n_subsets, count, second)
                yield {**same, "read": count, **quality(scores)} | about
    for ratio in PER_SUBSET:
        n_subsets = max(2 * degree, round(task.n_chunks / ratio))
        for design in ("random", "documents"):
            columns = columns_of(task, n_subsets, degree, design)
            scores = recover(direct, columns, n_subsets, defaults["lambda_ratio"])
            if design == "random":
                same = {"subsets": n_subsets, "chunks_per_subset": task.n_chunks / n_subsets}
                other = {"debiased": debiased(direct, columns, n_subsets, scores)}
                if n_subsets >= 4 * degree:
                    other["two-level"] = two_level(direct, task, n_subsets, degree, defaults["lambda_ratio"])
                for what, found in other.items():
                    yield {"what": what, **same, **quality(found)} | about
            same = {"what": "subsets", "design": design, **cost(columns, n_subsets)}
            yield {**same, **quality(scores)} | about


def readouts(
    task: Any, queries: Any, settings: Any, designs: dict[int, np.ndarray]
) -> tuple[np.ndarray, dict[int, dict[int, Sketches | None]], int]:
    """Direct readout (Q, n), sketches by design and bits, and p."""
    spaces = fit_spaces(task.model, task.chunks, settings)
    size = sum(space.gate_size for space in spaces)
    sums = {count: torch.zeros(count, size) for count in designs}

    def gradients(batch: Any) -> torch.Tensor:
        found = gate_gradients(task.model, spaces, settings.layer, batch)[0]
        return torch.cat([part.cpu() for part in found], dim=1)

    asked = torch.cat([gradients(queries.batch(group)) for group in queries.groups(_QUERY_TOKENS)])
    direct = np.zeros((len(asked), task.n_chunks), np.float32)
    typical = max(1.0, task.chunks.scored_tokens() / task.n_chunks)
    for batch in task.chunks.batches(settings.batch_tokens // 2):
        rows = gradients(batch) * (batch.scored / typical)[:, None].float()
        direct[:, batch.rows] = (asked @ rows.T).numpy()
        for count, columns in designs.items():
            for drawn in columns[batch.rows].T:
                sums[count].index_add_(0, torch.from_numpy(drawn.astype(np.int64)), rows)
    combinations, directions = {}, []
    for count, columns in designs.items():
        sizes = np.bincount(columns.reshape(-1), minlength=count)
        gates = sums.pop(count).div_(torch.from_numpy(np.maximum(sizes, 1)).float()[:, None])
        combinations[count], own = principal_directions([gates.numpy()], max(BITS))
        directions.append(own[0])
    widths = [space.gate_size for space in spaces]
    parts = torch.cat(directions).split(widths, dim=1)
    coordinates = np.zeros((task.n_chunks, len(parts[0])), np.float32)
    for start in range(0, task.n_chunks, _CHUNKS_AT_ONCE):
        rows = np.arange(start, min(start + _CHUNKS_AT_ONCE, task.n_chunks))
        found = gradient_products(task.model, spaces, settings.layer, parts, task.chunks, rows)
        coordinates[rows] = found.sum(axis=0).T
    ends = np.cumsum([len(own) for own in directions])
    sketches: dict[int, dict[int, Sketches | None]] = {}
    for count, z in zip(designs, np.split(coordinates, ends[:-1], axis=1), strict=True):
        sketches[count] = {
            bits: Sketches(*encode(z[:, :bits]), combinations[count][:, :bits]) if bits else None
            for bits in sorted({min(bits, z.shape[1]) for bits in BITS})
        }
    return direct, sketches, size


def columns_of(task: Any, n_subsets: int, degree: int, design: str) -> np.ndarray:
    """Subsets of every chunk, (n, d): drawn for each, or for each document."""
    seed = task.index.seed
    if design == "random":
        return build_columns(0, task.n_chunks, n_subsets=n_subsets, degree=degree, seed=seed)
    document = np.asarray(task.index.array("corpus/chunk_document"))
    drawn = build_columns(0, int(document.max()) + 1, n_subsets=n_subsets, degree=degree, seed=seed)
    return drawn[document]


def responses_of(direct: np.ndarray, columns: np.ndarray, n_subsets: int) -> tuple[np.ndarray, np.ndarray]:
    """What operators of that design would answer, (Q, K) float64, and the subsets' sizes (K,)."""
    sizes = np.bincount(columns.reshape(-1), minlength=n_subsets)
    sums = np.zeros((len(direct), n_subsets))
    for row, total in zip(direct, sums, strict=True):
        for drawn in columns.T:
            total += np.bincount(drawn, weights=row, minlength=n_subsets)
    return sums / np.maximum(sizes, 1), sizes


def measured(direct: np.ndarray, columns: np.ndarray, n_subsets: int) -> np.ndarray:
    """What the recovery explains of it, (Q, K) float64."""
    return additive_measurement(*responses_of(direct, columns, n_subsets))


def recover(direct: np.ndarray, columns: np.ndarray, n_subsets: int, ratio: float) -> np.ndarray:
    """Influences (Q, n) by the Lasso from what operators of that design would measure."""
    return dense(solve(direct, columns, n_subsets, ratio))


def solve(direct: np.ndarray, columns: np.ndarray, n_subsets: int, ratio: float) -> list[Solution]:
    """The Lasso of each query."""
    y = measured(direct, columns, n_subsets)
    return solve_batch(columns, y, n_subsets=n_subsets, lambda_ratio=ratio, intercept=True)


def dense(solutions: list[Solution]) -> np.ndarray:
    """Weights (Q, n) float32."""
    scores = np.zeros((len(solutions), solutions[0].n_chunks), np.float32)
    for row, solution in zip(scores, solutions, strict=True):
        row[solution.indices] = solution.values
    return scores


def sketched(sketches: Sketches, direct: np.ndarray, columns: np.ndarray, n_subsets: int) -> np.ndarray:
    """What sketches estimate of the influences (Q, n), from what operators of that design would answer."""
    single = sketches.products(responses_of(direct, columns, n_subsets)[0])
    found: np.ndarray = (single - single.mean(axis=1, keepdims=True)) * n_subsets / columns.size
    return found


def read(
    direct: np.ndarray,
    columns: np.ndarray,
    solutions: list[Solution],
    n_subsets: int,
    count: int,
    second: np.ndarray | None,
) -> np.ndarray:
    """The solutions' weights, with those of the likeliest chunks replaced by the direct readout."""
    influences = (direct - direct.mean(axis=1, keepdims=True)) * n_subsets / columns.size
    estimates = [None] * len(solutions) if second is None else second
    chosen = [
        candidates([columns], solution, count, estimate)
        for solution, estimate in zip(solutions, estimates, strict=True)
    ]
    return dense(
        [
            with_weights(solution, chunks, row[chunks])
            for solution, chunks, row in zip(solutions, chosen, influences, strict=True)
        ]
    )


def debiased(direct: np.ndarray, columns: np.ndarray, n_subsets: int, scores: np.ndarray) -> np.ndarray:
    """Least squares, with an intercept, on the support of each query's scores."""
    found = np.zeros_like(scores)
    for row, old, y in zip(found, scores, measured(direct, columns, n_subsets), strict=True):
        support = np.flatnonzero(old)
        design = np.zeros((n_subsets, len(support) + 1))
        design[:, -1] = 1
        for place, drawn in enumerate(columns[support]):
            design[drawn, place] = 1
        row[support] = np.linalg.lstsq(design, y, rcond=None)[0][:-1]
    return found


def two_level(direct: np.ndarray, task: Any, n_subsets: int, degree: int, ratio: float) -> np.ndarray:
    """Half of the subsets over all chunks, half over the quarter that correlates most with the responses."""
    half, n_candidates = n_subsets // 2, task.n_chunks // 4
    first = columns_of(task, half, degree, "random")
    fine = build_columns(0, n_candidates, n_subsets=half, degree=degree, seed=task.index.seed + 1)
    responses = measured(direct, first, half)
    found = recover(direct, first, half, ratio)
    for row, y, truth in zip(found, responses, direct, strict=True):
        promise = np.abs((y - y.mean())[first].sum(axis=1))
        chosen = np.sort(np.argsort(-promise, kind="stable")[:n_candidates])
        row[chosen] = recover(truth[None, chosen], fine, half, ratio)[0]
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks frontier", description=__doc__)
    parser.add_argument("--index", required=True, help="with a truth, of a language model")
    parser.add_argument("--model")
    parser.add_argument("--space")
    parser.add_argument("--alpha", type=float, default=0.5)
    for row in run(parser.parse_args(arguments)):
        emit(row)
