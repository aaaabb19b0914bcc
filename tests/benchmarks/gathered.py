"""What projections that a training gathered find, beside those that `stride train` makes of as many bytes.

Of the chunks that are strongest by the direct readout, as a query reads them, how many are among the 100 that
an estimate ranks highest (`recall10`, `recall50`, with standard errors over queries). `gathered`: of
`StrideCallback(projections=…)`, which the index has taken in; `own`: of the finished model's gate gradients;
`pairs`: the pairs of tokens that chunks share with the query; and sums at unit spread, by which a query
chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stride_cli.attribution.direct_readout import projected_influences, query_gradients, second_estimates
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import Workspace
from stride_cli.operators.beginnings import know_beginnings
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.layer_projections import GatheredProjections
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.projections import Projector
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import emit
from tests.benchmarks._machine import machine

READ, TOP = 100, (10, 50)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    workspace = Workspace.open(given.index)
    gathered = GatheredProjections.from_index(workspace.index)
    assert gathered is not None, "the index has taken in no projections"
    queries = read_queries(workspace, given.queries)
    queries = queries.take(range(given.first, len(queries)))
    settings = resolve_settings(ClosedOptions(), workspace.model, workspace.index)
    know_beginnings(
        workspace.model, workspace.chunks, settings, base=given.base, scratch=None, save_seconds=60
    )
    steered = fit_spaces(workspace.model, workspace.chunks, settings)
    batches = [queries.batch(group) for group in queries.groups(settings.batch_tokens)]
    asked, n_chunks, size = query_gradients(steered, batches), workspace.n_chunks, gathered.size
    direct = np.zeros((len(queries), n_chunks))
    projector = Projector(steered.gate_size, size, n_chunks, settings.seed)
    for group in workspace.chunks.plan(settings.batch_tokens):
        for batch in map(workspace.chunks.batch, workspace.chunks.small_groups(group)):
            own = chunk_gradients(steered, batch)[0]
            products = sum(query @ gradient.T for query, gradient in zip(asked, own, strict=True))
            direct[:, batch.rows] = (products * batch.scored).numpy()
            projector.add(batch, own)
    about = {
        "benchmark": "gathered",
        "chunks": n_chunks,
        "gates": steered.gate_size,
        "queries": len(queries),
        "first": given.first,
        "read": READ,
        "layers": len(gathered.layers.names),
        "rank": gathered.layers.rank,
    } | machine("torch", "transformers", "numpy", "numba")
    seen = np.ones(n_chunks, np.uint8)
    pairs = second_estimates([], queries, batches, workspace).values
    yield {"by": "pairs", "bytes": 0} | found(pairs, direct) | about
    for by, kept in (("own", {"projections": projector.projections()}), ("gathered", {"gathered": gathered})):
        operators = Operators(list(steered.spaces), [], steered.layer, "closed", seen, **kept)
        model = SteeredModel.of(workspace.model, operators)
        alone = projected_influences([model], batches, n_chunks)
        assert alone is not None
        both = second_estimates([model], queries, batches, workspace)
        yield {"by": by, "bytes": size} | found(alone.values, direct) | about
        yield {"by": f"pairs and {by}", "bytes": size} | found(both.values, direct) | about


def found(estimate: np.ndarray, direct: np.ndarray) -> dict[str, float]:
    """Recall of estimates (Q, n), with standard errors."""
    read, order = np.argsort(-estimate, axis=1)[:, :READ], np.argsort(-direct, axis=1)
    figures = {}
    for most in TOP:
        each = [np.isin(top[:most], own).mean() for top, own in zip(order, read, strict=True)]
        figures[f"recall{most}"] = float(np.mean(each))
        figures[f"recall{most}_error"] = float(np.std(each, ddof=1) / len(each) ** 0.5)
    return figures


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gathered", description=__doc__)
    parser.add_argument("--index", required=True, help="of a run with projections")
    parser.add_argument("--queries", required=True, help="as stride query --file takes them")
    parser.add_argument("--base", help="the model before its training")
    parser.add_argument("--first", type=int, default=0, help="leave out so many queries")
    for row in rows(parser.parse_args(arguments)):
        emit(row)
