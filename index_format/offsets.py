"""Offsets and other long columns of an index, looked at part by part: for readers, and for `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from index_format.reader import Index
    from index_format.shards import ShardedArray

BLOCK_VALUES = 1 << 20


def ranges(stop: int, start: int = 0, *, width: int = 1) -> Iterator[tuple[int, int]]:
    """Rows first … last-1, of `width` values each, part by part."""
    rows = max(1, BLOCK_VALUES // max(1, width))
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


def offset_ends(index: Index) -> dict[str, int]:
    """The offsets of corpus/ by name, and where each of them ends."""
    ends = {
        "corpus/chunk_offsets": index.n_tokens,
        "corpus/document_offsets": index.n_chunks,
        "corpus/document_id_offsets": index.shape("corpus/document_id_bytes")[0],
    }
    if index.has("corpus/text_offsets"):
        ends["corpus/text_offsets"] = index.shape("corpus/text_bytes")[0]
    return ends


def offsets_wrong(offsets: np.ndarray | ShardedArray, last: int) -> str:
    """What is wrong with offsets that should rise from 0 to `last`; "" when nothing is."""
    if offsets[0] != 0 or offsets[-1] != last:
        return f"should go from 0 to {last}, go from {offsets[0]} to {offsets[-1]}"
    for first, end in ranges(len(offsets) - 1):
        if wrong := first_bad(first, np.diff(offsets[first : end + 1]) < 0, "fall after entry {}"):
            return wrong
    return ""


def first_bad(offset: int, bad: Any, message: str) -> str:
    """`message` with the number of the first row that is bad; "" when none is."""
    return message.format(offset + int(np.argmax(bad))) if bad.any() else ""
