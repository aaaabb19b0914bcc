"""The records that `stride select` and `stride evaluate selection` write."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict


class SelectionRecord(TypedDict):
    schema: Literal["stride.selection/1"]
    out: Annotated[str, "directory with chosen.jsonl, random.jsonl and bm25.jsonl"]
    size: Annotated[int, "documents in each"]
    documents: Annotated[int, "documents of the corpus"]
    queries: Annotated[int, "queries that they were chosen for"]
    method: Annotated[str, "whose scores chose"]
    lots: Annotated[int, "chosen documents that no query speaks for: drawn by lot"]
    shared_with_bm25: Annotated[float, "share of the chosen documents that BM25 chose too"]
    seconds: Annotated[float, "seconds of the whole command"]


class SeedSpread(TypedDict):
    """A mean with its standard deviation."""

    mean: Annotated[float, ""]
    sd: Annotated[float, ""]


def _spread(what: str, over: str) -> dict[str, str]:
    return {
        "mean": f"{what}; null where no query has an answer",
        "sd": f"sample standard deviation over {over}; null for one",
    }


class TaskScore(TypedDict):
    task: Annotated[str, "the queries' task"]
    queries: Annotated[int, "queries"]
    loss: Annotated[float, "mean over them and seeds"]
    f1: Annotated[float, "mean over them and seeds"]


class SelectionScoreRecord(TypedDict):
    schema: Literal["stride.selection_score/1"]
    set: Annotated[str, '"base" (not fine-tuned), "chosen", "random" or "bm25"']
    queries: Annotated[int, "held-out queries"]
    seeds: Annotated[int, "models fine-tuned on the set"]
    loss: Annotated[SeedSpread, _spread("mean over queries, nats per scored token", "seeds")]
    f1: Annotated[SeedSpread, _spread("unigram F1 of greedy answers, mean over queries", "seeds")]
    f1_over_tasks: Annotated[SeedSpread, _spread("mean over tasks", "tasks")]
    tasks: list[TaskScore]
