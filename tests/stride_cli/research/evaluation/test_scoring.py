"""A method's run: shapes checked, sums and shares kept, memory measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import NumericalError, QueryError, StrideError, UsageError
from stride_cli.research.evaluation import workers
from stride_cli.research.evaluation.bench import split_methods
from stride_cli.research.evaluation.metrics import predicted_response
from stride_cli.research.evaluation.scoring import ScoreFile, match_queries, run_method, score_blocks


class Blocks:
    """A method that gives the blocks it was made with."""

    name = "blocks"
    bytes_per_chunk = 0.0

    def __init__(self, *blocks: np.ndarray) -> None:
        self.blocks = blocks

    def fit(self, task) -> None:
        pass

    def score(self, queries):
        yield from self.blocks


def queries(count: int) -> QuerySet:
    ids = [np.array([1, 2, 3 + number]) for number in range(count)]
    return QuerySet(ids, [np.array([0, 1, 1])] * count, [f"q{number}" for number in range(count)])


def test_runs_are_sums_over_subsets(task_and_queries) -> None:
    task, asked = task_and_queries
    masks = np.random.default_rng(0).random((6, task.n_chunks)) < 0.5
    found = run_method(task, "chance", asked, masks=masks, describe=True)
    whole = np.concatenate(list(score_blocks(_opened("chance", task), asked, task.n_chunks)))
    assert found.predicted == pytest.approx(predicted_response(whole, masks))
    assert found.distribution.active.tolist() == [task.n_chunks] * len(asked)
    assert found.held_out is None and found.memory_bytes is None
    assert found.fit_seconds >= 0 and found.score_seconds >= 0
    assert run_method(task, "chance", asked).predicted.shape == (len(asked), 0)


def _opened(spec: str, task):
    from stride_cli.research.methods.registry import open_method

    method = open_method(spec)
    method.fit(task)
    return method


def test_what_a_library_prints_is_not_data(task_and_queries, monkeypatch, capsys) -> None:
    task, asked = task_and_queries

    class Loud(Blocks):
        def score(self, queries):
            print("loading …")
            yield np.ones((len(queries), task.n_chunks), np.float32)

    monkeypatch.setattr("stride_cli.research.methods.registry.open_method", lambda spec: Loud())
    run_method(task, "loud", asked)
    captured = capsys.readouterr()
    assert captured.out == "" and "loading" in captured.err


def test_blocks_of_wrong_shape_or_value_are_refused() -> None:
    good = np.ones((2, 5), np.float32)
    assert len(list(score_blocks(Blocks(good, good), queries(4), 5))) == 2
    with pytest.raises(ValueError, match=r"shape \(2, 5\), expected \(q, 6\)"):
        list(score_blocks(Blocks(good), queries(2), 6))
    with pytest.raises(ValueError, match="scored 2 queries, expected 3"):
        list(score_blocks(Blocks(good), queries(3), 5))
    with pytest.raises(NumericalError, match="not finite"):
        list(score_blocks(Blocks(good * np.nan), queries(2), 5))


def test_queries_are_matched_by_content() -> None:
    known = queries(5)
    assert match_queries(known.take([3, 1]), known).tolist() == [3, 1]
    renamed = QuerySet(known.ids[2:3], known.weights[2:3], ["another name"])
    assert match_queries(renamed, known).tolist() == [2]
    rescored = QuerySet(known.ids[:1], [np.array([0, 0, 1])], ["q0"])
    with pytest.raises(QueryError, match="'q0' is not among the 5"):
        match_queries(rescored, known)


@pytest.mark.parametrize(
    ("given", "specs"),
    [
        ("tfidf", ["tfidf"]),
        ("tfidf:ngrams=1,top=100,chance", ["tfidf:ngrams=1,top=100", "chance"]),
        (" chance , bm25 ", ["chance", "bm25"]),
        ("chance:draw=1,chance:draw=2", ["chance:draw=1", "chance:draw=2"]),
    ],
)
def test_lists_of_methods(given: str, specs: list[str]) -> None:
    assert split_methods(given) == specs


def test_a_score_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "scores.npy"
    with ScoreFile(path, (3, 2)) as file:
        file.write(0, np.ones((2, 2)))
        file.write(2, np.zeros((1, 2)))
        assert not path.exists()
    assert np.load(path).tolist() == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(RuntimeError), ScoreFile(tmp_path / "broken.npy", (3, 2)):
        raise RuntimeError
    assert [found.name for found in tmp_path.iterdir()] == ["scores.npy"]
    with pytest.raises(UsageError, match="no directory"):
        ScoreFile(tmp_path / "no" / "scores.npy", (1, 1))
    with ScoreFile(None, (1, 1)) as nothing:
        nothing.write(0, np.ones((1, 1)))


_PEAKS = """
import mmap
import numpy as np
from stride_cli.research.evaluation.workers import _MemoryPeak as MemoryPeak
from stride_cli.research.evaluation.scoring import Run

nothing = Run(np.zeros((1, 0)), None, 0.0, 0.0, 0.0)
MemoryPeak().measured(nothing)  # imports what it needs
before = MemoryPeak()
block = mmap.mmap(-1, 1 << 27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.write(bytes(1 << 20) * 128)
block.close()
print(before.measured(nothing).memory_bytes, MemoryPeak().measured(nothing).memory_bytes)
"""


@pytest.mark.slow
def test_memory_peaks_are_seen_though_they_pass() -> None:
    """In a process of its own: here malloc may hand out again what earlier tests have left resident."""
    done = subprocess.run([sys.executable, "-c", _PEAKS], capture_output=True, text=True, check=True)
    peak, quiet = done.stdout.split()
    if peak == "None":
        pytest.skip("this system does not tell")
    assert 100 * 2**20 < float(peak) < 400 * 2**20
    assert float(quiet) < 20 * 2**20


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_of_that_method(trained: Path) -> None:
    """Killed in every attempt, the process makes an error of that method; nothing hangs."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            for child in multiprocessing.active_children():
                child.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    found = workers._Runner(WorkspacePath(trained / "run.stride"), 0.5, np.arange(1), None).run("chance")
    over.set()
    killer.join()
    assert isinstance(found, StrideError) and "was killed" in found.message
