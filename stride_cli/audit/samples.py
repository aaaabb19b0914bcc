"""Benchmark items and the controls they are compared with, as tokens: what is scored, what is searched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.corpus.chunking import DocumentTokenizer, scored_positions
from stride_cli.corpus.documents import Document, content_text
from stride_cli.corpus.forms import is_scored
from stride_cli.corpus.sources import ReadLog
from stride_cli.errors import CorpusError, QueryError, StrideError

if TYPE_CHECKING:
    from stride_cli.corpus.forms import Form
    from stride_cli.corpus.readers import ReadOptions

# takes the error of an item that cannot be used, its file, line and id
Rejected = Callable[[StrideError, str, int | None, str | None], None]
_WHERE = re.compile(r"(.*?):(\d+): ", re.DOTALL)  # how errors of a corpus begin


@dataclass(frozen=True)
class Sample:
    """One text whose loss and influences are measured.

    Attributes
    ----------
    document : Document
    parts : list of (L,) int64        its text alone, tokenised without template and special tokens: what is
                                      looked for in the corpus; prompt and response apart
    ids : list of (T,) int64          as the index cuts a document: one row a chunk
    weights : list of (T,) float32    1 where a token is scored: all of a text, the response of a prompt
    """

    document: Document
    parts: list[np.ndarray]
    ids: list[np.ndarray]
    weights: list[np.ndarray]

    @property
    def name(self) -> str:
        return self.document.id

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

    Parameters
    ----------
    rejected : callable, optional      takes a bad record's error, file, line and id; else as options say
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

    Raises
    ------
    QueryError      no token of a document is scored; names it. `rejected` takes it instead, and there is no
                    sample of that document
    """
    cutter = DocumentTokenizer(tokenizer, block_size=block_size, form=form)
    contents = [content_of(document) for document in documents]
    flat = [content for each in contents for content in each]
    # a batch of nothing is an error to some tokenizers
    encoded = iter(tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
    samples = []
    for document, each, whole in zip(documents, contents, cutter.encode_batch(documents), strict=True):
        parts = [np.asarray(next(encoded), np.int64) for _ in each]
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
        samples.append(Sample(document, parts, ids, weights))
    return samples


def content_of(document: Document) -> list[str]:
    """Take the text of a document part by part: prompt and response, or each message."""
    if document.text is not None:
        return [document.text]
    if document.messages is not None:
        return [content_text(message) for message in document.messages]
    return [document.prompt or "", document.response or ""]


def scored_parts(document: Document) -> list[bool]:
    """Say which of `content_of` the loss is taken over."""
    if document.text is not None:
        return [True]
    if document.messages is not None:
        return [is_scored(message) for message in document.messages]
    return [False, True]


def with_content(document: Document, name: str, contents: Sequence[str]) -> Document:
    """Make the same kind of document with other words, by another name."""
    from dataclasses import replace

    if document.text is not None:
        return replace(document, id=name, text=contents[0])
    if document.messages is not None:
        turns = zip(document.messages, contents, strict=True)
        return replace(document, id=name, messages=tuple({**turn, "content": text} for turn, text in turns))
    return replace(document, id=name, prompt=contents[0], response=contents[1])
