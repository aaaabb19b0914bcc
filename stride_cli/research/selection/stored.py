"""Restore the documents of an index as they stood in their source.

The index stores the plain text of a document: of a prompt with its response, the two joined by a line break.
Which line break that was is found by trying: the right one gives the index's own tokens and scored positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import Document
from stride_cli.corpus.forms import Form
from stride_cli.data.batches import ChunkReader
from stride_cli.errors import CorpusError, UsageError
from stride_cli.hub import HUB
from stride_cli.permissions import Permissions
from stride_cli.remembered import find_recorded

if TYPE_CHECKING:
    from index_format.reader import Index

_TRIES = 64


def require_stored_text(index: Index) -> None:
    """Raise UsageError where the index was built without texts."""
    if not index.has("corpus/text_bytes"):
        raise UsageError(
            f"index '{index.path}' holds no text, so documents cannot be written",
            fix="build it again without --no-text",
        )


def stored_documents(
    index: Index, tokenizer: Any, numbers: Sequence[int], permissions: Permissions = Permissions()
) -> Iterator[dict[str, Any]]:
    """Restore the given documents: a text, a prompt with its response, or messages.

    Conversations are read again from the index's sources, whose roles the index does not keep.

    Parameters
    ----------
    numbers : document numbers

    Raises
    ------
    UsageError       the index holds no text
    CorpusError      a conversation whose source is no longer there, or has changed
    """
    require_stored_text(index)
    chunks = ChunkReader(index)
    form = Form.recorded(index.attributes)
    cutter = DocumentTokenizer(tokenizer, block_size=int(index.attributes["block_size"]), form=form)
    turns: dict[str, Document] | None = None
    for number in numbers:
        name, text = index.document_id(number), index.document_text(number)
        assert text is not None
        found = _as_written(Document(id=name, text=text), index.document_chunks(number), chunks, cutter)
        if found is None:
            if turns is None:
                turns = _from_sources(index, permissions)
            found = turns.get(name)
            if found is None or found.plain_text != text:
                raise CorpusError(
                    f"document '{name}' is a conversation, and its roles are not in the index '{index.path}'",
                    fix="put the corpus back where the index was built from (stride index info)",
                )
        yield record_of(found)


def record_of(document: Document) -> dict[str, Any]:
    """Make the object of a JSON Lines corpus."""
    if document.text is not None:
        return {"id": document.id, "text": document.text}
    if document.messages is not None:
        options = dict(document.template or {})
        tools = {"tools": options.pop("tools")} if "tools" in options else {}
        more = {"chat_template_kwargs": options} if options else {}
        return {"id": document.id, "messages": list(document.messages), **tools, **more}
    return {"id": document.id, "prompt": document.prompt, "response": document.response}


def _as_written(
    document: Document, rows: range, chunks: ChunkReader, cutter: DocumentTokenizer
) -> Document | None:
    """Find whether a text, or a prompt with its response, gives the index's tokens."""
    wanted = [chunks.chunk(row) for row in rows]
    if _gives(document, wanted, cutter):
        return document
    text = document.plain_text
    answer = "".join(
        str(cutter.tokenizer.decode(tokens[weights > 0], skip_special_tokens=True))
        for tokens, weights in wanted
    )
    breaks = np.array([at for at, mark in enumerate(text) if mark == "\n"], np.int64)
    expected = len(text) - len(answer) - 1
    for at in breaks[np.argsort(np.abs(breaks - expected), kind="stable")][:_TRIES]:
        split = Document(id=document.id, prompt=text[:at], response=text[at + 1 :])
        if split.response and _gives(split, wanted, cutter):
            return split
    return None


def _gives(
    document: Document, wanted: Sequence[tuple[np.ndarray, np.ndarray]], cutter: DocumentTokenizer
) -> bool:
    """Tell whether a document has these tokens and scored positions."""
    (encoded,) = cutter.encode_batch([document])
    tokens = np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, _ in wanted)])
    if not np.array_equal(encoded.tokens, tokens):
        return False
    scored = np.concatenate([np.zeros(0, bool), *(weights > 0 for _, weights in wanted)])
    expected = encoded.scored.copy()
    expected[:: cutter.block_size] = False  # a chunk's first token has nothing before it
    return np.array_equal(expected, scored)


def _from_sources(index: Index, permissions: Permissions) -> dict[str, Document]:
    """Read the conversations of the corpus again, by id; empty where a source is gone, or may not be
    fetched from the hub."""
    from stride_cli.corpus.readers import Fields, ReadOptions, open_documents

    config = index.attributes.get("config") or {}
    reading = dict(config.get("reading") or {})
    options = ReadOptions(**{**reading, "fields": Fields(**reading.get("fields", {})), "on_bad": "skip"})
    try:
        # those that earlier versions recorded are from the working directory
        sources = [find_recorded(source, index.path) or source for source in config.get("sources") or []]
        if any(source.startswith(HUB) for source in sources) and not permissions.allow_download:
            return {}  # the index names it, and not its reader
        documents, _ = open_documents(sources, options)
        return {document.id: document for document in documents if document.messages is not None}
    except (CorpusError, OSError):
        return {}
