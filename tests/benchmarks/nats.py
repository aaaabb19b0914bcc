"""Compare influences in nats with what happens: documents removed, models trained again.

Of an index that `stride calibrate --retrain` has measured the scale of, on queries of a file that had no
part in that. For some of the queries the documents that support them most are left out, for several at once
where `--each` says so; every model so trained gives a rise of the loss of every query. `own`: of those whose
documents were left out; `all`: of all queries; where their ids begin with a kind and a colon, also by kind.
`slope`: of measured on predicted rises, through the origin, 1 where forecasts are right; `correlation`;
`pairs`: how many; `points`: every pair, in nats. Predictions are of what `stride query` shows, with what it
reads by default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from stride_cli.attribution.nats import fit_line
from stride_cli.attribution.options import QueryOptions
from stride_cli.attribution.scale import predicted_sums
from stride_cli.attribution.session import Session
from stride_cli.data.queries import Query
from stride_cli.data.query_set import QuerySet
from stride_cli.output import emit
from stride_cli.schema.derivation import to_record
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of, subset_seeds
from tests.benchmarks._machine import machine


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    session = Session.open(given.index, model=given.model)
    workspace, pipeline = session.workspace, session.pipeline()
    assert session.calibration is not None and session.calibration.scale is not None
    scale = session.calibration.scale
    prompts = [json.loads(line) for line in given.queries.read_text(encoding="utf-8").splitlines()]
    # put to the model as `stride query` puts them: of a corpus of texts the response follows the prompt
    built = [cast("Query", each) for each in session.build(prompts, QueryOptions())]
    queries = QuerySet.from_queries(built, [str(each.get("id", "")) for each in prompts])
    chunks = workspace.n_chunks
    influences, totals = predicted_sums(pipeline, queries, np.eye(chunks, dtype=bool))  # (n, Q), (Q,)
    documents = np.zeros((session.chunk_document.max() + 1, len(queries)))
    np.add.at(documents, session.chunk_document, influences)
    asked = np.linspace(0, len(queries) - 1, given.count).astype(int)
    groups = [asked[number :: -(-len(asked) // given.each)] for number in range(-(-len(asked) // given.each))]
    tops = [np.argsort(-documents[:, group], axis=0)[: given.top] for group in groups]
    removed = np.stack([np.isin(session.chunk_document, top) for top in tops])
    seed = int(subset_seeds(workspace.seed, 2)[1])  # not that of the scale
    jobs = [Job(mask, seed) for mask in (np.ones(chunks, bool), *~removed)]
    trainer = open_trainer(workspace, queries)
    full, *others = retrain(trainer, jobs, store=store_of(workspace.index), workers=given.workers)
    measured = np.stack([other.losses - full.losses for other in others])
    sums = removed.astype(np.float64) @ influences
    predicted = scale.rise(sums, totals, full.losses)
    own = np.zeros(measured.shape, bool)
    for number, group in enumerate(groups):
        own[number, group] = True
    kinds = np.array([name.partition(":")[0] if ":" in name else "" for name in queries.names])
    parts = [("own", own), ("all", np.ones_like(own))]
    parts += [(f"own {kind}", own & (kinds == kind)) for kind in dict.fromkeys(kinds) if kind]
    for what, chosen in parts:
        of = chosen.any(axis=0)
        found = fit_line((predicted * chosen)[:, of], (measured * chosen)[:, of])
        pairs = predicted[chosen], measured[chosen]
        yield {
            "benchmark": "nats",
            "what": what,
            "chunks": chunks,
            "queries": len(queries),
            "removed": given.top,
            "of": given.each,
            "models": len(others),
            "read": pipeline.settings.reads,
            "scale": to_record(scale),
            "slope": found.slope,
            "error": found.error,
            "correlation": float(np.corrcoef(*pairs)[0, 1]),
            "correlation_of_sums": float(np.corrcoef(sums[chosen], pairs[1])[0, 1]),
            "pairs": int(chosen.sum()),
            "mean_loss": float(full.losses[of].mean()),
            "mean_predicted": float(pairs[0].mean()),
            "mean_measured": float(pairs[1].mean()),
            "points": np.round(np.stack(pairs, axis=1), 3).tolist(),
        } | machine("torch", "numpy")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks nats", description=__doc__)
    parser.add_argument("--index", required=True, help="of a language model, its scale measured")
    parser.add_argument("--model")
    parser.add_argument("--queries", type=Path, required=True, help="as stride query --file takes them")
    parser.add_argument("--count", type=int, default=12, help="queries whose documents are left out")
    parser.add_argument("--top", type=int, default=10, help="how many documents of each")
    parser.add_argument("--each", type=int, default=1, help="queries whose documents one model is without")
    parser.add_argument("--workers", type=int)
    for row in rows(parser.parse_args(arguments)):
        emit(row)
