"""Whether answers find as much as they say: stated recall against the direct readout of every chunk.

Of an index with operators, on queries of a file. For each size of projection (bytes a chunk), with what
chunks say alike shared out as answers do (`redundancy`) and without, and for each number of chunks read:
`stated`, the median of "at least so many of the 10 strongest chunks were read"; `found`, how many were, in
the mean; `held`, the share of queries of which the statement is true, to be .95 or more; `standard_error`,
that of this share were it .95. Chunks are chosen as `stride query` chooses them. `counted`: whether it was
also asked how many of the others are to be expected above, which it is where few are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from stride_cli.attribution.direct import Exact, influence_unit, query_gradients
from stride_cli.attribution.estimates import Estimates, Posteriors, Shared
from stride_cli.attribution.session import Session
from stride_cli.data.query_files import read_queries
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.projections import Projector
from stride_cli.operators.redundancy import Redundancy
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import emit, progress
from stride_cli.recovery.candidates import candidates
from stride_cli.recovery.lasso import solve_batch
from stride_cli.recovery.recall import CONFIDENCE, TOP, counts_others, stated_recall
from tests.benchmarks._machine import machine

SIZES = (256, 512, 1024, 2048, 4096, 8192)
READ = (30, 60, 100, 200)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(given.threads)
    session = Session.open(given.index, model_path=given.model)
    workspace, operators = session.workspace, session.operators
    queries = read_queries(workspace, given.queries)
    queries = queries.take(range(given.first, len(queries)))
    pipeline = session.pipeline()
    settings, columns = pipeline.settings, session.designs.columns
    batches = [queries.batch(group) for group in queries.groups(4096)]
    measured = pipeline.measure(batches)
    solutions = solve_batch(columns, measured.y, settings.lasso, n_subsets=operators.n_subsets)
    steered, n_chunks = SteeredModel.of(workspace.model, operators), workspace.n_chunks
    exact, projectors = look(steered, workspace, batches, given.sizes)
    factors, offsets = influence_unit(
        operators, workspace.chunks.typical, measured.responses, session.designs.row_sizes
    )
    influences = factors[:, None] * exact - offsets[:, None]
    ridges = [0.0, settings.redundancy] if settings.redundancy else [0.0]
    about = {
        "benchmark": "recall",
        "chunks": n_chunks,
        "subsets": operators.n_subsets,
        "gates": steered.gate_size,
        "queries": len(queries),
    }
    for (size, projector), ridge in product(projectors.items(), ridges):
        kept = replace(operators, projections=projector.projections(), shared=None)
        estimates = Estimates.of(SteeredModel.of(workspace.model, kept), queries, batches, workspace)
        directions = kept.redundancy if ridge else None
        # what an answer ranks by where every chunk is read
        shown = influences - common(directions, influences, offsets, ridge)
        top = np.argsort(-shown, axis=1)[:, :TOP]
        for count in READ:
            found, stated = [], []
            for query, solution in enumerate(solutions):
                own = estimates.of_query(query, solution)
                chosen = candidates(columns, solution, count, own.strength, own.by_projections)
                read = Exact(chosen, exact[query, chosen.chunks], factors[query], offsets[query])
                odds = own.odds(read, chosen.margins)
                assert odds is not None
                others = Posteriors.learnt(n_chunks, own.projected(read), read, own.pairs, directions, ridge)
                known = others.shared_out(read)
                most = np.sort(known)[::-1][:TOP]
                above = others.kept(chosen.chunks, most)[2] if counts_others(count) else None
                stated.append(stated_recall(known, odds, n_chunks, above).at_least)
                found.append(int(np.isin(top[query], chosen.chunks).sum()))
            held = np.array(found) >= np.array(stated)
            yield (
                about
                | {
                    "bytes": size,
                    "redundancy": ridge,
                    "read": count,
                    "counted": counts_others(count),
                    "of": TOP,
                    "confidence": CONFIDENCE,
                    "stated": float(np.median(stated)),
                    "stated_mean": float(np.mean(stated)),
                    "found": float(np.mean(found)),
                    "held": float(held.mean()),
                    "standard_error": float(np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / len(held))),
                }
                | machine("torch", "numpy")
            )


def common(
    directions: Redundancy | None, influences: np.ndarray, means: np.ndarray, ridge: float
) -> np.ndarray:
    """What chunks share of the influences of all, (Q, n), which leave out these means."""
    if directions is None:
        return np.zeros_like(influences)
    every = np.arange(influences.shape[1])
    seen = [[(every, own + mean, 1.0)] for own, mean in zip(influences, means, strict=True)]
    return np.stack([Shared.of(directions, ridge, each)[:] for each in seen])


def look(
    steered: SteeredModel, workspace: Any, batches: list[Any], sizes: Sequence[int]
) -> tuple[np.ndarray, dict[int, Projector]]:
    """One pass over the corpus: every chunk's product with every query, (Q, n), and its projections."""
    asked, n_chunks = query_gradients(steered, batches), workspace.n_chunks
    exact = np.zeros((len(asked[0]), n_chunks))
    projectors = {size: Projector(steered.gate_size, size, n_chunks, workspace.seed) for size in sizes}
    with progress("reading chunks", n_chunks, unit="chunks") as bar:
        for group in workspace.chunks.plan(steered.tokens_at_once):
            for batch in map(workspace.chunks.batch, workspace.chunks.small_groups(group)):
                own = chunk_gradients(steered, batch)[0]
                products = sum(query @ gradient.cpu().T for query, gradient in zip(asked, own, strict=True))
                exact[:, batch.rows] = (products * batch.scored).numpy()
                for projector in projectors.values():
                    projector.add(batch, own)
                bar.advance(len(batch.rows))
    return exact, projectors


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks recall", description=__doc__)
    parser.add_argument("--index", required=True, help="of a language model, with operators")
    parser.add_argument("--model")
    parser.add_argument("--queries", required=True, help="as stride query --file takes them")
    parser.add_argument("--first", type=int, default=0, help="leave out so many queries")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a projection")
    parser.add_argument("--threads", type=int, default=2)
    for row in rows(parser.parse_args(arguments)):
        emit(row)
