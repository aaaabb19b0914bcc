"""Index, truth, queries and, when needed, the model: what a command of `stride evaluate` works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from index_format.errors import StageMissing
from index_format.location import local_directory
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import UsageError
from stride_cli.output import note
from stride_cli.research.evaluation.compare import Ground

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.compare import Entry
    from stride_cli.research.evaluation.scoring import Run
    from stride_cli.research.training.options import TruthOptions
    from stride_cli.research.training.truth import Truth

_TRUTH = "stride evaluate truth --index {} --queries FILE"


class Bench:
    """An index with its truth and queries; each part is read when it is first asked for.

    Parameters
    ----------
    queries : Path, optional      the file of queries; default: those that the truth was measured on
    alpha : float, optional       which subsets of the truth
    chat : bool, optional         how prompts of the file are put to the model, see `queries.form_of`

    Raises
    ------
    UsageError      `chat` without a file
    """

    def __init__(
        self,
        where: WorkspacePath,
        *,
        queries: Path | None = None,
        alpha: float | None = None,
        chat: bool | None = None,
    ) -> None:
        if chat is not None and queries is None:
            raise UsageError(
                "--chat says how prompts of a file are put, and the truth's queries are in tokens already",
                fix="give --queries FILE, or leave --chat and --no-chat out",
            )
        self.where, self.source = where, queries
        self._alpha, self._chat = alpha, chat

    @cached_property
    def workspace(self) -> Workspace:
        """The index with its model."""
        return self.where.open()

    @cached_property
    def index(self) -> Index:
        from index_format.reader import Index

        return Index.open(self.where.index)

    @cached_property
    def truth(self) -> Truth:
        """The retrained subsets, all of one α; see `truth_rows`."""
        return self._whole_truth.take(self.truth_rows)

    @cached_property
    def _whole_truth(self) -> Truth:
        """Every α.

        Raises
        ------
        StageMissing      nothing has been retrained
        """
        from stride_cli.research.training.truth import Truth

        try:
            return Truth.from_index(self.index)
        except StageMissing as error:
            raise StageMissing(error.message, fix=_TRUTH.format(self.where.index)) from error

    @cached_property
    def truth_rows(self) -> np.ndarray:
        """Subsets of the index's truth of one α, (R,) int64: the given one, or that of most subsets.

        Raises
        ------
        StageMissing      none of this α
        """
        there = np.round(self._whole_truth.alpha, 3)
        sizes, counts = np.unique(there, return_counts=True)
        listed = ", ".join(f"{value:g}" for value in sizes)
        wanted = float(sizes[counts.argmax()]) if self._alpha is None else round(self._alpha, 3)
        if self._alpha is None and len(sizes) > 1:
            note(f"subsets of α = {listed} were retrained; comparing on α = {wanted:g} (choose with --alpha)")
        rows = np.flatnonzero(there == wanted)
        if len(rows) == 0:
            raise StageMissing(
                f"index {self.where.index} has retrained subsets of α = {listed}, none of {self._alpha:g}",
                fix=f"{_TRUTH.format(self.where.index)} --alpha {self._alpha:g}",
            )
        return rows

    @cached_property
    def queries(self) -> QuerySet:
        """The queries of the file, or the truth's.

        Raises
        ------
        UsageError      neither is there
        """
        if self.source is not None:
            return read_queries(self.workspace, self.source, chat=self._chat)
        if not self.index.has("truth"):
            raise UsageError(
                f"no queries are given, and index {self.where.index} has none of its own",
                fix='give --queries FILE, one object a line: {"id": …, "text": …}',
            )
        return self.truth.queries

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of the queries among the truth's, (Q,) int64.

        Raises
        ------
        QueryError      a query of the file was not measured
        """
        if self.source is None:
            return np.arange(len(self.truth.queries))
        from stride_cli.research.training.truth import match_queries

        return match_queries(self.queries, self.truth.queries)

    def ground(self, response: str = "loss") -> Ground:
        """Collect the measured responses of the queries; warn on stderr of few subsets."""
        truth, rows = self.truth, self.rows
        margins = None if truth.margins is None else truth.margins[:, :, rows]
        ground = Ground.of(
            truth.losses[:, :, rows],
            margins,
            alpha=float(truth.alpha[0]) if len(truth.alpha) else 0.0,
            response=response,
            seed=self.index.seed,
            own_seed=truth.own_seed,
        )
        for warning in ground.warnings:
            note(f"warning: {warning}")
        return ground

    def lds(
        self,
        specs: Sequence[str],
        *,
        response: str = "loss",
        draws: int = 1000,
        run: Callable[[str], Run] | None = None,
    ) -> Iterator[tuple[Entry, Ground]]:
        """Compare methods with the truth, in order; see `compare_methods`.

        Parameters
        ----------
        run : spec → Run; default: in this process
        """
        from stride_cli.research.evaluation.compare import compare_methods

        ground = self.ground(response)
        run = run or self._run
        for entry in compare_methods(list(specs), ground, run, draws=draws, seed=self.index.seed):
            yield entry, ground

    def _run(self, spec: str) -> Run:
        from stride_cli.research.evaluation.scoring import run_method

        truth = self.truth
        chosen = truth.queries.take(self.rows)
        return run_method(self.workspace, spec, chosen, masks=truth.masks, truth_rows=self.truth_rows)


def build_truth_of(
    where: WorkspacePath, path: Path, options: TruthOptions, *, chat: bool | None = None
) -> tuple[Workspace, QuerySet, Truth]:
    """Build the truth of a file of queries, training what is missing.

    Returns
    -------
    workspace, queries, truth of every α
    """
    from stride_cli.research.training.truth import build_truth

    local_directory(where.index)  # refused before a model is opened
    workspace = where.open()
    queries = read_queries(workspace, path, chat=chat)
    return workspace, queries, build_truth(workspace, queries, options)


def split_methods(given: str) -> list[str]:
    """Split a list ``a,b:key=value,key=value,c``: a comma before ``key=`` goes on with the method before.

    Raises
    ------
    UsageError      an unknown method, one given twice, or none
    """
    specs: list[str] = []
    for part in (piece.strip() for piece in given.split(",")):
        option = "=" in part and ":" not in part.partition("=")[0]
        if option and specs:
            specs[-1] += f",{part}"
        elif part:
            specs.append(part)
    if not specs:
        raise UsageError("no method is given", fix="for example --methods stride,tfidf,chance")
    for spec in specs:
        check_method(spec)
        if specs.count(spec) > 1:
            raise UsageError(f"method '{spec}' is given twice", fix="give each method once")
    return specs


def check_method(spec: str) -> None:
    """Raise UsageError, with the known methods, for a name that is not one."""
    from stride_cli.research.methods.registry import METHODS, open_method

    if spec.partition(":")[0] not in METHODS:
        open_method(spec)
