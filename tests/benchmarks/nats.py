"""Whether influences in nats are what happens: documents removed, models trained again.

Of an index that `stride calibrate --retrain` has measured the scale of, on queries of a file that had no
part in that. For some of the queries the documents that support them most are left out; every model so
trained gives a rise of the loss of every query. `own`: of those whose documents were left out; `all`: of
all queries.
`slope`: of measured on predicted rises, through the origin, 1 where forecasts are right; `correlation`;
`pairs`: how many. Predictions are sums over what `stride query` shows, with what it reads by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from stride_cli.attribution.scale import fit_scale, predicted_sums
from stride_cli.attribution.session import Session
from stride_cli.data.query_files import read_queries
from stride_cli.output import emit
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of
from stride_cli.training.truth import subset_seeds
from tests.benchmarks._machine import machine


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    session = Session.open(given.index, model_path=given.model)
    workspace, attributor = session.workspace, session.attributor()
    assert session.calibration is not None and session.calibration.scale is not None
    scale = session.calibration.scale
    queries = read_queries(workspace, given.queries)
    chunks = workspace.n_chunks
    single = np.eye(chunks, dtype=bool)
    influences = predicted_sums(attributor, queries, single).T * scale.slope  # (Q, n)
    documents = np.zeros((len(queries), session.chunk_document.max() + 1))
    np.add.at(documents.T, session.chunk_document, influences.T)
    asked = np.linspace(0, len(queries) - 1, given.count).astype(int)
    tops = np.argsort(-documents[asked], axis=1)[:, : given.top]
    removed = np.stack([np.isin(session.chunk_document, top) for top in tops])
    seed = int(subset_seeds(workspace.seed, 2)[1])  # not that of the scale
    jobs = [Job(mask, seed) for mask in (np.ones(chunks, bool), *~removed)]
    trainer = open_trainer(workspace, queries)
    full, *others = retrain(trainer, jobs, store=store_of(workspace.index))
    measured = np.stack([other.losses - full.losses for other in others])
    predicted = removed.astype(np.float64) @ influences.T
    own = (np.arange(len(asked)), asked)
    for what, found in (
        ("own", fit_scale(predicted[own][None], measured[own][None])),
        ("all", fit_scale(predicted, measured)),
    ):
        yield {
            "benchmark": "nats",
            "what": what,
            "chunks": chunks,
            "queries": len(queries),
            "removed": given.top,
            "models": len(others),
            "read": attributor.reads,
            "scale": scale.to_record(),
            "slope": found.slope,
            "error": found.error,
            "correlation": found.correlation,
            "pairs": found.pairs,
            "mean_predicted": float(predicted[own].mean()) if what == "own" else float(predicted.mean()),
            "mean_measured": float(measured[own].mean()) if what == "own" else float(measured.mean()),
        } | machine("torch", "numpy")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks nats", description=__doc__)
    parser.add_argument("--index", required=True, help="of a language model, its scale measured")
    parser.add_argument("--model")
    parser.add_argument("--queries", required=True, help="as stride query --file takes them")
    parser.add_argument("--count", type=int, default=12, help="queries whose documents are left out")
    parser.add_argument("--top", type=int, default=10, help="how many documents")
    for row in rows(parser.parse_args(arguments)):
        emit(row)
