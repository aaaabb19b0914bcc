"""Engines: worker processes and Ray tasks give what one process gives, whatever dies on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stride_cli import api
from stride_cli.errors import CorpusError, ModelError, StrideError
from stride_cli.training import engines
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain
from tests.same_fit import assert_same_fit
from tests.stride_cli.training import ray_cluster


def _jobs(n: int, count: int) -> list[Job]:
    random = np.random.default_rng(1)
    return [Job(random.random(n) < 0.5, number) for number in range(count)]


def _one_by_one(task, queries):
    """A trainer whose groups are single jobs, so that a few jobs keep several workers busy."""
    trainer = open_trainer(task, queries)
    trainer.at_once = 1
    return trainer


def _bytes(outcomes) -> list[bytes]:
    return [outcome.losses.tobytes() for outcome in outcomes]


@pytest.mark.slow
def test_processes_give_the_same_bits_as_one_though_one_dies(
    task_and_queries, tmp_path, capsys, forked_spawners
):
    task, queries = task_and_queries
    trainer = _one_by_one(task, queries)
    jobs = _jobs(trainer.n_chunks, 8)
    alone = retrain(trainer, jobs, store=tmp_path / "alone", workers=1)
    store, before = tmp_path / "several", os.environ.copy()

    def kill_one() -> None:
        while not (workers := forked_spawners()) or len(list(store.glob("*.outcome"))) < 2:
            time.sleep(0.005)
        os.kill(workers[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    several = retrain(trainer, jobs, store=store, workers=2)
    killer.join(60)
    assert not killer.is_alive()
    assert _bytes(alone) == _bytes(several)
    assert os.environ == before and forked_spawners() == []
    assert "a worker died (status -9)" in capsys.readouterr().err


@pytest.mark.slow
def test_errors_come_back_from_workers(task_and_queries, tmp_path, forked_spawners):
    task, queries = task_and_queries
    trainer = _one_by_one(task, queries)
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
    trainer = _one_by_one(task, queries)
    with pytest.raises(StrideError, match="died 3 times") as caught:
        retrain(trainer, _jobs(trainer.n_chunks, 2), store=tmp_path / "a", workers=2)
    assert "--workers" in caught.value.fix


def test_a_worker_without_memory_is_no_traceback() -> None:
    import torch

    lines = "CUDA out of memory. Tried to allocate 2 GiB\nmore"
    for error in (MemoryError(), torch.OutOfMemoryError(lines), RuntimeError("can't allocate memory")):
        said = engines._portable(error)
        assert isinstance(said, StrideError) and "--workers" in (said.fix or "")
        assert "no memory left" in said.message and "\n" not in said.message


@pytest.mark.parametrize(
    ("most", "need", "count"), [(1, 1, 2), (12, 0, 2), (12, 2, 8), (12, 5, 4), (3, 1, 6)]
)
def test_workers_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch, most: int, need: int, count: int) -> None:
    """Of two GPUs, each with room for 10, and 8 processors."""
    monkeypatch.setattr(engines, "available_cores", lambda: 8)
    monkeypatch.setattr(engines, "_gpu_count", lambda: 2)
    monkeypatch.setattr("stride_cli.operators.device_memory.free_bytes", lambda device: 10)
    trainer = SimpleNamespace(device="cuda:0", peak_bytes=need, on_one_gpu=most)
    assert engines.default_workers(trainer) == count


def test_default_workers(task_and_queries):
    task, queries = task_and_queries
    assert engines.default_workers(open_trainer(task, queries)) == len(os.sched_getaffinity(0))


def test_memory_for_fewer_workers(task_and_queries, monkeypatch, capsys):
    trainer = open_trainer(*task_and_queries)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for free, count in ((100, 8), (3.5, 3), (0.5, 1)):
        monkeypatch.setattr(engines, "available_bytes", lambda free=free: int(free * trainer.peak_bytes))
        assert engines.default_workers(trainer) == count
    assert "3 at a time: training one takes about" in capsys.readouterr().err


def test_one_thread_is_given_back():
    import torch

    before = torch.get_num_threads()
    with engines.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_ray_trains_what_processes_train(
    trained, open_task, tmp_path, prepared, forked_spawners, monkeypatch
):
    """On two nodes: the same index, operators and outcomes, though workers are killed, and a whole node."""
    pytest.importorskip("ray")
    task, _ = open_task()
    model = str(trained / "model")
    places = [str(task.index.path), model, str(trained / "queries.jsonl")]
    texts = [{"id": f"d{n}", "text": f"{n} is {n + 1} " * n} for n in range(1, 36)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    with (tmp_path / "said").open("wb") as said:
        line = [ray_cluster.__file__, *places, tmp_path]
        process = prepared.start(line, stdout=said, stderr=said, new_session=True)
        # meanwhile, for most of its time Ray's processes wait for one another
        whole, operators = tmp_path / "whole", tmp_path / "local.stride"
        api.build_index([str(tmp_path / "corpus.jsonl")], model_path=model, out=whole)
        shutil.copytree(whole, operators)
        monkeypatch.setattr(engines, "available_cores", lambda: 2)
        run = api.FitRunOptions(workers=2, save_seconds=0)
        api.train(operators, ray_cluster.OPTIONS, run=run, device="cpu", dtype="fp32")
        trainer = ray_cluster.open_jobs(*places)
        alone = retrain(trainer, ray_cluster.jobs_of(trainer), store=tmp_path / "alone", workers=1)
        assert process.wait() == 0, (tmp_path / "said").read_text()

    def files(index: Path) -> dict[Path, bytes]:
        found = (path for path in index.rglob("*") if path.is_file())
        return {path.relative_to(index): path.read_bytes() for path in found}

    assert files(tmp_path / "apart") == files(whole)
    assert_same_fit(tmp_path / "ray.stride/operators", operators / "operators")
    assert np.array_equal(np.load(tmp_path / "losses.npy"), [outcome.losses for outcome in alone])
