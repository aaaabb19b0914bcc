"""What chunks count with that are not read: quality against bytes a chunk, with subsets or without.

Of an index with operators and a ``truth/``, on the truth's queries. `direct`: every chunk's own gradient;
`recovered`: the Lasso over the index's K subsets alone. `estimated`: projections of so many bytes of every
chunk, as posterior means, with what shared `pairs` of tokens predict or without; `subsets` = 0: alone, else
with what the K responses say that they add up to, as `stride query` puts them together. The `read`
strongest by the estimate, or, with subsets, those that `stride query` chooses, count as read. `error`: the
mean squared error of single chunks, as a share of their variance. `share`: of the direct readout's LDS. In
pre-training all are shrunk as `stride query` does; nothing is shared out. Standard errors and differences
to the direct readout are over queries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from stride_cli.attribution.direct_readout import chunk_influences, second_estimates
from stride_cli.attribution.estimated import Estimates, Read, Responses, projected_part, with_estimates
from stride_cli.attribution.session import Session
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import emit
from stride_cli.recovery.refinement import Debiased, candidates
from stride_cli.recovery.shrinkage import shrink
from stride_cli.research.evaluation.metrics import lds
from stride_cli.training.truth import Truth
from tests.benchmarks._machine import machine
from tests.benchmarks.recall import look, recovered

SIZES = (512, 1024, 2048, 8192, 32_768)
READ = (0, 30, 100)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(given.threads)
    session = Session.open(given.index, model_path=given.model)
    workspace, operators = session.workspace, session.operators
    truth = Truth.from_index(workspace.index, alpha=given.alpha)
    queries, attributor = truth.queries, session.attributor()
    groups = queries.groups(4096)
    order = np.concatenate(groups)
    queries, batches = queries.take(order), [queries.batch(group) for group in groups]
    responses = attributor.measure(batches).responses
    solutions = recovered(attributor, batches, responses)
    debiased = [Debiased(session.designs.each, solution) for solution in solutions]
    steered, n_chunks = SteeredModel.of(workspace.model, operators), workspace.n_chunks
    products, projectors = look(steered, workspace, batches, SIZES)
    nothing = np.empty(0, np.int64)
    sizes = session.designs.row_sizes
    unit = chunk_influences([steered], batches, workspace.chunks, nothing, responses, sizes).unit
    exact = unit.influences([products])
    losses = truth.losses[:, :, order]

    def quality(influences: np.ndarray) -> np.ndarray:
        how = attributor.defaults["shrinkage"]
        found: np.ndarray = lds(
            influences if how is None else shrink(influences, how), truth.masks, losses
        ).spearman
        return found

    base = quality(exact)
    about = {
        "benchmark": "estimated",
        "suite": given.suite,
        "chunks": n_chunks,
        "gates": steered.gate_size,
        "subsets_retrained": truth.n_subsets,
        "seeds": truth.n_seeds,
        "queries": len(queries),
    } | machine("torch", "numpy")

    def record(influences: np.ndarray, **what: Any) -> dict[str, Any]:
        found, root = quality(influences), np.sqrt(len(queries))
        away = found - base
        return (
            what
            | {
                "error": float((np.square(influences - exact).mean(axis=1) / exact.var(axis=1)).mean()),
                "lds": float(found.mean()),
                "lds_se": float(found.std(ddof=1) / root),
                "difference": float(away.mean()),
                "difference_se": float(away.std(ddof=1) / root),
                "share": float(found.mean() / base.mean()),
            }
            | about
        )

    yield record(exact, what="direct")
    alone = np.zeros_like(exact)
    for row, solution in zip(alone, solutions, strict=True):
        row[solution.indices] = solution.values
    yield record(alone, what="recovered", subsets=operators.n_subsets)
    explained = attributor.explained(responses)
    for size, projector in projectors.items():
        kept = replace(operators, projections=projector.projections())
        models = [SteeredModel.of(workspace.model, kept)]
        seconds = second_estimates(models, queries, batches, workspace)
        asked = [part.asked for part in seconds.projected]
        for subsets, with_pairs, count in product((0, operators.n_subsets), (False, True), READ):
            found = np.zeros_like(exact)
            for query, (solution, other) in enumerate(zip(solutions, debiased, strict=True)):
                part = projected_part(asked, unit, query)
                pairs = seconds.pairs.of(query) if with_pairs and seconds.pairs else None
                if subsets:
                    guides = seconds.guide(query), seconds.alone(query)
                    chosen = candidates(session.designs.each, solution, count, *guides, estimate=other).chunks
                else:
                    alone = Estimates.of(n_chunks, part, pairs=pairs).part(0, n_chunks)
                    chosen = np.sort(np.argsort(-np.abs(alone), kind="stable")[:count])
                read = Read(chosen, exact[query, chosen])
                estimates = Estimates.of(n_chunks, part, read, pairs)
                told = Responses(session.designs.each, [explained[query]], True, attributor.intercept)
                answer, _ = with_estimates(solution, read, estimates, told if subsets else None)
                found[query, answer.indices] = answer.values
            what = {"bytes": size, "subsets": subsets, "pairs": with_pairs, "read": count}
            yield record(found, what="estimated", **what)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks estimated", description=__doc__)
    parser.add_argument("--index", required=True, help="of a language model, with operators and a truth")
    parser.add_argument("--model")
    parser.add_argument("--suite", default="instructions")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    for row in rows(parser.parse_args(arguments)):
        emit(row)
