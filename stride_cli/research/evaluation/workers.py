"""Methods run by other processes: each apart, so that its memory is its own, or several at the same time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import SharingOptions
from stride_cli.attribution.sharing import prompts_of_a_share
from stride_cli.errors import StrideError
from stride_cli.operators.device_memory import resident_bytes
from stride_cli.parallel import Workers, available_cores, opened_once
from stride_cli.research.evaluation.bench import Bench
from stride_cli.research.evaluation.cause_scores import CauseBench, CauseEntry, KeptRanks
from stride_cli.research.evaluation.scoring import Run, document_blocks, failure, fitted_method, run_method

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.research.evaluation.cause_queries import CauseQuery
    from stride_cli.research.methods.protocol import Method


def _workers(work: Any, place: WorkspacePath, sharing: SharingOptions) -> Workers:
    """Open the workers that `sharing` asks for; one of them is this process, with all of its threads."""
    device = place.model.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    count = sharing.workers if sharing.shared else 1
    threads = 1 if sharing.shared else available_cores()
    return Workers(work, count, engine=sharing.engine, device=device, threads=threads)


# -------------------------------------------------------------------------------- methods, each run apart


class Runs:
    """spec → Run, of methods that each run in a process of their own, some at the same time.

    Parameters
    ----------
    bench : Bench      its queries, and its subsets of one α
    specs : all methods, in the order in which they will be asked for
    sharing : SharingOptions
    """

    def __init__(self, bench: Bench, specs: Sequence[str], sharing: SharingOptions) -> None:
        runner = _Runner(bench.where, float(bench.truth.alpha[0]), bench.rows, bench.source)
        self._workers = _workers(runner.run, bench.where, sharing)
        self._arriving, self._left = self._workers.in_order(specs), len(specs)
        self._broken: StrideError | None = None

    def __call__(self, spec: str) -> Run:
        """Give the next method's run; raise what it raised.

        Raises
        ------
        StrideError      also where workers died over a method again and again, then for all that follow
        """
        if self._broken is not None:
            raise self._broken
        try:
            found: Run | StrideError = next(self._arriving)
        except StrideError as error:
            self._broken = error
            self._workers.close()
            raise
        self._left -= 1
        if not self._left:
            self._workers.close()
        if isinstance(found, StrideError):
            raise found
        return found


@dataclass(frozen=True)
class _Runner:
    """Runs methods on queries of an index's truth.

    Attributes
    ----------
    place : WorkspacePath
    alpha : float               which subsets
    rows : (q,) int64           which of the truth's queries
    source : Path, optional     the file of queries: a classifier has to read it to know their inputs
    """

    place: WorkspacePath
    alpha: float
    rows: np.ndarray
    source: Path | None

    def run(self, spec: str) -> Run | StrideError:
        """Run a method in a process of its own; a failure is an answer."""
        import torch

        try:
            with Workers(self.measure, 1, apart=True, threads=torch.get_num_threads()) as worker:
                (found,) = worker.in_order([spec])
        except Exception as error:
            message, fix = failure(error)
            return StrideError(message, fix=fix)
        run: Run = found
        return run

    def measure(self, spec: str) -> Run:
        """Run a method in this process, and measure the memory that it takes."""
        bench = Bench(self.place, queries=self.source, alpha=self.alpha)
        if self.source is not None:
            assert len(bench.queries)  # read, for the model to know them
        truth, workspace = bench.truth, bench.workspace
        memory = _MemoryPeak()
        run = run_method(
            workspace,
            spec,
            truth.queries.take(self.rows),
            masks=truth.masks,
            truth_rows=bench.truth_rows,
            describe=True,
        )
        return memory.measured(run)


class _MemoryPeak:
    """Growth of this process's resident memory from here on, at its peak; and of CUDA memory."""

    def __init__(self) -> None:
        import gc

        import torch

        gc.collect()
        with contextlib.suppress(OSError):
            # Linux: 5 resets the high-water mark; ru_maxrss cannot be, and inherits the parent's over exec
            Path("/proc/self/clear_refs").write_text("5")
        self._start = resident_bytes()
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._device_start = torch.cuda.memory_allocated()

    def measured(self, run: Run) -> Run:
        """Add the memory that has been used since to a run."""
        import torch

        peak = resident_bytes("VmHWM")
        grown = None if peak is None or self._start is None else float(max(0, peak - self._start))
        device = float(torch.cuda.max_memory_allocated() - self._device_start) if self._cuda else None
        return replace(run, memory_bytes=grown, device_bytes=device)


# ------------------------------------------------------------------------------------ shares of the queries


@dataclass(frozen=True)
class _QueryScorer:
    """Scores documents by one method, fitted once in each worker, for shares of the queries."""

    place: WorkspacePath
    spec: str

    def score(self, queries: QuerySet) -> np.ndarray:
        """Score all documents: (q, D) float64."""
        workspace, method = opened_once((self.place, self.spec), self._open)
        with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
            return np.concatenate(list(document_blocks(method, queries, workspace.index)))

    def _open(self) -> tuple[Workspace, Method]:
        with contextlib.redirect_stdout(sys.stderr):
            workspace = self.place.open()
            return workspace, fitted_method(workspace, self.spec)


def shared_document_scores(
    place: WorkspacePath, spec: str, queries: QuerySet, sharing: SharingOptions
) -> Iterator[np.ndarray]:
    """Yield a method's scores of all documents, (D,) float64 for each query in order, by several processes.

    A method that passes over the corpus for all queries of a call does so for each share: it gets as few
    shares as there are workers.

    Raises
    ------
    StrideError      what a worker raised, or workers died over a share again and again
    """
    from stride_cli.research.methods.registry import METHODS

    size = prompts_of_a_share(len(queries))
    entry = METHODS.get(spec.partition(":")[0])
    if sharing.workers and entry is not None and getattr(entry.load(), "shares_a_pass", False):
        size = -(-len(queries) // sharing.workers)
    starts = range(0, len(queries), max(1, size))
    shares = (queries.take(range(start, min(start + size, len(queries)))) for start in starts)
    with _workers(_QueryScorer(place, spec).score, place, sharing) as workers:
        for block in workers.in_order(shares):
            yield from block


@dataclass(frozen=True)
class CauseScorer:
    """Ranks known causes by methods; see `CauseBench`, whose parameters these are.

    What is found is kept at once: a worker that takes over from one that died goes on from there.
    """

    place: WorkspacePath
    asked: Sequence[CauseQuery]
    sets: Mapping[str, QuerySet]
    ks: Sequence[int]
    with_scores: bool
    fresh: bool

    def run(self, spec: str) -> CauseEntry:
        opened = opened_once(self.place, self.place.open)
        kept = KeptRanks(opened, fresh=self.fresh)
        bench = CauseBench(opened, self.asked, self.sets, kept, self.ks, with_scores=self.with_scores)
        entry = bench.run(spec)
        return entry if self.with_scores else entry.without_scores()


def shared_causes(scorer: CauseScorer, specs: Sequence[str], sharing: SharingOptions) -> Iterator[CauseEntry]:
    """Yield `CauseBench.run` of each method in order, several at the same time.

    Raises
    ------
    StrideError      workers died over one method again and again
    """
    with _workers(scorer.run, scorer.place, sharing) as workers:
        yield from workers.in_order(specs)
