"""How many times faster small models train side by side than one after another, in time of one core.

NanoChat models of about one million parameters, on random chunks of up to 128 tokens. `train` and
`train_stacked` run in turn, so that other load falls on both alike; the ratio of the minima is the figure to
look at. Memory is kept between steps as in workers (`keep_freed_memory`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.language_recipe import Architecture, Recipe
from stride_cli.output import emit
from stride_cli.parallel import keep_freed_memory
from stride_cli.research.training.stacked import train_stacked
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import train

CHUNKS = 400


def corpus(vocab: int) -> list[Chunk]:
    """Chunks of 128 tokens, every fifth a shorter tail."""
    random = np.random.default_rng(0)
    lengths = np.where(random.random(CHUNKS) < 0.8, 128, random.integers(10, 128, CHUNKS))
    return [Chunk(random.integers(0, vocab, length).astype(np.int32), 1, None) for length in lengths]


def recipe_of(width: int, vocab: int, batch_tokens: int, steps: int, dtype: str) -> Recipe:
    return Recipe(
        kind="train",
        architecture=Architecture(layers=4, width=width, heads=max(1, width // 64), vocab=vocab, context=128),
        block_size=128,
        epochs=1.0,
        steps=steps,
        batch_tokens=batch_tokens,
        optimizer="muon+adamw",
        lr=0.02,
        adam_lr=0.03,
        weight_decay=0.0,
        schedule="linear",
        warmup=0.02,
        final_lr=0.02,
        clip=1.0,
        dtype=dtype,
        seed=0,
        corpus={"fingerprint": ""},
        tokenizer_fingerprint="",
        versions={},
    )


def run(recipe: Recipe, together: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Processor seconds of a model, alone and in stacks of several sizes."""
    assert recipe.architecture is not None
    chunks = corpus(recipe.architecture.vocab)
    everything = np.ones(len(chunks), bool)
    seconds: dict[int, list[float]] = {0: [], **{count: [] for count in together}}
    for repeat in range(repeats + 1):  # the first warms up
        for count, found in seconds.items():
            began = time.process_time()
            if count == 0:
                train(initial_model(recipe), chunks, recipe)
            else:
                train_stacked(chunks, recipe, [everything] * count, range(count))
            if repeat:
                found.append((time.process_time() - began) / max(1, count))
    alone = min(seconds[0])
    size = recipe.architecture
    for count, found in seconds.items():
        yield {
            "benchmark": "stacked",
            "models": max(1, count),
            "how": "train_stacked" if count else "train",
            "ms_per_step": 1000 * min(found) / recipe.steps,
            "times_faster": alone / min(found),
            "layers": size.layers,
            "width": size.width,
            "vocab": size.vocab,
            "parameters": sum(p.numel() for p in initial_model(recipe).parameters()),
            "batch_tokens": recipe.batch_tokens,
            "dtype": recipe.dtype,
            "repeats": repeats,
            "torch": torch.__version__,
            "load_1_minute": os.getloadavg()[0],
        }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks stacked", description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(1)
    for dtype in given.dtype:
        for batch_tokens in given.batch_tokens:
            recipe = recipe_of(given.width, given.vocab, batch_tokens, given.steps, dtype)
            for record in run(recipe, given.models, given.repeats):
                emit(record)
