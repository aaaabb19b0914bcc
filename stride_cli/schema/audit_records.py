"""The keys of the records that `stride audit` writes."""

from __future__ import annotations

from typing import Any

AUDIT_RECORDS: dict[str, dict[str, Any]] = {
    "stride.audit/1": {
        "schema": ("string", "stride.audit/1"),
        "item": ("string", "the item's id"),
        "line": ("integer", "its line in the benchmark, from 1"),
        "verdict": (
            "string",
            '"leaked and learnt", "present, no effect", "effect without a copy" or "no evidence"',
        ),
        "p": ("number", "the larger of p_loss and p_influence: both have to be unusual"),
        "q": (
            "number",
            "false-discovery rate at which the item would just be reported, among the items that are present "
            "in the corpus or among those that are not",
        ),
        "lexical": {
            "present": ("boolean", "whether enough of the item's n-grams are in the corpus"),
            "ngram": ("integer", "n of the n-grams: 8 tokens, or the item's length where it is shorter"),
            "ngram_share": ("number", "share of the item's n-grams that occur in the corpus, 0 … 1"),
            "longest_run": ("integer", "tokens of the longest run shared with one document; 0: no n-gram is"),
            "document": ("string", "the document of that run; empty where there is none"),
            "chunk": ("number", "the chunk where the run begins; null where there is none"),
            "passage": ("string", "the run with eight tokens on each side"),
            "bm25_document": ("string", "the document of the chunk most like the item by BM25"),
            "bm25_chunk": ("number", "that chunk"),
            "bm25_score": ("number", "its score"),
            "bm25_passage": ("string", "its sentence most like the item"),
        },
        "effect": {
            "p_loss": ("number", "rank of the loss among controls / (controls + 1), ties at their middle"),
            "p_influence": ("number", "the same of copied_share; 1 where it is 0"),
            "loss": ("number", "mean nats per scored token"),
            "control_loss": ("number", "mean loss of the controls; of made ones, of those made of the item"),
            "loss_gap": ("number", "control_loss − loss; > 0: the model knows the item better"),
            "candidates": ("integer", "chunks like the item, whose influence is added up"),
            "candidate_influence": ("number", "their influence, nats per scored token; > 0 supports"),
            "candidate_share": ("number", "the same / Σ|influence of every chunk|, at least 0"),
            "copied_share": ("number", "the same, each chunk × its BM25 score / that of a copy, at most 1"),
            "strongest_document": ("string", "document of the chunk of highest influence; empty: none"),
            "strongest_chunk": ("number", "that chunk; null where no chunk supports"),
            "strongest_influence": ("number", "its influence, nats per scored token"),
            "strongest_share": ("number", "the same / Σ|influence of every chunk|"),
            "strongest_is_candidate": ("boolean", "whether it is one of the chunks like the item"),
        },
        "controls": {
            "kind": ("string", '"file", "absent" (items without a copy) or "made"'),
            "count": ("integer", "controls that the item was ranked among"),
        },
    },
}
