"""Run models in one thread: neither they nor parallel kernels may be entered twice at once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stride_cli.errors import StrideError
from stride_cli.serve.options import MOST_WAITING
from stride_cli.serve.refusals import Refusal

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.serve.indexes import ServedIndex

_TOGETHER = 64  # prompts of one pass, at most


@dataclass(frozen=True, eq=False)
class Ask:
    """A prompt to be answered: its future gets an `Answer`, or its error."""

    index: ServedIndex
    prompt: Mapping[str, str]
    options: QueryOptions
    future: Future[Answer] = field(default_factory=Future)


class Worker:
    """Runs what it is given, one after the other, in a thread of its own.

    Prompts that wait for the same index, asked in the same way, are answered together where chunks are read:
    one pass over these serves them all.
    """

    def __init__(self) -> None:
        self._line: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue(MOST_WAITING)
        self._asked: list[Ask] = []
        self._lock = threading.Lock()  # of the prompts
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stride-model", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function.

        Raises:
            Refusal      too many requests wait already, or the server is ending
        """
        if self._closed.is_set():
            raise Refusal(503, "the server is ending", fix="start it again: stride serve")
        future: Future[Any] = Future()
        try:
            self._line.put_nowait((function, future))
        except queue.Full:
            raise Refusal(503, f"{MOST_WAITING} requests wait already", fix="ask again in a moment") from None
        return future

    def ask(self, job: Ask) -> Future[Answer]:
        """Answer a prompt; raises as `call`."""
        with self._lock:
            self.call(self._answer_next)
            self._asked.append(job)
        return job.future

    def close(self, seconds: float = 5.0) -> None:
        """Let what runs come to its end, for so long; what waits is not begun."""
        self._closed.set()
        with self._lock:
            for job in self._asked:
                job.future.cancel()
        with contextlib.suppress(queue.Full):  # then it has something to wake up for
            self._line.put_nowait((lambda: None, Future()))
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            function, future = self._line.get()
            if self._closed.is_set():
                future.cancel()
                if self._line.empty():
                    return
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

    def _answer_next(self) -> None:
        """Answer the prompt that has waited longest, and those that join it.

        There is one call for every prompt: those of prompts that were answered with others find fewer.
        """
        with self._lock:
            if not self._asked:
                return
            first = self._asked[0]
            most = _TOGETHER if first.index.reads(first.options) else 1
            same = [job for job in self._asked if job.index is first.index and job.options == first.options]
            jobs = same[:most]
            self._asked = [job for job in self._asked if job not in jobs]
        jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        if jobs:
            _answer(jobs)


def _answer(jobs: list[Ask]) -> None:
    """Answer prompts in one pass; an error that is none of a prompt's is every one's without an answer."""
    waiting = iter(jobs)
    try:
        first = jobs[0]
        for outcome in first.index.session().outcomes([job.prompt for job in jobs], first.options):
            job = next(waiting)
            if isinstance(outcome, StrideError):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
                job.index.keep(job.prompt, job.options, outcome)
    except BaseException as error:
        for job in waiting:
            job.future.set_exception(error)
