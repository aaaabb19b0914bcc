"""How fast operators are fitted, against a bare forward and backward pass over the same batches.

`closed`: processor seconds of a whole `fit_closed` (bases, pass, solve) on the first `--chunks` chunks, and
of forward, loss and backward into every parameter of the same model over the same micro-batches; the share of
the latter's tokens per second is the figure to look at. Peak memory beside K × p.
`reading`: processor seconds in which `--read` chunks, drawn at random, are read for one query, against the
bare pass over the same chunks, interleaved.
`workers`: with `--workers N`, instead of these: a fit by this process on one thread, then by N workers of one
thread each of every `--engines`, whole (start of the processes, import, model and all). Seconds as they pass
say little where others use the machine. So from processor seconds also what a machine of N idle cores would
need: this process's, its workers' start-up, and the N-th part of what the workers did.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from index_format.reader import Index
from stride_cli.api import open_model
from stride_cli.data.batches import ChunkReader
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.closed import fit_closed
from stride_cli.operators.corpus_pass import ModelPlace, PassWorkers
from stride_cli.operators.gradients import gradient_products, weighted_gradients
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import emit
from stride_cli.parallel import Workers
from stride_cli.randomness import stream
from stride_cli.training.dry_run import FirstChunks
from tests.benchmarks._machine import interleave, machine, watched_memory


def bare(model: Any, chunks: ChunkReader, batch_tokens: int, rows: np.ndarray | None = None) -> None:
    """Forward, mean loss and backward into every parameter, batch by batch; of some chunks, or all."""
    model.model.requires_grad_(True)
    try:
        for batch in chunks.batches(batch_tokens, rows):
            logits = model.model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
            )
            (losses * batch.weights[:, 1:].flatten()).sum().backward()
            model.model.zero_grad(set_to_none=True)
    finally:
        model.model.requires_grad_(False)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    index = Index.open(given.index)
    model = open_model(index)
    chunks = FirstChunks(index, min(given.chunks, index.n_chunks))
    columns = np.asarray(index.array("design/columns")[: chunks.n_chunks])
    settings = resolve_settings(ClosedOptions(), model, index)
    tokens = int(chunks.lengths.sum())
    about = machine("torch", "transformers", "numpy") | {
        "parameters": model.n_parameters,
        "layers": model.n_layers,
        "vocabulary": model.vocab_size,
        "subsets": index.n_subsets,
        "chunks": chunks.n_chunks,
        "tokens": tokens,
        "batch_tokens": settings.batch_tokens,
        "repeats": given.repeats,
    }
    seconds: dict[str, list[float]] = {"bare": [], "closed": []}
    few = FirstChunks(index, min(32, chunks.n_chunks))
    bare(model, few, settings.batch_tokens)  # warm
    fit_closed(model, few, columns[: few.n_chunks], index.n_subsets, settings)
    for _ in range(given.repeats):
        seconds["bare"].append(_seconds(lambda: bare(model, chunks, settings.batch_tokens)))
        seconds["closed"].append(
            _seconds(lambda: fit_closed(model, chunks, columns, index.n_subsets, settings))
        )
    with watched_memory() as held:  # once more: to look at it takes time of the processor, too
        operators = fit_closed(model, chunks, columns, index.n_subsets, settings)
    least = {name: min(values) for name, values in seconds.items()}
    gates = sum(gate.nbytes for gate in operators.gates) / 1e6
    size = {"space": operators.space_name, "layer": operators.layer, "gates": operators.gate_size}
    yield (
        {
            "benchmark": "fitting",
            "what": "closed",
            "share_of_bare_pass": least["bare"] / least["closed"],
            "tokens_per_second": {name: tokens / value for name, value in least.items()},
            "processor_seconds": least,
            "peak_megabytes": held["peak_megabytes"],
            "gate_megabytes": gates,
            "model_megabytes": 4e-6 * model.n_parameters,
        }
        | size
        | about
    )
    if given.read:
        yield reading(model, operators, chunks, given) | size | about
    del operators


def reading(
    model: Any, operators: Operators, chunks: ChunkReader, given: argparse.Namespace
) -> dict[str, Any]:
    """What it takes to read chunks for one query, a chunk in the place of one, by the bare pass over them."""
    steered = SteeredModel.of(model, operators)
    drawn = stream(0, "reading benchmark").permutation(chunks.n_chunks)[: given.read + 1]
    rows, query = np.sort(drawn[1:]), drawn[:1]
    (_, asked), *_ = weighted_gradients(steered, chunks, query)
    tasks: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(model, chunks, steered.tokens_at_once, rows),
        "reading": lambda: gradient_products(steered, asked, chunks, rows),
    }
    seconds, _ = interleave(tasks, 3 * given.repeats)
    least = {name: min(values) for name, values in seconds.items()}
    return {
        "benchmark": "fitting",
        "what": "reading",
        "reading_by_bare_pass": least["reading"] / least["bare"],
        "processor_seconds": least,
        "read": len(rows),
        "read_tokens": int(chunks.lengths[rows].sum()),
    }


def by_workers(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A fit by one process, and by workers of every engine."""
    torch.set_num_threads(1)
    index = Index.open(given.index)
    model = open_model(index, ModelSpec(device="cpu", dtype="fp32"))
    chunks = ChunkReader(index)
    columns = np.asarray(index.array("design/columns"))
    settings = resolve_settings(ClosedOptions(), model, index)
    place = ModelPlace(Path(given.index).absolute(), index.digest, ModelSpec(device="cpu", dtype="fp32"))

    def fitted(engine: str | None) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
            team = PassWorkers(place, engine, given.workers) if engine else None
            before, load, began = _processor_seconds(), os.getloadavg()[0], time.perf_counter()
            fit_closed(model, chunks, columns, index.n_subsets, settings, scratch=Path(folder), workers=team)
            passed = time.perf_counter() - began
        own, others = (after - first for after, first in zip(_processor_seconds(), before, strict=True))
        return {"seconds": passed, "own": own, "workers": others, "load": (load + os.getloadavg()[0]) / 2}

    before = _processor_seconds()[1]
    with Workers(_open, given.workers) as workers:
        list(workers.as_done([place] * given.workers))
    start = _processor_seconds()[1] - before
    alone = [fitted(None) for _ in range(given.repeats)]
    least = min(alone, key=lambda each: each["own"])
    for engine in given.engines.split(","):
        found = [fitted(engine) for _ in range(given.repeats)]
        best = min(found, key=lambda each: each["own"] + each["workers"])
        idle = best["own"] + start + max(0.0, best["workers"] - start) / given.workers
        yield {
            "benchmark": "fitting",
            "what": "workers",
            "engine": engine,
            "workers": given.workers,
            "ratio": min(each["seconds"] for each in alone) / min(each["seconds"] for each in found),
            "ratio_by_processor_seconds": least["own"] / idle if engine == "local" else None,
            "seconds": {"alone": [each["seconds"] for each in alone]}
            | {"workers": [each["seconds"] for each in found]},
            "processor_seconds": {"alone": least["own"], "own": best["own"], "workers": best["workers"]}
            | {"start": start},
            "load": {"alone": [each["load"] for each in alone], "workers": [each["load"] for each in found]},
            "chunks": chunks.n_chunks,
            "tokens": int(chunks.lengths.sum()),
            "subsets": index.n_subsets,
            "parameters": model.n_parameters,
        } | machine("torch", "transformers", "numpy")


def _open(place: ModelPlace) -> None:
    """What a worker does before its first range."""
    place.open()


def _processor_seconds() -> tuple[float, float]:
    """Of this process, and of those that it has started and waited for."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, others = (each.ru_utime + each.ru_stime for each in found)
    return own, others


def _seconds(action: Callable[[], Any]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks fitting", description=__doc__)
    parser.add_argument("--index", required=True)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--read", type=int, default=100, help="chunks that a query reads; 0: none is timed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--engines", default="local,ray")
    parser.add_argument("--scratch", help="a directory for what workers leave each other")
    given = parser.parse_args(arguments)
    for record in run(given) if given.workers is None else by_workers(given):
        emit(record)
