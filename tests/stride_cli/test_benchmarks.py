"""The benchmark of fitting runs at a tiny size; its records hold what they promise."""

from __future__ import annotations

import json
import mmap
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tests.benchmarks import fitting
from tests.benchmarks._machine import interleave, watched_memory

WORDS = ["water", "stone", "river", "mountain", "history", "science", "treaty", "empire", "island", "planet"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "corpus.jsonl"
    texts = [" ".join(WORDS[(row * k + k) % 10] for k in range(1, 40)) for row in range(30)]
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": f"{n} {text}."}) + "\n" for n, text in enumerate(texts))
    )
    return path


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    from stride_cli import api
    from stride_cli.training.pretraining import TrainOptions, train_model

    model = corpus.parent / "model"
    train_model([str(corpus)], model, TrainOptions(steps=2, layers=2, width=32, vocab=300, context=32))
    out = corpus.parent / "run.stride"
    options = api.BuildOptions(block_size=16, n_subsets=20, degree=3)
    api.build_index([str(corpus)], out=out, options=options, model=str(model))
    api.fit_index(out, api.ClosedOptions(rank=4, buckets=16))
    return out


def test_tasks_take_turns_and_memory_is_watched() -> None:
    order: list[str] = []
    tasks = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds, _ = interleave(tasks, 2)
    assert order == ["a", "b", "a", "b"] and [len(times) for times in seconds.values()] == [2, 2]
    with watched_memory() as held:
        # pages of its own: malloc may hand out again what earlier tests have left resident
        block = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * 50_000_000)
        time.sleep(0.5)
        block.close()
    assert held["peak_megabytes"] > 40


@pytest.mark.slow
def test_fitting(index: Path) -> None:
    closed, reading = fitting.run(Namespace(index=index, chunks=20, read=12, repeats=1))
    assert closed["share_of_bare_pass"] > 0 and closed["gate_megabytes"] > 0
    assert reading["read"] == 12 and reading["reading_by_bare_pass"] > 0
