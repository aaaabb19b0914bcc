"""Cut the documents of a corpus into the training set: the same chunks as those of its index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stride_cli.corpus.chunking import Chunk, DocumentTokenizer
from stride_cli.corpus.documents import EMPTY_CORPUS, Document
from stride_cli.corpus.readers import ReadOptions, open_documents
from stride_cli.errors import CorpusError

_BATCH = 256


@dataclass(frozen=True)
class Corpus:
    """Documents in order, and their fingerprint (the index's: chained over ids and contents)."""

    sources: list[str]
    documents: list[Document]
    fingerprint: str
    n_bytes: int


def read_corpus(sources: Sequence[str], reading: ReadOptions) -> Corpus:
    """Read a corpus whole; CorpusError as from `read_documents`."""
    documents: list[Document] = []
    digest = EMPTY_CORPUS
    n_bytes = 0
    stream, _ = open_documents(sources, reading)
    for document in stream:
        documents.append(document)
        digest = document.digest(digest)
        n_bytes += len(document.plain_text.encode())
    return Corpus(list(sources), documents, digest.hex(), n_bytes)


def cut(corpus: Corpus, tokenizer: Any, *, block_size: int) -> tuple[list[Chunk], dict[str, Any]]:
    """Cut a corpus into chunks in index order; return them with the recipe's record of the corpus.

    Raises
    ------
    CorpusError
        No chunk has a scored token.
    """
    cutter = DocumentTokenizer(tokenizer, block_size=block_size)
    chunks: list[Chunk] = []
    for start in range(0, len(corpus.documents), _BATCH):
        for encoded in cutter.encode_batch(corpus.documents[start : start + _BATCH]):
            chunks += cutter.chunks(encoded)
    record = {
        "sources": corpus.sources,
        "fingerprint": corpus.fingerprint,
        "documents": len(corpus.documents),
        "chunks": len(chunks),
        "tokens": sum(len(chunk.tokens) for chunk in chunks),
        "scored_tokens": sum(chunk.n_scored for chunk in chunks),
    }
    if record["scored_tokens"] == 0:
        raise CorpusError(
            f"{', '.join(corpus.sources)}: no document has a token to train on",
            fix="give documents of two tokens or more, or prompts with a response",
        )
    return chunks, record
