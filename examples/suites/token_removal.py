"""Removal of training tokens: how much does a query's loss rise when a model is trained again without them?

    python examples/suites/token_removal.py RUN.stride QUERIES.jsonl > tokens.jsonl

Each method gives every scored token of the corpus a value for each query. The tokens with the largest values
are still read, but not learnt any more. As many random tokens are left out to compare with. One JSON object a
method: rises of the loss, nats a token, as means over queries with standard errors. Outcomes are kept in
RUN.stride.retraining/tokens, so that an interrupted run goes on.

- stride: the token's part of its chunk's influence (without shared credit)
- ekfac: the same of EK-FAC of all layers
- pairs: 1 / (how often the corpus has this token after this one + 1), where the query has it too
- chunks: STRIDE's influence of the whole chunk, so that the strongest chunks go with all their tokens
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from index_format.reader import Index
from stride_cli.attribution.passages import direction_of, token_influence
from stride_cli.corpus.chunking import scored_positions
from stride_cli.data.batches import scored_pairs
from stride_cli.data.query_files import read_texts
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace, open_model
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.randomness import stream
from stride_cli.research.evaluation.resampling import mean_records
from stride_cli.research.methods.gradients.ekfac import EKFAC
from stride_cli.research.methods.gradients.gauss_newton import moved, scored_logits
from stride_cli.research.methods.gradients.graddot import QueryBank
from stride_cli.research.training.truth import subset_seeds
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of

Values = Callable[[int], np.ndarray]  # query → of every scored token of the corpus, in order, float64
_AT_ONCE = 2048  # padded tokens
_ALONG = 1e-3  # so far both ways, by the length of the layers' weights


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--share", type=float, default=0.01, help="of the scored tokens")
    parser.add_argument("--limit", type=int, default=16, help="queries, drawn by lot")
    parser.add_argument("--draws", type=int, default=6, help="sets of random tokens")
    parser.add_argument("--methods", default="stride,ekfac,pairs,chunks")
    parser.add_argument("--workers", type=int, default=1, help="models that are trained at a time")
    given = parser.parse_args()
    index = Index.open(given.index)
    task = Workspace.open(index, open_model(index))
    every = read_texts(task.model, given.queries, block_size=index.attributes["block_size"])
    queries = every.take(np.sort(stream(task.seed, "queries").permutation(len(every))[: given.limit]))
    trainer: Any = open_trainer(task, queries)
    count = sum(len(scored_positions(chunk)) for chunk in trainer.chunks)
    k = max(1, round(given.share * count))

    def without(places: list[np.ndarray]) -> np.ndarray:
        """(sets, Q) losses of models trained without some of the scored tokens."""
        train = partial(losses_without, trainer, store_of(index) / "tokens", seed=task.seed)
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
            return np.stack(list(pool.map(train, places)))

    lots = [stream(task.seed, "random tokens", draw).permutation(count)[:k] for draw in range(given.draws)]
    full, *random = without([np.zeros(0, np.int64), *lots])
    by_chance = np.mean(random, axis=0) - full
    found = {"stride": by_stride, "ekfac": by_ekfac, "pairs": by_pairs, "chunks": by_chunks}
    for method in given.methods.split(","):
        values = found[method](task, queries)
        tops = []
        for query in range(len(queries)):
            order = stream(task.seed, "ties", query).permutation(count)
            tops.append(order[np.argsort(-values(query)[order], kind="stable")[:k]])
        rise = np.diagonal(without(tops)) - full
        effects = {"attributed": rise, "random": by_chance, "advantage": rise - by_chance}
        means = mean_records(effects, seed=task.seed, name="removal queries")
        about = {"tokens": k, "of": count, "queries": len(queries), "draws": given.draws}
        print(json.dumps({"method": method, **about, **means}), flush=True)


def losses_without(trainer: Any, store: Path, places: np.ndarray, *, seed: int) -> np.ndarray:
    """Losses of the queries, (Q,), after a training that does not learn the scored tokens at these places."""
    torch.set_num_threads(1)
    left, start = [], 0
    for chunk in trainer.chunks:
        scored = scored_positions(chunk)
        learnt = scored[~np.isin(np.arange(start, start + len(scored)), places)]
        mask = np.zeros(len(chunk.tokens), np.uint8)
        mask[learnt] = 1
        left.append(replace(chunk, loss_start=int(min(learnt, default=len(mask))), loss_mask=mask))
        start += len(scored)
    name = hashlib.sha256(np.sort(places).astype(np.int64).tobytes()).hexdigest()
    corpus = {**trainer.recipe.corpus, "fingerprint": name}
    own = replace(trainer, chunks=left, recipe=replace(trainer.recipe, corpus=corpus))
    job = Job(np.ones(len(left), bool), int(subset_seeds(seed, 1)[0]))
    return retrain(own, [job], store=store / name, workers=1)[0].losses


def by_stride(task: Workspace, queries: QuerySet) -> Values:
    """A token's fall of loss along the query's gradient, by the length of its chunk's gradient."""
    steered = SteeredModel.of(task.model, Operators.from_index(task.index))
    whole, factors = replace(steered, normalized=0.0), np.zeros(task.n_chunks)
    for batch in task.chunks.batches(_AT_ONCE):
        squares = torch.stack([part.square().sum(1) for part in chunk_gradients(whole, batch)[0]]).sum(0)
        lengths = squares.double().sqrt() * batch.scored
        factors[batch.rows] = lengths.clamp_min(1e-30).pow(-steered.normalized)

    def values(query: int) -> np.ndarray:
        unused: Any = None
        direction = direction_of(steered, unused, np.zeros(0), queries.batch([query]))
        found = {}
        for batch in task.chunks.batches(_AT_ONCE):
            for row, each in zip(batch.rows, token_influence(steered, direction, batch), strict=True):
                found[int(row)] = each * factors[row]
        return scored_only(task, found)

    return values


def by_chunks(task: Workspace, queries: QuerySet) -> Values:
    """The sum of its chunk's values, for each token."""
    of_tokens, places = by_stride(task, queries), scored_chunks(task)

    def values(query: int) -> np.ndarray:
        return np.bincount(places, of_tokens(query))[places]

    return values


def by_ekfac(task: Workspace, queries: QuerySet) -> Values:
    """A token's rise of loss along the query's gradient, by the inverse curvature."""
    method = EKFAC(layers="all")
    method.fit(task)
    opened = method._preconditioned(0)
    passes, layers = opened.passes, opened.passes.capture.layers
    size = torch.stack([layer.module.weight.detach().norm() for layer in layers]).norm()

    def values(query: int) -> np.ndarray:
        bank = QueryBank(passes, queries, query, query + 1)
        opened.apply(bank.matrices)
        along = [bank.matrices[number][0] for number in range(len(layers))]
        step = float(_ALONG * size / torch.stack([part.norm() for part in along]).norm())
        found: dict[int, np.ndarray] = {}
        for batch in task.chunks.batches(_AT_ONCE):
            rows, places = torch.nonzero(batch.weights[:, 1:], as_tuple=True)
            each = np.zeros(batch.ids.shape)
            with torch.no_grad(), moved(layers, task.model.device) as changes:
                for way in (step, -step):
                    for change, part in zip(changes, along, strict=True):
                        change.copy_(part * way)
                    logits, _ = scored_logits(passes, batch)
                    losses = cross_entropy(
                        logits.detach().double(), batch.ids[rows, places + 1], reduction="none"
                    )
                    each[rows, places + 1] += (losses / (2 * way)).numpy()
            found.update(zip(batch.rows.tolist(), each, strict=True))
        return scored_only(task, found)

    return values


def by_pairs(task: Workspace, queries: QuerySet) -> Values:
    """The rarity of a token after the one before it, where the query has both."""
    vocab = task.model.vocab_size
    pairs = np.concatenate([scored_pairs(*task.chunks.chunk(row), vocab) for row in range(task.n_chunks)])
    counts = Counter(pairs.tolist())
    rarity = np.array([1 / (counts[pair] + 1) for pair in pairs.tolist()])

    def values(query: int) -> np.ndarray:
        asked = Counter(scored_pairs(queries.ids[query], queries.weights[query], vocab).tolist())
        return rarity * np.array([asked[pair] for pair in pairs.tolist()])

    return values


def scored_only(task: Workspace, found: dict[int, np.ndarray]) -> np.ndarray:
    """Join values of all tokens, padded, in the order of chunks: those of scored tokens."""
    chunks = [task.chunks.chunk(row)[1] for row in range(task.n_chunks)]
    return np.concatenate([found[row][: len(weights)][weights > 0] for row, weights in enumerate(chunks)])


def scored_chunks(task: Workspace) -> np.ndarray:
    """The chunk of every scored token, int64."""
    counts = [int((task.chunks.chunk(row)[1] > 0).sum()) for row in range(task.n_chunks)]
    return np.repeat(np.arange(task.n_chunks), counts)


if __name__ == "__main__":
    main()
