"""Benchmark items and the controls they are compared with, as tokens: what is scored, what is searched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.audit.presence import document_text
from stride_cli.corpus.chunking import DocumentTokenizer, scored_positions
from stride_cli.corpus.documents import Document, content_text
from stride_cli.corpus.sources import ReadLog
from stride_cli.errors import CorpusError, QueryError, StrideError

if TYPE_CHECKING:
    from stride_cli.corpus.forms import Form
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.workspace import Workspace

# takes the error of an item that cannot be used, its file, line and id
Rejected = Callable[[StrideError, str, int | None, str | None], None]
_WHERE = re.compile(r"(.*?):(\d+): ", re.DOTALL)  # how errors of a corpus begin


@dataclass(frozen=True)
class Sample:
    """One text whose loss and influences are measured.

    Attributes:
        ids: Rows of (T,) int64, as the index cuts a document: one a chunk.
        weights: Rows of (T,) float32, 1 where a token is scored: all of a text, the response of a prompt.
    """

    document: Document
    ids: list[np.ndarray]
    weights: list[np.ndarray]

    @property
    def scored(self) -> float:
        """Scored tokens."""
        return float(sum(weights.sum() for weights in self.weights))


class _Rejecting(ReadLog):
    """Hands bad records on, with file and line."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__("skip", tell=lambda text: None)
        self._rejected = rejected

    def reject(self, error: CorpusError) -> None:
        self.skipped += 1
        found = _WHERE.match(error.message)
        source = found[1] if found else ""
        line = int(found[2]) if found else None
        self._rejected(error, "stdin" if source == "<stdin>" else source, line, None)


def read_documents_of(source: str, options: ReadOptions, rejected: Rejected | None = None) -> list[Document]:
    """Read all documents of one file into memory; CorpusError as from `read_documents`.

    `rejected` takes a bad record's error, file, line and id; without it, as the options say.
    """
    from stride_cli.corpus.readers import read_documents

    log = ReadLog(options.on_bad) if rejected is None else _Rejecting(rejected)
    return list(read_documents([source], options, log=log))


def tokenize_samples(
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    block_size: int,
    form: Form | None = None,
    rejected: Rejected | None = None,
) -> list[Sample]:
    """Tokenise documents as an index does: `{text}` scored whole, `{prompt, response}` on the response.

    `form` is the corpus's, as of queries (`form_of`).

    Raises:
        QueryError: No token of a document is scored; names it. `rejected` takes it instead, and there is no
            sample of that document.
    """
    cutter = DocumentTokenizer(tokenizer, block_size=block_size, form=form)
    samples = []
    for document, whole in zip(documents, cutter.encode_batch(documents), strict=True):
        ids, weights = [], []
        for chunk in cutter.chunks(whole):
            weight = np.zeros(len(chunk.tokens), np.float32)
            weight[scored_positions(chunk)] = 1.0
            if weight[1:].any():  # a tail of one token predicts nothing
                ids.append(np.asarray(chunk.tokens, np.int64))
                weights.append(weight)
        if not ids:
            error = QueryError(
                f"{document.source}:{document.line}: item '{document.id}' has no token to score",
                fix="give it a text of two tokens or more, or a response",
            )
            if rejected is None:
                raise error
            rejected(error, document.source, document.line, document.id)
            continue
        samples.append(Sample(document, ids, weights))
    return samples


def parts_of(document: Document) -> list[str]:
    """Take the text of a document, or its prompt and its response: of a conversation, the last message."""
    if document.text is not None:
        return [document.text]
    if document.messages is not None:
        contents = [content_text(message) for message in document.messages]
        return [part for part in ("\n".join(contents[:-1]), contents[-1]) if part.strip()]
    return [part for part in (document.prompt or "", document.response or "") if part.strip()]


def copy_sample(workspace: Workspace, item: Document, number: int, span: tuple[int, int]) -> Sample:
    """Take an item as the corpus holds it: the very tokens and mask that training saw.

    Args:
        number: the document that holds it
        span: characters of its decoded tokens, as of `presence.Copy`; the tokens before are read, not scored

    Returns:
        Sample; where training scored none of these tokens, all of them are scored
    """
    _, spans = document_text(workspace.index, workspace.model.tokenizer, number)
    inside = np.array([begin < span[1] and span[0] < end for begin, end in spans], np.float32)
    chunks = [workspace.chunks.chunk(chunk) for chunk in workspace.index.document_chunks(number)]
    parts = np.split(inside, np.cumsum([len(tokens) for tokens, _ in chunks])[:-1])
    for part in parts:
        part[:1] = 0  # nothing is before it
    scored = [part * weights for part, (_, weights) in zip(parts, chunks, strict=True)]
    masks = scored if any(mask.any() for mask in scored) else parts
    ends = [int(np.flatnonzero(mask).max(initial=-1)) + 1 for mask in masks]
    rows = [row for row, end in enumerate(ends) if end]
    ids = [np.asarray(chunks[row][0][: ends[row]], np.int64) for row in rows]
    return Sample(item, ids, [masks[row][: ends[row]] for row in rows])
