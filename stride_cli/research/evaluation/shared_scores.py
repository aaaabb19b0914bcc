"""Scores of methods, shared out to processes of this machine or tasks of Ray: a method, or queries of one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import SharingOptions
from stride_cli.attribution.sharing import PlaceWorker, prompts_of_a_share, shared_out
from stride_cli.errors import StrideError
from stride_cli.research.evaluation.cause_scores import CauseBench, CauseEntry, KeptRanks
from stride_cli.research.evaluation.scoring import Run, document_blocks

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.research.evaluation.bench import Bench
    from stride_cli.research.evaluation.cause_queries import CauseQuery
    from stride_cli.research.methods.protocol import Method


@dataclass
class QueryScorer(PlaceWorker):
    """Scores documents by one method for shares of queries, (q, D) float64; it is fitted when it is opened.

    Attributes
    ----------
    spec : as `stride_cli.research.methods.registry.open_method` takes it
    """

    spec: str

    doing = "scoring"

    def what(self) -> Hashable:
        return super().what(), self.spec

    def open(self) -> tuple[Workspace, Method]:
        from stride_cli.research.methods.registry import open_method

        with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
            workspace, method = self.place.open(), open_method(self.spec)
            method.fit(workspace)
        return workspace, method

    def do(self, opened: tuple[Workspace, Method], job: QuerySet) -> np.ndarray:
        workspace, method = opened
        with contextlib.redirect_stdout(sys.stderr):
            return np.concatenate(list(document_blocks(method, job, workspace.index)))


def shared_document_scores(
    place: WorkspacePath, spec: str, queries: QuerySet, sharing: SharingOptions
) -> Iterator[np.ndarray]:
    """`document_scores` of a method, (D,) float64 for each query in order, by several processes.

    All that are forked on this machine share one fit; each task of Ray has its own, as has each process where
    the device is a GPU. A method that passes over the corpus for all queries of a call does so for each
    share: it gets as few of these as there are workers.

    Raises
    ------
    StrideError      what a worker raised, or a share over which workers died again and again
    """
    size = prompts_of_a_share(len(queries))
    if sharing.workers and shares_a_pass(spec):
        size = -(-len(queries) // sharing.workers)
    starts = range(0, len(queries), max(1, size))
    shares = (queries.take(range(start, min(start + size, len(queries)))) for start in starts)
    for block in shared_out(QueryScorer(place, spec), shares, sharing):
        yield from block


def shares_a_pass(spec: str) -> bool:
    """Whether all queries that a method is asked at once share passes over the corpus."""
    from stride_cli.research.methods.registry import METHODS

    entry = METHODS.get(spec.partition(":")[0])
    return entry is not None and bool(getattr(entry.load(), "shares_a_pass", False))


@dataclass
class MethodRunner(PlaceWorker):
    """Runs methods, each in a process of its own (`apart.run_apart`); a failure is an answer.

    Attributes
    ----------
    alpha, rows, source : as of `run_apart`
    """

    alpha: float
    rows: np.ndarray
    source: Path | None

    doing = "running a method"

    def prepare(self) -> None:
        """Nothing: all is opened where a method runs, so that its memory is its own."""

    def run(self, jobs: Sequence[str]) -> list[Run | StrideError]:
        from stride_cli.research.evaluation.apart import run_apart

        found: list[Run | StrideError] = []
        for spec in jobs:
            try:
                found.append(
                    run_apart(self.place, spec, alpha=self.alpha, rows=self.rows, source=self.source)
                )
            except StrideError as error:
                found.append(error.with_traceback(None))
        return found


class SharedRuns:
    """spec → Run of `apart.run_apart`, of methods that run at the same time; asked for in their order.

    Parameters
    ----------
    bench : Bench      its queries, and its subsets of one α
    specs : all of them
    sharing : SharingOptions
    """

    def __init__(self, bench: Bench, specs: Sequence[str], sharing: SharingOptions) -> None:
        alpha = float(bench.truth.alpha[0])
        runner = MethodRunner(bench.where, alpha=alpha, rows=bench.rows, source=bench.source)
        self._arriving: Any = shared_out(runner, specs, sharing)
        self._left = len(specs)
        self._broken: StrideError | None = None

    def __call__(self, spec: str) -> Run:
        """Raises what the method raised; StrideError where workers died over one again and again, and of all
        that were not done by then."""
        if self._broken is not None:
            raise self._broken
        try:
            found = next(self._arriving)
        except StrideError as error:
            self._broken = error
            raise
        self._left -= 1
        if not self._left:  # workers end now, and not when this is forgotten
            self._arriving.close()
        if isinstance(found, StrideError):
            raise found
        run: Run = found
        return run


@dataclass
class CauseScorer(PlaceWorker):
    """Ranks known causes by methods; see `CauseBench`, whose fields these are.

    What is found is kept as it is found: a worker that takes over from one that died goes on from there.
    """

    asked: Sequence[CauseQuery]
    sets: Mapping[str, QuerySet]
    ks: Sequence[int]
    with_scores: bool
    fresh: bool

    doing = "scoring"

    def do(self, opened: Workspace, job: str) -> CauseEntry:
        kept = KeptRanks(opened.index, fresh=self.fresh)
        bench = CauseBench(opened, self.asked, self.sets, kept, self.ks, with_scores=self.with_scores)
        entry = bench.run(job)
        return entry if self.with_scores else entry.without_scores()


def shared_causes(scorer: CauseScorer, specs: Sequence[str], sharing: SharingOptions) -> Iterator[CauseEntry]:
    """`CauseBench.run` of each method in order, several at the same time.

    Raises
    ------
    StrideError      workers died over one method again and again
    """
    found: Iterator[Any] = shared_out(scorer, specs, sharing)
    return found
