"""How fast an index is built, against the bare tokenizer over the same text, and what it holds in memory.

Throughput: `encode_batch_fast` of the tokenizer's own library on batches of 256 documents, ids taken, and a
whole `build_index` of the same file (read, parsed, checked, chunked, digested, written, synced), in turn, on
one tokenizer thread; processor seconds, minima. Memory: builds of `--chunks` chunks of 16 tokens, four to a
document, each in a process of its own; the peak of its anonymous pages above what it held before, sampled,
and of all its pages, those of mapped files too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stride_cli.output import emit
from tests.benchmarks._machine import interleave, machine, watched_memory

CHUNK_TOKENS = 16
CHUNKS_OF_DOCUMENT = 4
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
BATCH = 256


def build(corpus: Path, tokenizer: Any, out: Path, block_size: int) -> Any:
    from stride_cli.corpus.build import IndexedModel, build_index
    from stride_cli.corpus.options import BuildOptions

    return build_index(
        [str(corpus)],
        IndexedModel(tokenizer, tokenizer_fingerprint="0" * 64, fingerprint="0" * 64),
        out,
        BuildOptions(block_size=block_size, overwrite=True),
    )


def throughput(corpus: Path, tokenizer: Any, block_size: int, repeats: int) -> dict[str, Any]:
    """One record: the build's tokens per second as a share of the bare tokenizer's."""
    content = gzip.decompress(corpus.read_bytes()) if corpus.suffix == ".gz" else corpus.read_bytes()
    texts = [json.loads(line)["text"] for line in content.splitlines()]
    backend = tokenizer.backend_tokenizer

    def bare() -> int:
        return sum(
            len(encoding.ids)
            for start in range(0, len(texts), BATCH)
            for encoding in backend.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        )

    with tempfile.TemporaryDirectory() as folder:
        tasks = {"bare": bare, "build": lambda: build(corpus, tokenizer, Path(folder, "x"), block_size)}
        seconds, results = interleave(tasks, repeats)
        index = results["build"]
    least = {name: min(values) for name, values in seconds.items()}
    return {
        "benchmark": "build",
        "what": "throughput",
        "share_of_bare_tokenizer": least["bare"] / least["build"],
        "processor_seconds": least,
        "tokens_per_second": results["bare"] / least["build"],
        "documents": index.n_documents,
        "chunks": index.n_chunks,
        "tokens": results["bare"],
        "text_bytes": sum(len(text.encode()) for text in texts),
        "block_size": block_size,
        "repeats": repeats,
    }


def memory(chunks: int, tokenizer: Any) -> dict[str, Any]:
    """One record: the peak of one build of `chunks` chunks."""
    text = _text_of(CHUNK_TOKENS * CHUNKS_OF_DOCUMENT - 1, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        with corpus.open("w") as file:
            for number in range(max(1, chunks // CHUNKS_OF_DOCUMENT)):
                file.write(json.dumps({"id": f"document {number}", "text": text}) + "\n")
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size is the present one again
        before = _status("VmRSS")
        with watched_memory() as held:
            began = time.process_time()
            index = build(corpus, tokenizer, Path(folder, "x"), CHUNK_TOKENS)
            seconds = time.process_time() - began
        found = {"documents": index.n_documents, "chunks": index.n_chunks}
        return found | {
            "benchmark": "build",
            "what": "memory",
            **held,
            "peak_megabytes_with_mapped_files": _status("VmHWM") - before,
            "index_megabytes": sum(f.stat().st_size for f in index.path.rglob("*") if f.is_file()) / 1e6,
            "processor_seconds": seconds,
        }


def _status(name: str) -> float:
    """A size of this process, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def _text_of(tokens: int, tokenizer: Any) -> str:
    words = " water rock river stone history mountain"
    text = words
    while len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids) < tokens:
        text += words
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    return tokenizer.decode(ids)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from stride_cli.models.language.tokenizer import load_tokenizer

    about = machine("tokenizers", "transformers", "numpy")
    tokenizer = load_tokenizer(given.model)
    if given.one_memory:
        yield memory(given.one_memory, tokenizer) | about
        return
    yield throughput(given.corpus, tokenizer, given.block_size, given.repeats) | about
    for chunks in given.chunks:
        command = [sys.executable, "-m", "tests.benchmarks", "build", "--model", given.model]
        command += ["--one-memory", str(chunks)]
        yield json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks build", description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint whose tokenizer is used")
    parser.add_argument("--corpus", type=Path, help="JSON Lines of {id, text}, real text")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--one-memory", type=int, metavar="CHUNKS", help="only the memory of one size")
    given = parser.parse_args(arguments)
    if given.corpus is None and not given.one_memory:
        parser.error("--corpus is required")
    if os.environ.get("RAYON_NUM_THREADS") != "1":  # read when the tokenizer's library starts
        again = [sys.executable, "-m", "tests.benchmarks", "build", *arguments]
        subprocess.run(again, env={**os.environ, **ONE_THREAD}, check=True)
        return
    for record in run(given):
        emit(record)
