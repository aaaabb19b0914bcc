"""The keys of the records that `stride select` and `stride evaluate selection` write."""

from __future__ import annotations

from typing import Any


def _spread(what: str, over: str) -> dict[str, Any]:
    return {
        "mean": ("number", f"{what}; null where no query has an answer"),
        "sd": ("number", f"sample standard deviation over {over}; null for one"),
    }


SELECTION_RECORDS: dict[str, dict[str, Any]] = {
    "stride.selection/1": {
        "schema": ("string", "stride.selection/1"),
        "out": ("string", "directory with chosen.jsonl, random.jsonl and bm25.jsonl"),
        "size": ("integer", "documents in each"),
        "documents": ("integer", "documents of the corpus"),
        "queries": ("integer", "queries that they were chosen for"),
        "method": ("string", "whose scores chose"),
        "by": ("string", '"greedy", "sum" or "quota"'),
        "lots": ("integer", "chosen documents that no query speaks for: drawn by lot"),
        "shared_with_bm25": ("number", "share of the chosen documents that BM25 chose too"),
        "seconds": ("number", "seconds of the whole command"),
    },
    "stride.selection_score/1": {
        "schema": ("string", "stride.selection_score/1"),
        "set": ("string", '"base" (not fine-tuned), "chosen", "random" or "bm25"'),
        "queries": ("integer", "held-out queries"),
        "seeds": ("integer", "models fine-tuned on the set"),
        "loss": _spread("mean over queries, nats per scored token", "seeds"),
        "f1": _spread("unigram F1 of greedy answers, mean over queries", "seeds"),
        "f1_over_tasks": _spread("mean over tasks", "tasks"),
        "tasks": [
            {
                "task": ("string", "the queries' task"),
                "queries": ("integer", "queries"),
                "loss": ("number", "mean over them and seeds"),
                "f1": ("number", "mean over them and seeds"),
            }
        ],
    },
}
