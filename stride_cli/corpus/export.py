"""Records of an index for other programs: `stride index export`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.index_records import IndexChunkRecord, IndexDocumentRecord, IndexSubsetRecord

_BLOCK = 1 << 14  # chunks whose documents and subsets are looked up together


def document_records(index: Index) -> Iterator[IndexDocumentRecord]:
    """Yield one record a document: its id, its chunks [first, after), its text where the index has it."""
    for number in range(index.n_documents):
        chunks = index.document_chunks(number)
        yield {
            "schema": "stride.index_document/1",
            "number": number,
            "document": index.document_id(number),
            "chunks": [chunks.start, chunks.stop],
            "text": index.document_text(number),
        }


def chunk_records(index: Index) -> Iterator[IndexChunkRecord]:
    """Yield one record a chunk: its document, tokens, scored tokens and d subsets."""
    columns, starts = index.array("design/columns"), index.array("corpus/loss_start")
    offsets = index.array("corpus/chunk_offsets")
    mask = index.array("corpus/loss_mask") if index.has("corpus/loss_mask") else None
    for first in range(0, index.n_chunks, _BLOCK):
        rows = np.arange(first, min(first + _BLOCK, index.n_chunks))
        documents = index.chunk_documents(rows).tolist()
        subsets = np.sort(np.asarray(columns[first : rows[-1] + 1]), axis=1).tolist()
        scored = np.asarray(starts[first : rows[-1] + 1]).tolist()
        for row, document, start, own in zip(rows.tolist(), documents, scored, subsets, strict=True):
            yield {
                "schema": "stride.index_chunk/1",
                "chunk": row,
                "document": index.document_id(document),
                "tokens": index.chunk_tokens(row).tolist(),
                "loss_start": start,
                "loss_mask": None if mask is None else mask[offsets[row] : offsets[row + 1]].tolist(),
                "subsets": own,
            }


def subset_records(index: Index) -> Iterator[IndexSubsetRecord]:
    """Yield one record a subset: its chunks, ascending."""
    offsets = np.asarray(index.array("design/row_offsets"))
    entries = np.argsort(np.asarray(index.array("design/columns")).ravel(), kind="stable")
    for subset in range(index.n_subsets):
        own = entries[offsets[subset] : offsets[subset + 1]] // index.degree
        yield {"schema": "stride.index_subset/1", "subset": subset, "chunks": own.tolist()}


# by name: the records, and how many there are
EXPORTS: dict[str, tuple[Callable[[Index], Iterator[Mapping[str, Any]]], Callable[[Index], int]]] = {
    "documents": (document_records, lambda index: index.n_documents),
    "chunks": (chunk_records, lambda index: index.n_chunks),
    "subsets": (subset_records, lambda index: index.n_subsets),
}
