"""What an index holds, as records for other programs: `stride index export`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.design import iter_row_members

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.index_records import IndexChunkRecord, IndexDocumentRecord, IndexSubsetRecord

_BLOCK = 1 << 14  # chunks whose documents and subsets are looked up together


def document_records(index: Index) -> Iterator[IndexDocumentRecord]:
    """One record a document: its id, its chunks [first, after), its text where the index holds texts."""
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
    """One record a chunk: its document, its tokens, from which of them on losses count, and its d subsets."""
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
    """One record a subset: its chunks, ascending."""
    offsets = np.asarray(index.array("design/row_offsets")[:])
    pieces: Iterable[Any]
    if index.has("design/row_members"):
        pieces = [index.array("design/row_members")]
    else:  # of a large index: sorted anew, in a temporary file
        pieces = iter_row_members(index.array("design/columns"), np.diff(offsets))
    number = 0
    for members in pieces:  # whole subsets each
        start, stop = int(offsets[number]), int(offsets[number]) + len(members)
        while number < index.n_subsets and offsets[number + 1] <= stop:
            own = members[int(offsets[number]) - start : int(offsets[number + 1]) - start]
            yield {
                "schema": "stride.index_subset/1",
                "subset": number,
                "chunks": np.asarray(own).tolist(),
            }
            number += 1


# by name: the records, and how many there are
EXPORTS: dict[str, tuple[Callable[[Index], Iterator[Mapping[str, Any]]], Callable[[Index], int]]] = {
    "documents": (document_records, lambda index: index.n_documents),
    "chunks": (chunk_records, lambda index: index.n_chunks),
    "subsets": (subset_records, lambda index: index.n_subsets),
}
