"""Work that is shared out among threads which stay."""

from __future__ import annotations

import os
import threading

import pytest

from stride_cli import side_by_side


def test_results_come_in_order_and_threads_stay() -> None:
    seen = set()

    def piece(number: int) -> int:
        seen.add(threading.get_ident())
        return number**2

    for _ in range(20):
        assert side_by_side.each(piece, range(5)) == [0, 1, 4, 9, 16]
    assert threading.get_ident() in seen and len(seen) <= 1 + (os.cpu_count() or 1)
    assert side_by_side.each(piece, []) == []


def test_an_error_comes_when_nobody_is_at_work_any_more() -> None:
    done, gate = [], threading.Event()

    def piece(number: int) -> None:
        if number == 0:
            gate.set()
            raise ValueError("zero")
        gate.wait(10)
        done.append(number)

    with pytest.raises(ValueError, match="zero"):
        side_by_side.each(piece, range(4))
    assert sorted(done) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        side_by_side.settle([side_by_side.start(lambda: 1 // 0), side_by_side.start(lambda: 1)])


def test_a_forked_process_has_threads_of_its_own() -> None:
    side_by_side.each(str, range(3))
    child = os.fork()
    if child == 0:
        os._exit(0 if side_by_side.each(str, range(3)) == ["0", "1", "2"] else 1)
    assert os.waitpid(child, 0)[1] == 0
