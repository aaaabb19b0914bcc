"""Prompts, or whatever else is asked of a session, shared out to processes of this machine or tasks of Ray.

Each opens the index and its model for itself (workers that are forked share what was opened before), and does
what one session would do with its share; answers come in the order of what was asked. Who shares out and
replaces workers that die is `training.engines`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.answer import Answer, Refused
from stride_cli.attribution.options import QueryOptions, SharingOptions
from stride_cli.attribution.session import TOGETHER, Session
from stride_cli.errors import StrideError
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath

_AHEAD = 2  # shares a worker that wait for it
_MANY = 64  # shares that wait where the number of workers is the cluster's
# of a file, whoever answers: with a share's prompts its last digits would change. Enough for eight workers,
# of whom none waits long for the last, and one that dies loses little
_SHARES = 16
_HELD = 8  # times as many as wait may be done before an earlier one is

# a session, what is asked of it → the answer; what is pickled with it goes along
Task = Callable[[Session, Any], Any]
_last: dict[str, Any] = {}  # what this process opened last


@dataclass
class SessionWorker:
    """Does shares of work with a session of its own, in whatever process it is sent to.

    Attributes
    ----------
    place : WorkspacePath
    task : Task            of module level, or a `functools.partial` of such
    peak_bytes : about what a worker takes in memory; 0: not known
    """

    place: WorkspacePath
    task: Task
    peak_bytes: int = 0

    doing = "answering"

    @property
    def device(self) -> str:
        if self.place.device != "auto":
            return self.place.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def prepare(self) -> None:
        """Open the session, which forked workers then share; on a GPU each opens its own."""
        if self.device.partition(":")[0] == "cpu":
            with contextlib.suppress(Exception):  # `run` raises it where it can be told
                self._open()

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """What the task makes of each."""
        session = self._open()
        return [self.task(session, job) for job in jobs]

    def _open(self) -> Session:
        # once a process: one of Ray gets the worker anew with every task
        if _last.get("place") != self.place:
            _last.clear()
            place = self.place
            session = Session.open(
                place.index, model_path=place.model, device=place.device, dtype=place.dtype
            )
            _last.update(place=place, session=session)
        opened: Session = _last["session"]
        return opened


def shared_out(worker: SessionWorker, jobs: Iterable[Any], sharing: SharingOptions) -> Iterator[Any]:
    """What the worker's task makes of each job, in order, as they are done; jobs are taken as they are
    needed.

    Raises
    ------
    StrideError      what a task raised, or a job over which workers died again and again
    """
    from stride_cli.training.engines import open_engine

    engine: Any = open_engine(sharing.engine)
    ahead = _AHEAD * sharing.workers if sharing.workers else _MANY
    arriving = iter(jobs)
    groups: list[list[Any]] = [[job] for job in islice(arriving, ahead)]
    if not groups:
        return
    finished = engine(worker, groups, sharing.workers)
    waiting: dict[int, Any] = {}  # for those before them
    following, done = 0, 0
    try:
        for number, (answer,) in finished:
            waiting[number], groups[number] = answer, []
            done += 1
            while len(groups) - done < ahead and len(waiting) < _HELD * ahead:
                more = [[job] for job in islice(arriving, 1)]
                if not more:
                    break
                groups += more
            while following in waiting:
                yield waiting.pop(following)
                following += 1
    finally:
        finished.close()
        _last.clear()  # of work in this process


class SharedSession:
    """Answers prompts as a `Session` does, each share of them in another process.

    Parameters
    ----------
    place : WorkspacePath      the index, its model, device and precision
    sharing : SharingOptions
    """

    def __init__(self, place: WorkspacePath, sharing: SharingOptions) -> None:
        self._place, self._sharing = place, sharing

    def outcomes(
        self,
        prompts: Iterable[Mapping[str, Any] | StrideError],
        options: QueryOptions | None = None,
        *,
        total: int | None = None,
        together: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stop: bool = False,
    ) -> Iterator[Answer | Refused]:
        """See `Session.outcomes`.

        Parameters
        ----------
        total : how many prompts there are, where that is known: shares are made so that all workers get some
        together : prompts of a share; default: by `total`
        clock : not used: seconds are each worker's own
        """
        task = partial(answer_prompts, options=options or QueryOptions())
        broken: list[StrideError] = []
        size = together or prompts_of_a_share(total)
        shares = in_parts(_until_broken(prompts, broken), size)
        with progress("answering", total, unit="prompts") as bar:
            for outcomes in shared_out(SessionWorker(self._place, task), shares, self._sharing):
                for outcome in outcomes:
                    bar.advance()
                    yield outcome
                    if stop and isinstance(outcome, Refused):
                        return
        if broken:
            raise broken[0]


def prompts_of_a_share(total: int | None) -> int:
    """As many as are read for in one pass, where there are so many; fewer, so that all workers get some."""
    return TOGETHER if total is None else max(1, min(TOGETHER, -(-total // _SHARES)))


def answer_prompts(
    session: Session, prompts: Sequence[Mapping[str, Any] | StrideError], *, options: QueryOptions
) -> list[Answer | Refused]:
    """A share of prompts, asked together."""
    return list(session.outcomes(prompts, options, together=len(prompts)))


def in_parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of so many, the last perhaps of fewer."""
    arriving = iter(items)
    while part := list(islice(arriving, size)):
        yield part


def _until_broken(prompts: Iterable[Any], broken: list[StrideError]) -> Iterator[Any]:
    """Prompts as they come; the error of who gives them is kept for the end, when all before are answered."""
    try:
        yield from prompts
    except StrideError as error:
        broken.append(error)
