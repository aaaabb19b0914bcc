"""A small index, a function of its arguments alone; also run as a process that tests kill.

python sample_build.py PATH N_DOCUMENTS EVERY SHARD_BYTES [extend]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from index_format.design import build_columns
from index_format.writer import GroupWriter, IndexWriter

N_SUBSETS, DEGREE, SEED = 12, 3, 5
ATTRIBUTES = {
    "seed": SEED,
    "n_subsets": N_SUBSETS,
    "degree": DEGREE,
    "design": "regular",
    "block_size": 6,
    "fingerprints": {"corpus": "c0", "tokenizer": "t0", "model": "m0"},
    "config": {"degree": DEGREE},
}


def document(number: int) -> tuple[str, str, list[np.ndarray]]:
    """(id, text, chunks of tokens) of a document."""
    rng = np.random.default_rng((77, number))
    chunks = [rng.integers(0, 5000, rng.integers(1, 7)).astype(np.uint16) for _ in range(rng.integers(1, 4))]
    return f"doc-{number}", "naïve ☃ "[: number % 9] * (number % 4), chunks


def append_documents(writer: IndexWriter, start: int, stop: int) -> None:
    for offsets in ("corpus/chunk_offsets", "corpus/document_offsets"):
        if writer.length(offsets) == 0:
            writer.append(offsets, np.zeros(1, np.int64))
    for number in range(start, stop):
        name, text, chunks = document(number)
        first = writer.length("corpus/chunk_document")
        writer.append_strings("corpus/document_id", [name])
        writer.append_strings("corpus/text", [text])
        for chunk in chunks:
            writer.append("corpus/tokens", chunk)
            writer.append("corpus/chunk_offsets", np.array([writer.length("corpus/tokens")]))
            writer.append("corpus/chunk_document", np.array([number]))
            writer.append("corpus/loss_start", np.array([1], np.int32))
        last = first + len(chunks)
        writer.append("corpus/document_offsets", np.array([last]))
        columns = build_columns(first, last, n_subsets=N_SUBSETS, degree=DEGREE, seed=SEED)
        writer.append("design/columns", columns)


def finish(writer: IndexWriter, start: int, stop: int, every: int) -> None:
    done = writer.state["documents"] if writer.state else start
    while done < stop:
        upto = min(done + every, stop)
        append_documents(writer, done, upto)
        done = upto
        writer.commit({"documents": done})
    writer.append_row_offsets(N_SUBSETS)
    writer.publish(ATTRIBUTES)


def build(
    path: Path, n_documents: int = 30, *, every: int = 7, shard_bytes: int = 1 << 20, key: str = "k"
) -> None:
    with IndexWriter.create(path, build_key=key, shard_bytes=shard_bytes) as writer:
        finish(writer, 0, n_documents, every)


def extend(path: Path, start: int, stop: int, *, every: int = 7, key: str = "k") -> None:
    with IndexWriter.extend(path, build_key=key) as writer:
        finish(writer, start, stop, every)


def add_operators(path: Path, *, steps: int = 4, key: str = "o", rows: int = N_SUBSETS) -> None:
    with GroupWriter(path, "operators", key, shard_bytes=128) as writer:
        for step in range((writer.state or {"step": 0})["step"], steps):
            writer.append("operators/training_log_loss", np.array([1 / (step + 1)]))
            writer.commit({"step": step + 1})
        writer.append(
            "operators/gates", np.random.default_rng(steps).normal(size=(rows, 5)).astype(np.float32)
        )
        writer.publish({"space": "residual", "layer": 2})


if __name__ == "__main__":
    _path, _n, _every, _shard_bytes = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    if sys.argv[5:] == ["extend"]:
        extend(_path, _n // 2, _n, every=_every, key="more")
    else:
        build(_path, _n, every=_every, shard_bytes=_shard_bytes)
