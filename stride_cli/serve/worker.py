"""The one thread that models run in: they are not to be entered twice at once, nor are parallel kernels.

Requests wait in a line. Prompts that wait for the same index, asked in the same way, are answered together
where chunks are read, so that one pass over these serves them all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stride_cli.serve.options import MOST_WAITING
from stride_cli.serve.refusals import Refusal

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.errors import StrideError
    from stride_cli.serve.indexes import ServedIndex

_TOGETHER = 64  # prompts of one pass, at most


@dataclass(frozen=True, eq=False)
class Ask:
    """A prompt to be answered: its future gets an `Answer`, or its error."""

    index: ServedIndex
    prompt: Mapping[str, str]
    options: QueryOptions
    alone: bool = False
    future: Future[Answer] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class Call:
    """Something else that a model is needed for."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class Worker:
    """Runs what is submitted, one after the other, in a thread of its own.

    Parameters
    ----------
    idle : callable      called again and again while nothing waits, until it says that there is no more to do
    """

    def __init__(self, idle: Callable[[], bool] = lambda: False) -> None:
        self._idle = idle
        self._line: deque[Ask | Call] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stride-model", daemon=True)
        self._thread.start()

    def submit(self, job: Ask | Call) -> Future[Any]:
        """The job's future; a `Refusal` where too many wait already."""
        with self._changed:
            if self._closed:
                raise Refusal(503, "the server is ending", fix="start it again: stride serve")
            if len(self._line) >= MOST_WAITING:
                raise Refusal(503, f"{MOST_WAITING} requests wait already", fix="ask again in a moment")
            self._line.append(job)
            self._changed.notify()
        return job.future

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        return self.submit(Call(function))

    @property
    def waiting(self) -> int:
        return len(self._line)

    def close(self, seconds: float = 5.0) -> None:
        """Let what runs come to its end, for so long; what waits is not begun."""
        with self._changed:
            self._closed = True
            for job in self._line:
                job.future.cancel()
            self._line.clear()
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        more = True
        while True:
            if more and not self._line and not self._closed:
                more = self._idly()
            with self._changed:
                if more and not self._line and not self._closed:
                    continue
                while not self._line and not self._closed:
                    self._changed.wait()
                more = True
                if self._closed:
                    return
                job = self._line.popleft()
                jobs = [job, *(self._companions(job) if isinstance(job, Ask) and not job.alone else [])]
            jobs = [each for each in jobs if each.future.set_running_or_notify_cancel()]
            if jobs and isinstance(jobs[0], Call):
                _called(jobs[0])
            elif jobs:
                _answered([each for each in jobs if isinstance(each, Ask)])

    def _idly(self) -> bool:
        try:
            return self._idle()
        except Exception:  # whoever asks for it next is told
            return False

    def _companions(self, first: Ask) -> list[Ask]:
        """Takes out of the line what is asked of the same index in the same way; only where that helps."""
        if not self._line or not first.index.reads(first.options):
            return []
        like = [
            job
            for job in self._line
            if isinstance(job, Ask)
            and not job.alone
            and job.index is first.index
            and job.options == first.options
        ][: _TOGETHER - 1]
        taken = set(map(id, like))
        self._line = deque(job for job in self._line if id(job) not in taken)
        return like


def _called(job: Call) -> None:
    try:
        job.future.set_result(job.function())
    except BaseException as error:
        job.future.set_exception(error)


def _answered(jobs: list[Ask]) -> None:
    """Answers prompts; an error that is none of a prompt's is every one's that has no answer yet."""
    from stride_cli.attribution.answer import Refused

    waiting = deque(jobs)
    try:
        first = jobs[0]
        prompts: list[Mapping[str, Any] | StrideError] = [job.prompt for job in jobs]
        session = first.index.session()
        for outcome in session.outcomes(prompts, first.options, together=1 if first.alone else None):
            job = waiting.popleft()
            if isinstance(outcome, Refused):
                job.future.set_exception(outcome.error)
            else:
                job.future.set_result(outcome)
    except BaseException as error:
        for job in waiting:
            job.future.set_exception(error)
