"""How many times faster classifiers are retrained many at once than one after another, on one core.

Networks and recipes are those of the benchmark suites (on random inputs, which cost the same); each network
trains on half of the rows. The figure to look at is `speedup`: processor time per network one by one
(autograd and torch.optim) over that in a stack, minima over repetitions that alternate between the two.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe, default_recipe
from stride_cli.models.classifier.networks import build_network, choose_network
from stride_cli.output import emit
from stride_cli.research.training.classifier_stack import train_stacked
from stride_cli.training.classifier_loop import train_network

# name, network, width, rows, shape, classes, sizes of stacks, epochs that are timed
SUITES: tuple[tuple[str, str, int, int, tuple[int, ...], int, tuple[int, ...], int], ...] = (
    ("mnist", "mlp", 128, 2000, (784,), 10, (20, 50, 100), 2),
    ("parkinsons", "mlp", 128, 150, (22,), 2, (20, 100, 256), 20),
    ("digits", "resnet9", 8, 1000, (8, 8), 10, (8, 32), 1),
)


def run(seconds: float, names: list[str], stacks: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """One record a suite and size of stack; about `seconds` in all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for suite in SUITES:
            if suite[0] in names:
                yield from _measure(suite, seconds / len(names), stacks)
    finally:
        torch.set_num_threads(before)


def _measure(suite: tuple, seconds: float, stacks: list[int] | None) -> Iterator[dict[str, Any]]:
    name, kind, width, n, shape, n_classes, sizes, epochs = suite
    sizes = tuple(stacks or sizes)
    recipe = replace(default_recipe(choose_network(kind, width=width)), epochs=epochs)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, *shape, generator=generator)
    labels = torch.randint(n_classes, (n,), generator=generator)
    random = np.random.default_rng(0)
    members = [np.sort(random.permutation(n)[: n // 2]) for _ in range(max(sizes))]

    def alone(count: int) -> None:
        for seed in range(count):
            network = build_network(recipe.network, shape, n_classes, seed=seed)
            train_network(network, inputs, labels, recipe, members=members[seed], seed=seed)

    def together(count: int) -> None:
        train_stacked(recipe, inputs, labels, members[:count], range(count), n_classes=n_classes)

    alone(1)
    together(2)
    found: dict[int, float] = {}
    began, repeats = time.perf_counter(), 0
    while repeats == 0 or time.perf_counter() - began < seconds * 0.6:
        found[1] = min(found.get(1, np.inf), _cost(alone, min(4, len(members))))
        for size in sizes:
            found[size] = min(found.get(size, np.inf), _cost(together, size))
        repeats += 1
    for size in (1, *sizes):
        yield {
            "benchmark": "stacked_classifiers",
            "suite": name,
            "network": f"{kind} {width}",
            "at_once": size,
            "milliseconds_per_step": 1e3 * found[size] / recipe.steps(n // 2),
            "seconds_per_network": found[size] / epochs * default_epochs(recipe),
            "speedup": found[1] / found[size],
            "repeats": repeats,
            "parameters": sum(
                p.numel() for p in build_network(recipe.network, shape, n_classes, seed=0).parameters()
            ),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "load_1_minute": os.getloadavg()[0],
        }


def default_epochs(recipe: ClassifierRecipe) -> int:
    """Epochs of the network's usual recipe."""
    return default_recipe(recipe.network).epochs


def _cost(action: Callable[[int], None], count: int) -> float:
    """Processor seconds for each of `count` networks."""
    began = time.process_time()
    action(count)
    return (time.process_time() - began) / count


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks stacked_classifiers", description=__doc__
    )
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--suites", default=",".join(suite[0] for suite in SUITES))
    parser.add_argument("--at-once", type=int, nargs="*")
    given = parser.parse_args(arguments)
    for record in run(given.seconds, given.suites.split(","), given.at_once):
        emit(record)
