"""Engines: worker processes and Ray tasks give what one process gives, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from stride_cli.errors import CorpusError, ModelError, StrideError
from stride_cli.evaluation import engines
from stride_cli.evaluation.retraining import Job, open_trainer, retrain


def _jobs(n: int, count: int) -> list[Job]:
    random = np.random.default_rng(1)
    return [Job(random.random(n) < 0.5, number) for number in range(count)]


def _bytes(outcomes) -> list[bytes]:
    return [outcome.losses.tobytes() for outcome in outcomes]


def _workers() -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "evaluation.engines import serve"],
        capture_output=True,
        text=True,
    )
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
def test_processes_give_the_same_bits_as_one(task_and_queries, tmp_path):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 5)
    alone = retrain(trainer, jobs, store=tmp_path / "alone", workers=1)
    before = os.environ.copy()
    several = retrain(trainer, jobs, store=tmp_path / "several", workers=2)
    assert _bytes(alone) == _bytes(several)
    assert os.environ == before and _workers() == []


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(task_and_queries, tmp_path, capsys):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 8)
    alone = retrain(trainer, jobs, store=tmp_path / "alone", workers=1)
    store = tmp_path / "several"

    def kill_one() -> None:
        while len(list(store.glob("*.outcome"))) < 2:
            time.sleep(0.005)
        os.kill(_workers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    several = retrain(trainer, jobs, store=store, workers=2)
    killer.join()
    assert _bytes(alone) == _bytes(several)
    assert "a worker died (status -9)" in capsys.readouterr().err


@pytest.mark.slow
def test_errors_come_back_from_workers(task_and_queries, tmp_path):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    nothing = [Job(np.zeros(trainer.n_chunks, bool), seed) for seed in (0, 1)]
    with pytest.raises(CorpusError, match="no token to train on"):
        retrain(trainer, nothing, store=tmp_path / "a", workers=2)
    trainer.device = "nowhere"
    with pytest.raises((RuntimeError, ModelError), match="nowhere"):
        retrain(trainer, _jobs(trainer.n_chunks, 2), store=tmp_path / "b", workers=2)


@pytest.mark.slow
def test_a_group_that_kills_its_workers_is_given_up(task_and_queries, tmp_path, monkeypatch):
    task, queries = task_and_queries
    monkeypatch.setattr(engines, "_SERVE", "import sys; sys.exit(7)")
    trainer = open_trainer(task, queries)
    with pytest.raises(StrideError, match="died 3 times") as caught:
        retrain(trainer, _jobs(trainer.n_chunks, 2), store=tmp_path / "a", workers=2)
    assert "--workers" in caught.value.fix


def test_default_workers(task_and_queries):
    task, queries = task_and_queries
    assert engines.default_workers(open_trainer(task, queries)) == len(os.sched_getaffinity(0))


def test_one_thread_is_given_back():
    import torch

    before = torch.get_num_threads()
    with engines.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
