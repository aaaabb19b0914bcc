"""Sessions in workers: a share of prompts or samples is answered as one process would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.session import TOGETHER, Session
from stride_cli.parallel import Workers, opened_once

if TYPE_CHECKING:
    from stride_cli.attribution.options import SharingOptions
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


def prompts_of_a_share(total: int) -> int:
    """Count the prompts of a share: at most those of one pass, and fewer, so that all workers get some; one
    where the `total` is not known (0)."""
    return max(1, min(TOGETHER, -(-total // _SHARES)))
