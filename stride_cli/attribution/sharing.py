"""Sessions in workers: prompts and samples shared out, and answered as one process would its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.answer import Answer
from stride_cli.attribution.options import QueryOptions, SharingOptions
from stride_cli.attribution.session import TOGETHER, Session, until_broken
from stride_cli.errors import StrideError
from stride_cli.output import progress
from stride_cli.parallel import Workers, opened_once

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath

# of a file, whoever answers: with a share's prompts its last digits would change. Enough for eight workers,
# of whom none waits long for the last, and one that dies loses little
_SHARES = 16


@dataclass(frozen=True)
class SessionWork:
    """A task on a session, which each worker opens once.

    Attributes
    ----------
    place : WorkspacePath
    task : callable      session, job → result; of a module, or a `functools.partial` of such
    """

    place: WorkspacePath
    task: Callable[[Session, Any], Any]

    def __call__(self, job: Any) -> Any:
        return self.task(opened_once(self.place, self._open), job)

    def _open(self) -> Session:
        return Session.open(self.place.index, model=self.place.model)


def shared_out(work: SessionWork, jobs: Iterable[Any], sharing: SharingOptions) -> Iterator[Any]:
    """Yield what workers make of each job, in order; jobs are taken as they are needed.

    Raises
    ------
    StrideError      what a worker raised, or a job over which workers died again and again
    """
    device = work.place.model.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    with Workers(work, sharing.workers, engine=sharing.engine, device=device) as workers:
        yield from workers.in_order(jobs)


class SharedSession:
    """Answers prompts as a `Session` does, each share of them in a worker.

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
    ) -> Iterator[Answer | StrideError]:
        """See `Session.outcomes`.

        Parameters
        ----------
        total : how many prompts there are, where that is known: shares are made so that all workers get some
        """
        work = SessionWork(self._place, partial(answer_prompts, options=options or QueryOptions()))
        broken: list[StrideError] = []
        arriving, size = until_broken(prompts, broken), prompts_of_a_share(total)
        shares = iter(lambda: list(islice(arriving, size)), [])
        with progress("answering", total, unit="prompts") as bar:
            for outcomes in shared_out(work, shares, self._sharing):
                for outcome in outcomes:
                    bar.advance()
                    yield outcome
        if broken:
            raise broken[0]


def prompts_of_a_share(total: int | None) -> int:
    """Count the prompts of a share: at most those of one pass, and fewer, so that all workers get some."""
    return TOGETHER if total is None else max(1, min(TOGETHER, -(-total // _SHARES)))


def answer_prompts(
    session: Session, prompts: Sequence[Mapping[str, Any] | StrideError], *, options: QueryOptions
) -> list[Answer | StrideError]:
    """Answer a share of prompts together."""
    return list(session.outcomes(prompts, options, together=len(prompts)))
