"""Records of an index: the numbers that commands report, and its documents, one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import Location, RemotePath
from stride_cli.corpus.plan import expected_neighbours, expected_overlapping

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.index_records import (
        IndexDocumentRecord,
        IndexInfoRecord,
        IndexRecord,
        IndexSummary,
        ShownTokens,
    )


def summarise(index: Index, path: Location) -> IndexSummary:
    """Count what is in an index."""
    on_disk = disk_bytes(path)
    counts = index.attributes.get("counts") or {}
    return {
        "index": str(path),
        "documents": index.n_documents,
        "chunks": index.n_chunks,
        "tokens": index.n_tokens,
        "scored_tokens": counts.get("scored_tokens"),
        "unscored_documents": counts.get("unscored_documents"),
        "unscored_chunks": counts.get("unscored_chunks"),
        "conversations": counts.get("conversations"),
        "skipped_records": counts.get("skipped_records"),
        "subsets": index.n_subsets,
        "degree": index.degree,
        "block_size": index.attributes["block_size"],
        "bytes": index.n_bytes if on_disk is None else on_disk,
    }


def made(index: Index, path: Location, seconds: float) -> IndexRecord:
    """Describe an index that was just made or changed, in so many seconds."""
    return {"schema": "stride.index/1", **summarise(index, path), "seconds": round(seconds, 3)}


def describe(index: Index, path: Location) -> IndexInfoRecord:
    """Describe an index: its counts, its design, its stages and what it was built from."""
    stated = index.attributes.get
    design = index.n_chunks, index.n_subsets, index.degree
    return {
        "schema": "stride.index_info/1",
        **summarise(index, path),
        "seed": index.seed,
        "chunks_per_subset": index.n_chunks * index.degree / index.n_subsets,
        "expected_neighbours": expected_neighbours(*design),
        "expected_overlapping": expected_overlapping(*design),
        "texts": index.has("corpus/text_bytes"),
        "operators": _operators(index) if index.has("operators") else None,
        "truth": _truth(index) if index.has("truth") else None,
        "form": stated("form"),
        "fingerprints": index.attributes["fingerprints"],
        "model_path": stated("model_path"),
        "created_by": stated("created_by"),
        "format_version": index.attributes["format_version"],
        "config": stated("config"),
    }


def _operators(index: Index) -> dict[str, Any]:
    """Return the attributes of the operators, with their share of the chunks of today."""
    found = dict(index.group_attributes("operators"))
    if index.has("operators/seen") and found.get("coverage") is not None:
        found["coverage"] *= index.fitted_share
    return found


def _truth(index: Index) -> dict[str, Any]:
    """Count the retrained models; queries and losses are in the group's arrays."""
    subsets, seeds, queries = index.shape("truth/losses")
    alphas = sorted({round(float(alpha), 3) for alpha in index.array("truth/alpha")[:]})
    return {"subsets": subsets, "seeds": seeds, "queries": queries, "alpha": alphas}


def disk_bytes(path: Location) -> int | None:
    """Sum the bytes of a directory, unfinished stages too; None for a zip file or a URL."""
    if isinstance(path, RemotePath) or path.is_file():
        return None
    found = (Path(directory) / name for directory, _, names in os.walk(path) for name in names)
    return sum(file.stat().st_size for file in found)


def document_records(
    index: Index, numbers: Iterable[int], *, tokenizer: Any = None
) -> Iterator[IndexDocumentRecord]:
    """Yield one record a document; with a tokenizer also its tokens, and which of them are scored.

    Args:
        tokenizer: The model's; of a classifier, whose tokens are rows and labels, anything that is not None.
    """
    columns, starts = index.array("design/columns"), index.array("corpus/loss_start")
    offsets = index.array("corpus/chunk_offsets")
    mask = index.array("corpus/loss_mask") if index.has("corpus/loss_mask") else None
    for number in numbers:
        chunks = index.document_chunks(number)
        record: IndexDocumentRecord = {
            "schema": "stride.index_document/1",
            "number": number,
            "document": index.document_id(number),
            "chunks": [chunks.start, chunks.stop],
            "text": index.document_text(number),
        }
        if tokenizer is not None:
            record["form"] = index.attributes.get("form")
            record["tokens"] = []
        for row in chunks if tokenizer is not None else ():
            ids = index.chunk_tokens(row)
            scored = np.arange(len(ids)) >= starts[row]
            if mask is not None:
                scored = np.asarray(mask[offsets[row] : offsets[row + 1]]) > 0
            subsets = np.sort(np.asarray(columns[row])).tolist()
            record["tokens"].append(
                {"chunk": row, "subsets": subsets, **shown_tokens(ids, scored, tokenizer)}
            )
        yield record


def shown_tokens(ids: Sequence[int] | np.ndarray, scored: np.ndarray, tokenizer: Any) -> ShownTokens:
    """Describe tokens: their ids, what each is alone, and 1 where its loss counts."""
    listed = [int(token) for token in ids]
    written = getattr(tokenizer, "decode", None)
    pieces = [] if written is None else [str(written([token])) for token in listed]
    return {"ids": listed, "pieces": pieces, "scored": np.asarray(scored).astype(int).tolist()}
