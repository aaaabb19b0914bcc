"""The records that `stride audit` writes."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict


class LexicalEvidence(TypedDict):
    present: Annotated[bool, "whether enough of the item's n-grams are in the corpus"]
    near: Annotated[
        bool, "whether it is there in other words: not present, though one chunk holds many of its 3-grams"
    ]
    contained: Annotated[float, "the largest share of its 3-grams that one chunk holds, 0 … 1"]
    contained_document: Annotated[str, "the document of that chunk; empty: none holds any"]
    ngram: Annotated[int, "n of the n-grams: 8 tokens, or the item's length where it is shorter"]
    ngram_share: Annotated[float, "share of the item's n-grams that occur in the corpus, 0 … 1"]
    longest_run: Annotated[int, "tokens of the longest run shared with one document; 0: no n-gram is"]
    document: Annotated[str, "the document of that run; empty where there is none"]
    chunk: Annotated[float | None, "the chunk where the run begins; null where there is none"]
    passage: Annotated[str, "the run with eight tokens on each side"]
    bm25_document: Annotated[str, "the document of the chunk most like the item by BM25"]
    bm25_chunk: Annotated[float | None, "that chunk"]
    bm25_score: Annotated[float, "its score"]
    bm25_passage: Annotated[str, "its sentence most like the item"]


class EffectRecord(TypedDict):
    p_loss: Annotated[
        float,
        "rank of the loss (where base_loss is there: of log base_loss − log loss) among controls / "
        "(controls + 1), ties at their middle",
    ]
    p_influence: Annotated[float, "the same of copied_share; 1 where it is 0"]
    loss: Annotated[float, "mean nats per scored token"]
    base_loss: Annotated[
        float | None, "the same of the model that this one was fine-tuned from; null where there is none"
    ]
    control_loss: Annotated[float, "mean loss of the controls; of made ones, of those made of the item"]
    loss_gap: Annotated[float, "control_loss − loss; > 0: the model knows the item better"]
    candidates: Annotated[int, "chunks like the item, whose influence is added up"]
    candidate_influence: Annotated[float, "their influence, relative as a query's; > 0 supports"]
    candidate_share: Annotated[float, "the same / Σ|influence of every chunk|, at least 0"]
    copied_share: Annotated[float, "the same, each chunk × its BM25 score / that of a copy, at most 1"]
    strongest_document: Annotated[str, "document of the chunk of highest influence; empty: none"]
    strongest_chunk: Annotated[float | None, "that chunk; null where no chunk supports"]
    strongest_influence: Annotated[float, "its influence, relative likewise"]
    strongest_share: Annotated[float, "the same / Σ|influence of every chunk|"]
    strongest_is_candidate: Annotated[bool, "whether it is one of the chunks like the item"]


class ControlsRecord(TypedDict):
    kind: Annotated[str, '"file", "absent" (items without a copy) or "made"']
    count: Annotated[int, "controls that the item was ranked among"]


class AuditRecord(TypedDict):
    schema: Literal["stride.audit/1"]
    item: Annotated[str, "the item's id"]
    line: Annotated[int, "its line in the benchmark, from 1"]
    verdict: Annotated[
        str,
        '"leaked and learnt", "present, no effect", "effect without a copy" or "no evidence"',
    ]
    p: Annotated[float, "the larger of p_loss and p_influence: both have to be unusual"]
    q: Annotated[
        float,
        "false-discovery rate at which the item would just be reported, among the items that are in the "
        "corpus (present or near) or among those that are not",
    ]
    lexical: LexicalEvidence
    effect: EffectRecord
    controls: ControlsRecord
