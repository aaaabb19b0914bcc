"""Prompts, or whatever else an index is asked, shared out to processes of this machine or tasks of Ray.

Each opens the index and its model for itself (workers that are forked share what was opened before), and does
what one process would do with its share; answers come in the order of what was asked. Who shares out and
replaces workers that die is `training.engines`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.answer import Answer
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
class PlaceWorker:
    """Does shares of work with what it opens at a place, in whatever process it is sent to.

    Attributes
    ----------
    place : WorkspacePath
    peak_bytes : about what a worker takes in memory; 0: not known
    """

    place: WorkspacePath
    peak_bytes: int = field(default=0, kw_only=True)

    doing = "answering"

    @property
    def device(self) -> str:
        if self.place.device != "auto":
            return self.place.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def prepare(self) -> None:
        """Open what forked workers then share; on a GPU each opens its own."""
        if self.device.partition(":")[0] == "cpu":
            with contextlib.suppress(Exception):  # `run` raises it where it can be told
                self._opened()

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """What is made of each."""
        opened = self._opened()
        return [self.do(opened, job) for job in jobs]

    def open(self) -> Any:
        """What `do` works with; here the workspace."""
        return self.place.open()

    def do(self, opened: Any, job: Any) -> Any:
        """One job."""
        raise NotImplementedError

    def what(self) -> Hashable:
        """What is opened: the same is not opened again."""
        return type(self), self.place

    def _opened(self) -> Any:
        # once a process: one of Ray gets the worker anew with every task
        if _last.get("what") != self.what():
            _last.clear()
            opened = self.open()
            _last.update(what=self.what(), opened=opened)
        return _last["opened"]


@dataclass
class SessionWorker(PlaceWorker):
    """Does shares of work with a session of its own; beside what every `PlaceWorker` has:

    Attributes
    ----------
    task : Task            of module level, or a `functools.partial` of such
    """

    task: Task

    def open(self) -> Session:
        place = self.place
        return Session.open(place.index, model_path=place.model, device=place.device, dtype=place.dtype)

    def do(self, opened: Session, job: Any) -> Any:
        return self.task(opened, job)


def shared_out(worker: PlaceWorker, jobs: Iterable[Any], sharing: SharingOptions) -> Iterator[Any]:
    """What the worker makes of each job, in order, as they are done; jobs are taken as they are
    needed.

    Raises
    ------
    StrideError      what it raised, or a job over which workers died again and again
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
    ) -> Iterator[Answer | StrideError]:
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
                    if stop and isinstance(outcome, StrideError):
                        return
        if broken:
            raise broken[0]


def prompts_of_a_share(total: int | None) -> int:
    """As many as are read for in one pass, where there are so many; fewer, so that all workers get some."""
    return TOGETHER if total is None else max(1, min(TOGETHER, -(-total // _SHARES)))


def answer_prompts(
    session: Session, prompts: Sequence[Mapping[str, Any] | StrideError], *, options: QueryOptions
) -> list[Answer | StrideError]:
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
