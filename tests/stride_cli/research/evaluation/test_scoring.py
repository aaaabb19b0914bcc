"""A method's run: shapes checked, sums and shares kept, memory measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import QueryError, StrideError
from stride_cli.research.evaluation import workers
from stride_cli.research.training.truth import match_queries


def queries(count: int) -> QuerySet:
    ids = [np.array([1, 2, 3 + number]) for number in range(count)]
    return QuerySet(ids, [np.array([0, 1, 1])] * count, [f"q{number}" for number in range(count)])


def test_queries_are_matched_by_content() -> None:
    known = queries(5)
    assert match_queries(known.take([3, 1]), known).tolist() == [3, 1]
    renamed = QuerySet(known.ids[2:3], known.weights[2:3], ["another name"])
    assert match_queries(renamed, known).tolist() == [2]
    rescored = QuerySet(known.ids[:1], [np.array([0, 0, 1])], ["q0"])
    with pytest.raises(QueryError, match="'q0' is not among the 5"):
        match_queries(rescored, known)


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
