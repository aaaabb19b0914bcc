"""Compare influences in nats with what happens: documents removed, models trained again.

Of an index that `stride calibrate --retrain` has measured the scale of, on queries of a file that had no
part in that. For some of the queries the documents that support them most are left out, for several at once
where `--each` says so; every model so trained gives a rise of the loss of every query. `own`: of those whose
documents were left out; `all`: of all queries; where their ids begin with a kind and a colon, also by kind;
`without N`: of all, N random documents left out (`--random`). `slope`: of measured on predicted rises,
through the origin, 1 where forecasts are right; `held`: share of rises in the interval of their forecast,
`within`: within the scale's own error; `pairs`: how many; `points`: every pair, in nats. All by default.
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
    left_out = [np.argsort(-documents[:, group], axis=0)[: given.top] for group in groups]
    order = np.random.default_rng(0).permutation(len(documents))
    left_out += [order[:count] for count in given.random]
    masks = np.stack([~np.isin(session.chunk_document, some) for some in (order[:0], *left_out)])
    seeds = subset_seeds(workspace.seed, scale.models + given.seeds)[scale.models :]  # none of the scale's
    jobs, trainer = (
        [Job(mask, int(seed)) for seed in seeds for mask in masks],
        open_trainer(workspace, queries),
    )
    found = retrain(trainer, jobs, store=store_of(workspace.index), workers=given.workers)
    losses = np.stack([each.losses for each in found]).reshape(len(seeds), len(masks), -1)
    measured, loss = (losses[:, 1:] - losses[:, :1]).reshape(-1, len(queries)), losses[:, 0].mean(axis=0)
    sums = np.tile(~masks[1:] @ influences, (len(seeds), 1))
    predicted = scale.rise(sums, totals, loss)
    low, high = np.vectorize(scale.interval)(predicted)
    held = (low <= measured) & (measured <= high)
    within = np.abs(measured / predicted - 1) <= scale.error / (scale.slope or scale.ceiling or 1.0)
    number, every = np.tile(np.arange(len(left_out)), len(seeds))[:, None], np.ones(len(queries), bool)
    own = sum((number == each) & np.isin(range(len(every)), group) for each, group in enumerate(groups)) > 0
    kinds = np.array([name.partition(":")[0] if ":" in name else "" for name in queries.names])
    parts = [("own", own), ("all", (number < len(groups)) & every)]
    parts += [(f"own {kind}", own & (kinds == kind)) for kind in dict.fromkeys(kinds) if kind]
    random = enumerate(given.random, len(groups))
    parts += [(f"without {count}", (number == each) & every) for each, count in random]
    about = {"benchmark": "nats", "chunks": chunks, "queries": len(queries), "removed": given.top}
    about |= {"of": given.each, "models": len(jobs) - len(seeds), "read": pipeline.settings.reads}
    about |= {"scale": to_record(scale)} | machine("torch", "numpy")
    for what, chosen in parts:
        of, pairs = chosen.any(axis=0), (predicted[chosen], measured[chosen])
        line = fit_line((predicted * chosen)[:, of], (measured * chosen)[:, of])
        row = {"what": what, "pairs": int(chosen.sum()), "slope": line.slope, "error": line.error}
        row |= {"correlation": float(np.corrcoef(*pairs)[0, 1])}
        means = {"held": held, "within": within, "mean_predicted": predicted, "mean_measured": measured}
        row |= {name: float(values[chosen].mean()) for name, values in means.items()}
        points = np.round(np.stack(pairs, axis=1), 3).tolist()
        yield about | row | {"mean_loss": float(loss[of].mean()), "points": points}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks nats", description=__doc__)
    parser.add_argument("--index", required=True, help="of a language model, its scale measured")
    parser.add_argument("--model")
    parser.add_argument("--queries", type=Path, required=True, help="as stride query --file takes them")
    parser.add_argument("--count", type=int, default=12, help="queries whose documents are left out")
    parser.add_argument("--top", type=int, default=10, help="how many documents of each")
    parser.add_argument("--each", type=int, default=1, help="queries whose documents one model is without")
    parser.add_argument("--random", type=int, nargs="*", default=[], help="sizes of random sets left out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int)
    for row in rows(parser.parse_args(arguments)):
        emit(row)
