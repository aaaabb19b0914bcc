"""Workers: processes and tasks of Ray give what one process gives, whatever dies on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from stride_cli import api
from stride_cli.errors import CorpusError, StrideError, UsageError
from stride_cli.models.spec import ModelSpec
from stride_cli.parallel import Workers, opened_once
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain
from tests.same_fit import assert_same_fit, contents
from tests.stride_cli import ray_cluster


class _OfTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def work(task: Any) -> Any:
    """A square, or what can go wrong."""
    if task == "wrong":
        raise UsageError("a task is wrong", fix="mend it")
    if task == "unheard of":
        raise _OfTwo(1, 2)
    if task == "memory":
        raise MemoryError
    if task == "die":
        os._exit(1)
    if task == "who":
        print("talk")
        return os.getpid(), __import__("torch").get_num_threads(), os.environ.get("STRIDE_TEST")
    if task == "open":
        return opened_once("number", lambda: np.random.default_rng().integers(1 << 60)), os.getpid()
    if isinstance(task, Path):  # die once
        if task.exists():
            task.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"
    return task * task


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_as_they_are_done_or_in_order(count: int) -> None:
    given = []

    def tasks() -> Iterator[int]:
        for number in range(20):
            given.append(number)
            yield number

    with Workers(work, count) as workers:
        for done, (number, result) in enumerate(workers.as_done(tasks())):
            assert result == number**2
            assert len(given) <= done + 4  # no more than workers have use for
        assert list(workers.in_order(range(9))) == [number**2 for number in range(9)]
        assert list(workers.in_order([])) == []


def test_a_worker_that_dies_while_another_starts_costs_its_work_alone() -> None:
    """The executor then closes the queue that the new worker is given (CPython 3.11, `terminate_broken`)."""
    with Workers(work, 2) as workers:
        pool = workers._pool._pool  # type: ignore[union-attr]
        submit, closing = pool.submit, iter([lambda: None, pool._call_queue._reader.close])
        pool.submit = lambda *given: (next(closing)(), submit(*given))[1]
        assert list(workers.in_order(range(5))) == [0, 1, 4, 9, 16] and not list(closing)


def test_workers_are_processes_with_their_share_of_cores_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRIDE_TEST", "given")
    with Workers(work, 2, threads=2) as workers:
        found = list(workers.in_order(["who"] * 8))
        opened = dict(workers.in_order(["open"] * 8))
    assert {threads for _, threads, _ in found} == {2} and {given for *_, given in found} == {"given"}
    assert os.getpid() not in {process for process, *_ in found} and len(opened) == len(set(opened.values()))
    with Workers(work, 1) as workers:
        assert next(workers.in_order(["who"]))[0] == os.getpid()
    with Workers(work, 1, apart=True) as workers:
        assert next(workers.in_order(["who"]))[0] != os.getpid()
    assert capfd.readouterr().out == "talk\n"  # of this process alone


@pytest.mark.parametrize(
    ("task", "kind", "said", "fix"),
    [
        ("wrong", UsageError, "^a task is wrong$", "mend it"),
        ("unheard of", RuntimeError, "(?s)failed in a worker.*_OfTwo", None),
        ("memory", StrideError, "a worker has no memory left", "fewer --workers"),
        ("die", StrideError, "a worker was killed 3 times", "fewer --workers"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_raised_with_its_remedy(
    task: str, kind: type[Exception], said: str, fix: str | None
) -> None:
    with pytest.raises(kind, match=said) as caught, Workers(work, 2) as workers:
        list(workers.as_done([1, 2, task, 3]))
    if fix:
        assert fix in caught.value.fix  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"
    once.touch()
    with Workers(work, 2) as workers:
        assert list(workers.in_order([1, once, 2, 3, 4])) == [1, "alive", 4, 9, 16]
    assert "a worker was killed" in capfd.readouterr().err


_SLEEPS = """
import os, sys, time
from pathlib import Path

def sleep(task):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
"""
# a script without a guard: workers do not run it
_SCRIPT = """
from sleeps import sleep
from stride_cli.parallel import Workers

with Workers(sleep, 2) as workers:
    list(workers.as_done(range(4)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "at_work"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGKILL, True)]
)
def test_workers_end_with_the_process_that_has_them(tmp_path: Path, number: int, at_work: bool) -> None:
    """At once and without a word, also while they start."""
    (tmp_path / "sleeps.py").write_text(_SLEEPS)
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "workers").mkdir()
    line = [sys.executable, tmp_path / "script.py", tmp_path / "workers"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(line, start_new_session=True, stderr=said)
    if at_work:
        assert _eventually(lambda: len(list((tmp_path / "workers").iterdir())) == 2)
    else:
        time.sleep(1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    assert process.wait(20) == -number
    places = [Path("/proc", path.name) for path in (tmp_path / "workers").iterdir()]
    assert _eventually(lambda: not any(place.exists() for place in places), 10)
    if number == signal.SIGINT:
        assert (tmp_path / "said").read_text().count("Traceback") == 1  # the script's own


def _eventually(holds: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(holds())


def _jobs(n: int, count: int) -> list[Job]:
    random = np.random.default_rng(1)
    return [Job(random.random(n) < 0.5, number) for number in range(count)]


@pytest.mark.slow
def test_processes_retrain_the_same_bits_as_one_though_one_dies(
    task_and_queries: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, queries = task_and_queries
    trainer: Any = open_trainer(task, queries)
    trainer.at_once = 1  # groups of single jobs, so that a few jobs keep several workers busy
    jobs = _jobs(trainer.n_chunks, 8)
    alone = retrain(trainer, jobs, store=tmp_path / "alone", workers=1)
    store, before = tmp_path / "several", os.environ.copy()

    def kill_one() -> None:
        while len(list(store.glob("*.outcome"))) < 2:
            time.sleep(0.005)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    several = retrain(trainer, jobs, store=store, workers=2)
    killer.join(60)
    assert not killer.is_alive()
    assert [each.losses.tobytes() for each in alone] == [each.losses.tobytes() for each in several]
    assert os.environ == before and not multiprocessing.active_children()
    assert "a worker was killed" in capsys.readouterr().err
    nothing = [Job(np.zeros(trainer.n_chunks, bool), seed) for seed in (0, 1)]
    with pytest.raises(CorpusError, match="no token to train on"):
        retrain(trainer, nothing, store=tmp_path / "nothing", workers=2)


@pytest.mark.slow
def test_ray_does_what_processes_do(
    trained: Path, open_task: Any, tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two nodes: the same index, operators and outcomes, though workers are killed, and a whole node."""
    pytest.importorskip("ray")
    with pytest.raises(StrideError, match="not start: Inv"), patch.dict(os.environ, RAY_ADDRESS="nowhere"):
        Workers(len, 1, engine="ray").__enter__()
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
        api.build_index([str(tmp_path / "corpus.jsonl")], out=whole, model=model)
        shutil.copytree(whole, operators)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
        run = api.FitRunOptions(workers=2, save_seconds=0)
        api.fit_index(operators, ray_cluster.OPTIONS, run=run, model=ModelSpec(device="cpu", dtype="fp32"))
        trainer = ray_cluster.open_jobs(*places)
        alone = retrain(trainer, ray_cluster.jobs_of(trainer), store=tmp_path / "alone", workers=1)
        assert process.wait() == 0, (tmp_path / "said").read_text()

    assert contents(tmp_path / "apart") == contents(whole)
    assert_same_fit(tmp_path / "ray.stride/operators", operators / "operators")
    assert np.array_equal(np.load(tmp_path / "losses.npy"), [outcome.losses for outcome in alone])
