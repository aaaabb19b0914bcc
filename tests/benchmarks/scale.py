"""What a hundred million chunks cost: building, opening, recovering, ranking, reading; and candidates by lists.

A corpus of `--chunks` chunks of 4 tokens, 8 to a document, is written, and built into an index by the
product's own build. Operators of it are not fitted, which would take days: those of a few chunks' bases with
random gates are stored in their place, and projections of random signs. So every array has the size that it
would have, and all commands run.

Parts, each of every size in a process of its own:

- `build`: bytes a chunk of every array, and memory (anonymous pages, the peak above what was held before).
- `open`: `Session.open`, the first time (all digests are compared) and again.
- `recover`: responses that planted chunks give, with noise, recovered through `Attributor.influences` at the
  default λ, in bare passes over the columns (the solver's own scan with a floor that none reaches); then
  `rank_documents`. Planted chunks have to come out on top, the certificate has to hold by a brute force over
  all n scores.
- `query`: whole queries, `Session.query`, warm: reading chunks, as by default, and without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli.output import emit, note
from tests.benchmarks._machine import machine, watched_memory

CHUNK_TOKENS, CHUNKS_OF_DOCUMENT = 4, 8
SIZES = (1_000_000, 10_000_000, 100_000_000)
PARTS = ("build", "open", "recover", "query")
_TEXTS = 4096  # different ones
_CONTENT = ("corpus/tokens", "corpus/text_bytes")  # the corpus itself, beside what an index adds to it


def _texts(count: int) -> list[str]:
    """Of 400 words of two letters in random order; 31 of them, which with the token that begins a document
    are 32."""
    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrst"
    words = [first + second for first in letters for second in letters]
    size = CHUNK_TOKENS * CHUNKS_OF_DOCUMENT - 1
    return ["".join(f" {words[word]}" for word in rng.integers(0, len(words), size)) for _ in range(count)]


def write_corpus(path: Path, documents: int) -> None:
    """Documents of the same few thousand texts, over and over: what they say does not matter here."""
    texts = [json.dumps(text) for text in _texts(min(_TEXTS, documents))]
    with path.open("w") as file:
        for first in range(0, documents, len(texts)):
            file.writelines(
                f'{{"id": "{first + place}", "text": {text}}}\n'
                for place, text in enumerate(texts[: documents - first])
            )


def small_model(folder: Path) -> Path:
    """A model of the product's own that hardly knows its corpus; made once."""
    path = folder / "model"
    if not path.exists():
        sample = folder / "sample.jsonl"
        write_corpus(sample, 2_000)
        command = [sys.executable, "-m", "stride_cli", "model", "train", str(sample), "--out", str(path)]
        for option, value in {"layers": 2, "width": 64, "vocab": 1024, "context": 16, "steps": 20}.items():
            command += [f"--{option}", str(value)]
        subprocess.run(command, check=True)
    return path


def build(folder: Path, chunks: int) -> Iterator[dict[str, Any]]:
    """One record: what the index takes, and what making it took. The index stays."""
    from stride_cli import api
    from stride_cli.corpus.options import BuildOptions

    model = small_model(folder)
    corpus = folder / f"{chunks}.jsonl"
    write_corpus(corpus, chunks // CHUNKS_OF_DOCUMENT)
    out = folder / f"{chunks}.stride"
    with watched_memory() as held:
        began, begun = time.process_time(), time.perf_counter()
        index = api.build_index(
            [str(corpus)],
            model_path=str(model),
            out=out,
            options=BuildOptions(block_size=CHUNK_TOKENS, store_text=False, overwrite=True),
        )
        seconds, elapsed = time.process_time() - began, time.perf_counter() - begun
    corpus.unlink()
    n = index.n_chunks
    arrays = {
        name: int(np.prod(index.shape(name))) * index.array(name).dtype.itemsize / n
        for group in ("corpus", "design")
        for name in index.names(group)
    }
    yield {
        "documents": index.n_documents,
        "tokens": index.n_tokens,
        "subsets": index.n_subsets,
        "degree": index.degree,
        **held,
        "processor_seconds": seconds,
        "seconds": elapsed,
        "microseconds_a_chunk": 1e6 * seconds / n,
        "bytes": arrays,
        "bytes_a_chunk": sum(size for name, size in arrays.items() if name not in _CONTENT),
        "index_megabytes": index.n_bytes / 1e6,
        "files": sum(1 for found in out.rglob("*") if found.is_file()),
    }


RUNS = {"build": build}


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    about = machine("numpy", "numba", "torch", "tokenizers")
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if given.one:
        part, chunks = given.one[0], int(given.one[1])
        command = f"python -m tests.benchmarks scale --parts {part} --chunks {chunks}"
        for record in RUNS[part](folder, chunks):
            yield {"benchmark": "scale", "part": part, "chunks": chunks, **record, "command": command} | about
        return
    small_model(folder)
    for part in given.parts:
        for chunks in given.chunks:
            note(f"{part}, {chunks:,} chunks")
            command = [sys.executable, "-m", "tests.benchmarks", "scale", "--folder", str(folder)]
            command += ["--one", part, str(chunks)]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            yield from map(json.loads, lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks scale", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("scale"), help="where indexes are made, and stay")
    parser.add_argument("--chunks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--one", nargs=2, metavar=("PART", "CHUNKS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for record in run(given):
        emit(record)
