"""What projections find for their bytes, and how fast they are scanned.

With `--index` and `--queries`: of the chunks that are strongest by the direct readout, how many are among the
100 that an estimate ranks highest (`recall10`, `recall50`), and `kept`: Spearman's correlation, over random
halves of the chunks, of a half's sum of the direct readout with the same sum where only those 100 count.
`projections`: as `stride train --project` makes them; `int8`: as many numbers as bytes, each rounded to int8;
`pairs`: the pairs of tokens that chunks share with the query; and sums of them at unit spread.

Without: random codes against one pass of NumPy over the same bytes. `pass`: the sum of all codes as 64-bit
integers, which is as fast as memory delivers them. `scan`: estimates of every chunk for so many queries at
once; `ratio` is its time by that of the pass, `ratio_per_query` that by the number of queries. Both take
turns, so that other load falls on them alike; the best of each counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from stride_cli.attribution.direct_readout import projected_influences, query_gradients, second_estimates
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import Workspace
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.projections import Folding, Projector, bit_planes, scan
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import emit
from stride_cli.randomness import stream
from stride_cli.research.evaluation.metrics import correlate, predicted_response
from tests.benchmarks._machine import interleave, machine

SIZES = (128, 256, 512, 1024, 2048)  # bytes a chunk
READ, TOP, HALVES = 100, (10, 50), 200


def found(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Recall of the direct readout's top by every estimate, on the queries from `--first` on."""
    torch.set_num_threads(1)
    workspace = Workspace.open(given.index, given.model)
    queries = read_queries(workspace, given.queries)
    queries = queries.take(range(given.first, len(queries)))
    settings = resolve_settings(ClosedOptions(), workspace.model, workspace.index)
    steered = fit_spaces(workspace.model, workspace.chunks, settings)
    batches = [queries.batch(group) for group in queries.groups(settings.batch_tokens)]
    asked, n_chunks = query_gradients(steered, batches), workspace.n_chunks
    # 1. One pass over the corpus: direct readout (Q, n), projections and int8 of every size
    direct = np.zeros((len(queries), n_chunks))
    projectors = {size: Projector(steered.gate_size, size, n_chunks, settings.seed) for size in SIZES}
    foldings = {size: Folding(steered.gate_size, size, settings.seed) for size in SIZES}
    numbers = {size: np.zeros((n_chunks, size), np.float32) for size in SIZES}
    for group in workspace.chunks.plan(settings.batch_tokens):
        for batch in map(workspace.chunks.batch, workspace.chunks.small_groups(group)):
            own, _, _ = gate_gradients(steered, batch)
            products = sum(query @ gradient.T for query, gradient in zip(asked, own, strict=True))
            direct[:, batch.rows] = (products * batch.scored).numpy()
            for size in SIZES:
                projectors[size].add(batch, own)
                z = foldings[size](own) * batch.scored.numpy()[:, None]
                step = np.maximum(np.abs(z).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
                numbers[size][batch.rows] = np.rint(z / step) * step
    # 2. What each estimate would read
    random = stream(settings.seed, "projection halves")
    halves = np.zeros((HALVES, n_chunks), bool)
    for half in halves:
        half[random.permutation(n_chunks)[: n_chunks // 2]] = True
    about = {
        "benchmark": "projections",
        "what": "found",
        "chunks": n_chunks,
        "gates": steered.gate_size,
        "queries": len(queries),
        "read": READ,
    } | machine("torch", "numpy", "numba")
    seen = np.ones(n_chunks, np.uint8)
    pairs = second_estimates([], queries, batches, workspace).values
    yield {"by": "pairs", "bytes": 0} | quality(pairs, direct, halves) | about
    yield {"by": "direct", "bytes": 0} | quality(direct, direct, halves) | about
    for size in SIZES:
        made = projectors[size].projections()
        kept = Operators(list(steered.spaces), [], steered.layer, "closed", seen, projections=made)
        projected = SteeredModel.of(workspace.model, kept)
        by_projections = projected_influences([projected], batches, n_chunks)
        assert by_projections is not None
        estimates = {
            "projections": by_projections.values,
            "pairs and projections": second_estimates([projected], queries, batches, workspace).values,
            "int8": foldings[size](asked) @ numbers[size].T,
        }
        for by, estimate in estimates.items():
            yield {"by": by, "bytes": size} | quality(estimate, direct, halves) | about


def quality(estimate: np.ndarray, direct: np.ndarray, halves: np.ndarray) -> dict[str, float]:
    """`recall10`, `recall50` and `kept` of estimates (Q, n)."""
    read = np.argsort(-estimate, axis=1)[:, :READ]
    order = np.argsort(-direct, axis=1)
    among = np.array([np.isin(top, own) for top, own in zip(order, read, strict=True)])
    recall = {f"recall{most}": float(among[:, :most].mean()) for most in TOP}
    influences = direct - direct.mean(axis=1, keepdims=True)
    left = np.zeros_like(influences)
    np.put_along_axis(left, read, np.take_along_axis(influences, read, axis=1), axis=1)
    whole, part = (predicted_response(scores, halves) for scores in (influences, left))
    return recall | {"kept": float(correlate(part, whole).spearman.mean())}


def speed(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The scan by the pass, for so many queries at once."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (given.chunks, given.bytes), np.uint8)
    step = random.random(given.chunks, np.float32)
    same = {"benchmark": "projections", "what": "speed", "chunks": given.chunks, "bytes": given.bytes}
    for queries in given.at_once:
        planes, units, _ = bit_planes(random.normal(size=(queries, 8 * given.bytes)).astype(np.float32))
        estimates = np.empty((queries, given.chunks), np.float32)
        tasks = {
            "pass": codes.view(np.uint64).sum,
            "scan": partial(scan, codes, step, planes, units, estimates),
        }
        tasks["scan"]()  # compiled
        times, _ = interleave(tasks, given.repeats)
        best = {name: min(seconds) for name, seconds in times.items()}
        ratio = best["scan"] / best["pass"]
        yield {
            **same,
            "queries": queries,
            "pass_seconds": best["pass"],
            "scan_seconds": best["scan"],
            "gigabytes_per_second": codes.nbytes / best["scan"] / 1e9,
            "ratio": ratio,
            "ratio_per_query": ratio / queries,
        } | machine("torch", "numpy", "numba")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks projections", description=__doc__)
    parser.add_argument("--index", help="of a language model")
    parser.add_argument("--model")
    parser.add_argument("--queries", help="as stride query --file takes them")
    parser.add_argument("--first", type=int, default=0, help="leave out so many queries")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    for row in found(given) if given.index else speed(given):
        emit(row)
