"""What a hundred million chunks cost: building, opening, recovering, ranking, reading.

A corpus of `--chunks` chunks of 4 tokens, 8 to a document, is written, and built into an index by the
product's own build. Operators of it are not fitted, which would take days: those of a few chunks' bases with
random gates are stored in their place, and projections of random signs. So every array has the size that it
would have, and all commands run.

Parts, each of every size in a process of its own:

- `build`: bytes a chunk of every array, and memory (anonymous pages, the peak above what was held before).
- `open`: `Session.open`, the first time (all digests are compared) and again.
- `recover`: responses that planted chunks give, with noise, recovered through `Pipeline.influences` at the
  default λ, in bare passes over the columns (the solver's own scan with a floor that none reaches); then
  `rank_documents`. Planted chunks have to come out on top, the certificate has to hold by a brute force over
  all n scores.
- `bare` (with `--index`): forward and backward passes of its model over its chunks, by which a fit is judged.
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
from tests.benchmarks._machine import machine, resident, watched_memory

CHUNK_TOKENS, CHUNKS_OF_DOCUMENT = 4, 8
SIZES = (1_000_000, 10_000_000, 100_000_000)
PARTS = ("build", "open", "recover", "query")
PROJECTED = 64  # bytes of a chunk's projection
BARE_BATCHES, BARE_TOKENS = 200, 512  # as many chunks at once as a fit holds
PLANTED, GATED = 30, 300  # chunks with influence: on responses, and in the gates
NOISES = {0.03: 3, 0.3: 1}  # of every subset's sum, where a chunk's weight is 1 to 3; how often it is timed
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
            out=out,
            options=BuildOptions(block_size=CHUNK_TOKENS, store_text=False, overwrite=True),
            model=str(model),
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


def add_operators(folder: Path, chunks: int, project: int) -> None:
    """Operators in bases of a few documents: gates are the sums over some chunks of random gradients, and of
    every chunk there are random signs. What a fit would store, of its size."""
    from index_format.reader import Index
    from index_format.writer import GroupWriter
    from stride_cli import api
    from stride_cli.corpus.options import BuildOptions
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.closed import fit_spaces
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.options import ClosedOptions, resolve_settings
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.screening import Design

    path, sample = folder / f"{chunks}.stride", folder / "sample.stride"
    index = Index.open(path)
    if index.has("operators"):
        return
    if not sample.exists():
        options = BuildOptions(block_size=CHUNK_TOKENS, n_subsets=100)
        sources = [str(folder / "sample.jsonl")]
        api.build_index(sources, out=sample, options=options, model=str(folder / "model"))
    workspace = Workspace.open(sample)
    settings = resolve_settings(
        ClosedOptions(space="mlp-matrix", rank=8, project=project), workspace.model, index
    )
    steered = fit_spaces(workspace.model, workspace.chunks, settings)
    rng = np.random.default_rng(0)
    design = Designs.of(index)
    planted = np.sort(rng.choice(index.n_chunks, GATED, replace=False))
    subsets = Design(design.columns, index.n_subsets).rows(planted)
    gates = []
    for space in steered.spaces:
        sums = np.zeros((index.n_subsets, space.gate_size), np.float32)
        own = rng.standard_normal((GATED, space.gate_size)).astype(np.float32)
        np.add.at(sums, subsets, own[:, None])
        gates.append(sums / np.maximum(design.row_sizes, 1)[:, None].astype(np.float32))
    seen = np.ones(index.n_chunks, np.uint8)
    kept = Operators(list(steered.spaces), list(gates), steered.layer, "closed", seen, direct_scale=1.0)
    arrays, attributes = kept.to_arrays()
    attributes |= {"project": project, "projected": index.n_chunks, "project_seed": 0, "recipe": None}
    attributes["model_fingerprint"] = workspace.model.fingerprint
    with GroupWriter(path, "operators", "0" * 64) as writer:
        for name, values in arrays.items():
            writer.append(f"operators/{name}", values)
        for start in range(0, index.n_chunks, 1 << 20):
            count = min(1 << 20, index.n_chunks - start)
            codes = np.frombuffer(rng.bytes(count * project), np.uint8).reshape(count, project)
            writer.append("operators/projection_codes", codes)
            writer.append("operators/projection_step", rng.random(count, np.float32))
        writer.publish(attributes)


def opening(folder: Path, chunks: int) -> Iterator[dict[str, Any]]:
    """Two records: a session opened for the first time, and, in this process, again."""
    from stride_cli.attribution.session import Session

    add_operators(folder, chunks, PROJECTED)
    session: Any = None
    for what in ("first", "again"):
        session = None  # what it mapped is let go
        with watched_memory() as held:
            before = resident()["mapped"]
            began = time.process_time()
            session = Session.open(folder / f"{chunks}.stride")
            seconds = time.process_time() - began
        yield {
            "what": what,
            **held,
            "mapped_megabytes": (resident()["mapped"] - before) / 1e6,
            "processor_seconds": seconds,
            "index_megabytes": session.index.n_bytes / 1e6,
        }


def recovering(folder: Path, chunks: int) -> Iterator[dict[str, Any]]:
    """Planted influences recovered by the pipeline at its default λ, and documents ranked by them."""
    from stride_cli.attribution.options import RecoveryOptions
    from stride_cli.attribution.session import Session
    from stride_cli.recovery.screening import Design

    session = Session.open(folder / f"{chunks}.stride")
    pipeline = session.pipeline(RecoveryOptions(read=0, estimate="subsets"))
    design = Design(session.designs.columns, session.index.n_subsets)
    rng = np.random.default_rng(1)
    planted = np.sort(rng.choice(design.n_chunks, PLANTED, replace=False))
    weights = rng.uniform(1.0, 3.0, PLANTED) * np.where(rng.random(PLANTED) < 0.8, 1.0, -1.0)
    exact = np.zeros(design.n_subsets)
    np.add.at(exact, design.rows(planted), weights[:, None])
    for noise, repeats in NOISES.items():
        sums = exact + noise * rng.standard_normal(design.n_subsets)
        yield {"noise": noise} | recovered(session, pipeline, design, sums, repeats, planted, weights)


def recovered(
    session: Any,
    pipeline: Any,
    design: Any,
    sums: np.ndarray,
    repeats: int,
    planted: np.ndarray,
    weights: np.ndarray,
) -> dict[str, Any]:
    """What recovering from these sums over subsets, and ranking documents, takes, and whether it is right."""
    from stride_cli.attribution.pipeline import Measurement
    from stride_cli.recovery.ranking import rank_documents

    columns, sizes = session.designs.columns, session.designs.row_sizes
    # what subsets answer is a mean over their chunks: `additive_measurement` makes sums of it
    responses = (sums / (np.maximum(sizes, 1) / sizes.mean()))[None]
    explained = pipeline.explained(responses)
    measured = Measurement(columns, responses, explained, np.ones(1), "linear", None)
    explained = explained[0]

    def ask() -> Any:
        return pipeline.influences(None, [], measured)[0]

    def rank(found: Any) -> Any:
        return rank_documents(
            found,
            columns,
            session.chunk_document,
            top=10,
            bottom=10,
            seen=session.operators.seen,
        )

    found = ask()  # compiled, and pages of the columns are in memory
    design.scan(explained, np.inf, signed=False, capacity=16)
    seconds: dict[str, list[float]] = {"bare pass": [], "recover": [], "rank": []}
    with watched_memory() as held:
        for _ in range(repeats):
            for name, task in (
                ("bare pass", lambda: design.scan(explained, np.inf, signed=False, capacity=16)),
                ("recover", ask),
                ("rank", lambda: rank(found)),
            ):
                began = time.process_time()
                result = task()
                seconds[name].append(time.process_time() - began)
                if name == "rank":
                    hits = result
    least = {name: min(each) for name, each in seconds.items()}
    return {
        "subsets": design.n_subsets,
        "lambda_ratio": pipeline.settings.lasso.lambda_ratio,
        "planted": PLANTED,
        "processor_seconds": least,
        "passes_recover": least["recover"] / least["bare pass"],
        "passes_rank": least["rank"] / least["bare pass"],
        "nanoseconds_a_chunk": 1e9 * least["bare pass"] / design.n_chunks,
        **held,
        **checked(design, explained, found.solution, planted, weights),
        "documents_found": documents_found(session, hits, planted, weights),
    }


def checked(
    design: Any, y: np.ndarray, solution: Any, planted: np.ndarray, weights: np.ndarray
) -> dict[str, Any]:
    """By brute force over all n scores: no column of a smaller weight scores more than λ, so that the stated
    gap holds; and of the planted chunks how many are among as many of the largest weights."""
    largest = 0.0
    for start in range(0, design.n_chunks, 1 << 22):
        scores = design.correlate(solution.residual, start, min(start + (1 << 22), design.n_chunks))
        largest = max(largest, float(np.abs(scores).max()))
    residual = solution.residual
    objective = 0.5 * float(residual @ residual) + solution.lambda_ * float(np.abs(solution.values).sum())
    centred = y - y.mean()
    dual = residual * min(1.0, solution.lambda_ / largest)
    dual = dual - dual.mean()
    bound = float(centred @ dual) - 0.5 * float(dual @ dual)
    top = solution.indices[np.argsort(-np.abs(solution.values))[: len(planted)]]
    return {
        "nonzeros": len(solution.indices),
        "passes": solution.n_passes,
        "relative_gap_stated": solution.relative_gap,
        "relative_gap_by_brute_force": (objective - bound) / (0.5 * float(centred @ centred)),
        "largest_score_over_lambda": largest / solution.lambda_,
        "planted_on_top": float(np.isin(planted, top).mean()),
    }


def documents_found(session: Any, hits: Any, planted: np.ndarray, weights: np.ndarray) -> float:
    """Of the ten strongest planted supporters' documents, the share among the ten that are ranked first."""
    strongest = planted[np.argsort(-weights)[:10]]
    wanted = set(session.index.chunk_documents(strongest).tolist())
    return len(wanted & {hit.document for hit in hits[0]}) / len(wanted)


def querying(folder: Path, chunks: int) -> Iterator[dict[str, Any]]:
    """Whole queries, warm: as by default, with chunks read, and by the recovery alone."""
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.attribution.session import Session

    session = Session.open(folder / f"{chunks}.stride")
    prompt = " ".join(_texts(1)[0].split()[:6])
    for what, options in (("read", QueryOptions()), ("unread", QueryOptions(read=0))):
        session.query(prompt, options)
        with watched_memory() as held:
            began = time.process_time()
            answer = session.query(prompt, options)
            seconds = time.process_time() - began
        yield {
            "what": what,
            "read": answer.read,
            "processor_seconds": seconds,
            "seconds_by_stage": answer.seconds,
            "passes": answer.solution.n_passes,
            "nonzeros": len(answer.solution.indices),
            **held,
        }


def bare(index: Path) -> Iterator[dict[str, Any]]:
    """One record: forward and backward passes alone, of the index's model over some of its chunks."""
    import torch

    from stride_cli.data.workspace import Workspace

    torch.set_num_threads(1)  # those of two wait for each other in processor time
    workspace = Workspace.open(index)
    model: Any = workspace.model
    groups = workspace.chunks.plan(BARE_TOKENS)[:BARE_BATCHES]
    module = model.model
    module.requires_grad_(True)
    count = 0
    for number, group in enumerate(groups):
        batch = workspace.chunks.batch(group)
        if number == 1:  # the first wakes things up
            began, count = time.process_time(), 0
        hidden = model.hidden(batch.ids, model.n_layers)
        final = model.continue_from(hidden, model.n_layers)[:, :-1]
        losses = model.token_losses(final, batch.ids[:, 1:])
        (losses * batch.weights[:, 1:]).sum().backward()
        module.zero_grad()
        count += len(group)
    seconds = time.process_time() - began
    yield {"index_chunks": workspace.n_chunks, "microseconds_a_chunk": 1e6 * seconds / count}


RUNS = {"build": build, "open": opening, "recover": recovering, "query": querying}


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    about = machine("numpy", "numba", "torch", "tokenizers")
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if given.index:
        command = f"python -m tests.benchmarks scale --index {given.index.name}"
        for record in bare(given.index):
            yield {"benchmark": "scale", "part": "bare", **record, "command": command} | about
        return
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
    parser.add_argument("--index", type=Path, help="of real text: run `bare` on it, and nothing else")
    parser.add_argument("--one", nargs=2, metavar=("PART", "CHUNKS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for record in run(given):
        emit(record)
