"""The keys of the records that `stride index` writes."""

from __future__ import annotations

from typing import Any

_PATH = ("string", "path of the index")
_SUBSETS = ("integer", "K")
_DEGREE = ("integer", "d, the subsets of a chunk")
_PER_SUBSET = ("number", "n·d / K, the mean size of a subset")
_NEIGHBOURS = (
    "number",
    "other chunks that share at least d − 1 of a chunk's subsets, expected: hardly told apart from it",
)
_OVERLAPPING = ("number", "other chunks that share d / 3 or more, expected")
_SUMMARY: dict[str, Any] = {
    "index": _PATH,
    "documents": ("integer", "documents"),
    "chunks": ("integer", "n"),
    "tokens": ("integer", "tokens of all chunks; of a classifier, two a row"),
    "scored_tokens": ("integer or null", "tokens whose loss is trained on"),
    "unscored_documents": ("integer or null", "documents without any; nothing can be attributed to them"),
    "skipped_records": ("integer or null", "records left out, with --on-bad skip"),
    "subsets": _SUBSETS,
    "degree": _DEGREE,
    "block_size": ("integer", "most tokens of a chunk"),
    "bytes": ("integer", "size on disk"),
}
INDEX_RECORDS: dict[str, dict[str, Any]] = {
    "stride.index/1": {
        "schema": ("string", "stride.index/1"),
        **_SUMMARY,
        "seconds": ("number", "seconds of the whole command"),
    },
    "stride.index_info/1": {
        "schema": ("string", "stride.index_info/1"),
        **_SUMMARY,
        "seed": ("integer", "of the design"),
        "chunks_per_subset": _PER_SUBSET,
        "expected_neighbours": _NEIGHBOURS,
        "expected_overlapping": _OVERLAPPING,
        "texts": ("boolean", "whether the documents' texts are in the index"),
        "operators": ("object or null", "how they were fitted; null: stride train has not been run"),
        "truth": ("object or null", "models retrained on random subsets; null where there are none"),
        "fingerprints": ("object", "SHA-256 of corpus, tokenizer and model, hex"),
        "model_path": ("string or null", "where the model was"),
        "created_by": ("string or null", "program and version"),
        "format_version": ("integer", "of the index format"),
        "config": ("object or null", "the options it was built with"),
    },
    "stride.index_plan/1": {
        "schema": ("string", "stride.index_plan/1"),
        "n_documents": ("integer or null", "documents; null with --chunks"),
        "n_chunks": ("integer", "n"),
        "n_tokens": ("integer or null", "tokens; null with --chunks"),
        "n_subsets": _SUBSETS,
        "degree": _DEGREE,
        "chunks_per_subset": _PER_SUBSET,
        "coverage_closed": ("number", "share of the chunks that the closed form sees"),
        "coverage_sgd": ("number", "share that the published recipe is expected to see"),
        "expected_neighbours": _NEIGHBOURS,
        "expected_overlapping": _OVERLAPPING,
        "gate_dimension": ("integer", "p, numbers of one operator"),
        "gate_bytes": ("integer", "K·p numbers on disk, of 4 bytes or, many, of about 1; of all models"),
        "sketch_bytes": ("integer", "what --sketch keeps on disk; of all models"),
        "bytes": ("object", "array → bytes on disk"),
        "total_bytes": ("integer", "their sum, without gates and sketches"),
        "build_memory_bytes": ("integer", "what the build holds at most, beside the tokenizer"),
        "fit_memory_bytes": (
            "integer",
            "what fitting holds beside the model and a batch (2 GB at most): K·p numbers of 4 bytes",
        ),
        "query_memory_bytes": ("integer", "what stays in the page cache for fast queries"),
    },
    "stride.index_document/1": {
        "schema": ("string", "stride.index_document/1"),
        "number": ("integer", "its number in the index"),
        "document": ("string", "its id"),
        "chunks": [("integer", "its chunks: the first, and the one after the last")],
        "text": ("string or null", "null where the index was built without texts"),
    },
    "stride.index_chunk/1": {
        "schema": ("string", "stride.index_chunk/1"),
        "chunk": ("integer", "its number in the index"),
        "document": ("string", "id of its document"),
        "tokens": [("integer", "token ids; of a classifier, two a row")],
        "loss_start": ("integer", "the first token whose loss counts"),
        "loss_mask": ("array or null", "1 where a token's loss counts; null where loss_start says it"),
        "subsets": [("integer", "its d subsets, ascending: its column of the design matrix")],
    },
    "stride.index_subset/1": {
        "schema": ("string", "stride.index_subset/1"),
        "subset": ("integer", "k"),
        "chunks": [("integer", "its chunks, ascending: row k of the design matrix")],
    },
    "stride.index_verify/1": {
        "schema": ("string", "stride.index_verify/1"),
        "index": _PATH,
        "whole": ("boolean", "true: no byte has changed, the only record; false: a record for each problem"),
        "path": ("string", "of a problem: the file inside the index", "optional"),
        "kind": (
            "string",
            'of a problem: "missing", "extra", "length", "content" or "invariant"',
            "optional",
        ),
        "message": ("string", "of a problem: what was expected and found", "optional"),
    },
}
