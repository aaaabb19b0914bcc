"""`python -m tests.benchmarks frontier --estimates`: what to keep of each chunk, to find those worth reading.

Every estimate of the influences (Q, n) is judged alike, by what it keeps of a chunk (`bytes`). `read` 0: it
stands alone; else only the `read` chunks that it ranks highest count, each with its direct readout: all end
with the same influences, and differ in what they find. `lds` against the retrained models in the
index's ``truth/``, with its joint bootstrap standard error over queries and subsets; `lds_shrunk` of the same
scores, small ones made smaller as `stride query` does in pre-training. `recall10` and `recall50`: how many of
the chunks that are strongest by the direct readout are among those read. With `--queries` there need be no
truth, and only these two are given.

`subsets`: the Lasso from what K operators would measure, read by the debiased Lasso; `subsets by documents`:
with subsets that take documents whole, so that similar chunks share theirs; `projections`: signs, as `stride
train --project` keeps them; all others are methods of `stride baseline`, at the settings named; and unions,
each in units of its own spread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stride_cli.attribution.defaults import recovery_defaults
from stride_cli.attribution.direct_readout import projected_influences, query_gradients
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import WorkspacePath
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.projections import Projector
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import note, progress
from stride_cli.recovery.refinement import debiased
from stride_cli.research.evaluation.bench import split_methods
from stride_cli.research.methods.protocol import score_all
from stride_cli.research.methods.registry import open_method
from stride_cli.training.truth import Truth
from tests.benchmarks import frontier

READ = (30, 100, 300, 1000)
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 32_768)  # bytes of projections
PER_SUBSET = (100, 30, 10, 3, 1)  # n / K
METHODS = (
    "pairs",
    "bm25",
    "tfidf",
    "embeddings",
    "rds",
    "featsim",
    *(f"logra:rank={rank}" for rank in (8, 16, 32, 64)),
    *(f"logra:rank={rank},init=pca" for rank in (8, 32)),
    *(f"trackstar:rank={rank}" for rank in (8, 16, 32, 64)),
)
UNIONS = (
    ("projections 512", "pairs"),
    ("projections 2048", "pairs"),
    ("projections 512", "subsets n/K=30"),
    ("projections 2048", "subsets n/K=10"),
    ("projections 2048", "logra:rank=64"),
)
_OPPOSING = 0.3  # as `stride_cli.recovery.refinement` has it
Estimate = tuple[np.ndarray, np.ndarray, float]
"""Scores (Q, n) by themselves, scores to choose by, and bytes a chunk."""


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    task = WorkspacePath(Path(given.index), given.model).open()
    settings = resolve_settings(ClosedOptions(space=given.space), task.model, task.index)
    methods = METHODS if given.methods is None else split_methods(given.methods)
    truth: Truth | None = None
    quality: Callable[[np.ndarray], dict[str, float]]
    if given.queries is None:
        truth = Truth.from_index(task.index, alpha=given.alpha)
        queries, quality = truth.queries, frontier.judge(task, truth)
    else:
        queries, quality = read_queries(task, given.queries), lambda _: {}
    direct, estimates, size = of_gradients(task, queries, settings)
    about = {"suite": given.suite} | frontier.facts(task, truth, settings, size, len(queries))

    def judged(name: str, estimate: Estimate) -> Iterator[dict[str, Any]]:
        alone, guide, kept = estimate
        same = {"what": "estimate", "by": name, "bytes": kept}
        yield same | {"read": 0, **quality(alone)} | about
        for count in READ:
            if count < task.n_chunks:
                scores, found = read(direct, guide, count)
                yield same | {"read": count, **found, **quality(scores)} | about

    yield {"what": "estimate", "by": "direct", "read": task.n_chunks, **quality(direct)} | about
    done: dict[str, Estimate] = {}
    for name, made in estimates.items():
        done[name] = (made[0], made[0], made[1])
        yield from judged(name, done[name])
    defaults = recovery_defaults(task.index, task.model, "closed", None)
    designs = {"random": "subsets", "documents": "subsets by documents"}
    if task.index.n_documents == task.n_chunks:  # there the two are one
        del designs["documents"]
    for ratio in PER_SUBSET:
        for design, name in designs.items():
            found = of_subsets(direct, task, size, ratio, design, defaults["lambda_ratio"])
            done[f"{name} n/K={ratio}"] = found
            yield from judged(f"{name} n/K={ratio}", found)
    for name in methods:
        note(f"fitting {name}")
        began = time.process_time()
        method = open_method(name)
        method.fit(task)
        scores = score_all(method, queries)
        done[name] = (scores, scores, method.bytes_per_chunk)
        for row in judged(name, done[name]):
            yield row | {"cpu_seconds": time.process_time() - began}
    for first, second in UNIONS:
        if first not in done or second not in done:
            continue
        both = [done[first][1], done[second][1]]
        scores = sum(each / each.std(axis=1, keepdims=True) for each in both)
        yield from judged(f"{first} + {second}", (scores, scores, done[first][2] + done[second][2]))


def of_gradients(
    task: Any, queries: Any, settings: Any
) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, float]], int]:
    """One pass over the corpus: the direct readout (Q, n), projections of each size (scores and bytes), p."""
    steered = fit_spaces(task.model, task.chunks, settings)
    batches = [queries.batch(group) for group in queries.groups(settings.batch_tokens)]
    asked, n_chunks = query_gradients(steered, batches), task.n_chunks
    direct = np.zeros((len(queries), n_chunks), np.float32)
    projectors = {size: Projector(steered.gate_size, size, n_chunks, settings.seed) for size in SIZES}
    with progress("reading chunks", n_chunks, unit="chunks") as bar:
        for group in task.chunks.plan(settings.batch_tokens):
            for batch in map(task.chunks.batch, task.chunks.small_groups(group)):
                own = chunk_gradients(steered, batch)[0]
                products = sum(query @ gradient.T for query, gradient in zip(asked, own, strict=True))
                direct[:, batch.rows] = (products * batch.scored).numpy()
                for projector in projectors.values():
                    projector.add(batch, own)
                bar.advance(len(batch.rows))
    seen = np.ones(n_chunks, np.uint8)
    found = {}
    for size, projector in projectors.items():
        made = projector.projections()
        kept = Operators(list(steered.spaces), [], steered.layer, "closed", seen, projections=made)
        alone = projected_influences([SteeredModel.of(task.model, kept)], batches, n_chunks)
        assert alone is not None
        found[f"projections {size}"] = (alone.values, size + 4.0)  # and each chunk's step
    return direct - direct.mean(axis=1, keepdims=True), found, steered.gate_size


def of_subsets(direct: np.ndarray, task: Any, size: int, ratio: float, design: str, share: float) -> Estimate:
    """The Lasso of what K = n / ratio operators would measure, and the debiased Lasso to choose by."""
    n_subsets = max(2 * task.index.degree, round(task.n_chunks / ratio))
    columns = frontier.columns_of(task, n_subsets, task.index.degree, design)
    solutions = frontier.solve(direct, columns, n_subsets, share)
    guide = np.stack([debiased([columns], solution)[0] for solution in solutions])
    # int8 gates with their scales, and the design's own rows
    held = (n_subsets * size * (1 + 4 / 256) + columns.nbytes) / task.n_chunks
    return frontier.dense(solutions), guide, held


def read(direct: np.ndarray, guide: np.ndarray, count: int) -> tuple[np.ndarray, dict[str, float]]:
    """The direct readout of the `count` chunks that `guide` ranks highest; its strongest among them."""
    strength = np.where(guide > 0, guide, -_OPPOSING * guide)
    chosen = np.zeros(direct.shape, bool)
    np.put_along_axis(chosen, np.argpartition(-strength, count, axis=1)[:, :count], True, axis=1)
    order = np.argsort(-direct, axis=1)
    found = {
        f"recall{most}": float(np.take_along_axis(chosen, order[:, :most], axis=1).mean())
        for most in frontier.RECALL
    }
    return np.where(chosen, direct, 0), found
