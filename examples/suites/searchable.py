"""Stop where a search engine finds the planted causes: such a suite measures nothing.

    python examples/suites/searchable.py suite/queries.jsonl --index suite/run.stride --most 0.5

Methods that look at no model score the corpus; of each, the mean over the queries of Recall@10 (or, with
`--measure auprc`, of the area under precision and recall), ties in expectation. One record a line; exit code
1 where a method is above `--most`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from stride_cli.models.spec import ModelSpec

SEARCHES = ("bm25", "tfidf", "tfidf:ngrams=1", "pairs", "embeddings")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("queries", type=Path, help="JSON Lines of {id, prompt, response, causes}")
    parser.add_argument("--index", required=True)
    parser.add_argument("--methods", nargs="+", default=SEARCHES)
    parser.add_argument("--measure", choices=("recall", "auprc"), default="recall")
    parser.add_argument("--at", type=int, default=10)
    parser.add_argument("--most", type=float, default=0.5)
    chosen = parser.parse_args()
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.research.evaluation.bench import Bench
    from stride_cli.research.evaluation.cause_measures import Places, measure_all
    from stride_cli.research.evaluation.cause_queries import read_cause_queries
    from stride_cli.research.evaluation.ranking import document_scores
    from stride_cli.research.evaluation.scoring import score_blocks
    from stride_cli.research.methods.registry import open_method

    bench = Bench(WorkspacePath(chosen.index, ModelSpec(device="cpu", dtype="fp32")), queries=chosen.queries)
    task = bench.workspace
    causes = [query.causes for query in read_cause_queries(chosen.queries, task.index)]
    owner = np.asarray(task.index.array("corpus/chunk_document"))
    measure = f"recall@{chosen.at}" if chosen.measure == "recall" else "auprc"
    solved = []
    for spec in chosen.methods:
        method = open_method(spec)
        method.fit(task)
        scores = np.concatenate(
            [
                document_scores(block, owner, task.index.n_documents)
                for block in score_blocks(method, bench.queries, task.n_chunks)
            ]
        )
        found = [
            measure_all(Places.of(row, mine), (chosen.at,))[measure]
            for row, mine in zip(scores, causes, strict=True)
        ]
        mean = float(np.mean(found))
        print(
            json.dumps({"method": spec, "measure": measure, "queries": len(found), "mean": mean}), flush=True
        )
        if mean > chosen.most:
            solved.append(f"{spec} {mean:.3f}")
    if solved:
        print(
            f"a search engine solves this suite: {', '.join(solved)}, at most {chosen.most:g} was expected",
            file=sys.stderr,
        )
    return int(bool(solved))


if __name__ == "__main__":
    sys.exit(main())
