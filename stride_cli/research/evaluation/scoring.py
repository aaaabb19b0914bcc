"""Run one method: blocks of scores pass through, sums over subsets and a few numbers remain."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.errors import IndexFormatError
from stride_cli.errors import NumericalError, StrideError, UsageError, first_line
from stride_cli.research.evaluation.distribution import Distribution, DistributionCounter
from stride_cli.research.evaluation.metrics import predicted_response
from stride_cli.research.evaluation.ranking import document_scores

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.methods.protocol import Method


@dataclass(frozen=True)
class Run:
    """Sums and shares that remain of a method's scores.

    Attributes
    ----------
    predicted : (Q, R) float64             sums over the subsets; R = 0 without subsets
    distribution : Distribution, optional
    fit_seconds, score_seconds : float     of `Method.fit`, and of all queries together
    bytes_per_chunk : float                what the method keeps for later queries
    memory_bytes : float, optional         growth of the resident memory over fit and score, at its peak; only
                                           measured in a process of its own
    device_bytes : float, optional         peak of CUDA memory above what the model takes
    held_out : (R,) bool, optional         where the method was fitted on some of the subsets: the others,
                                           which alone may judge it
    """

    predicted: np.ndarray
    distribution: Distribution | None
    fit_seconds: float
    score_seconds: float
    bytes_per_chunk: float
    memory_bytes: float | None = None
    device_bytes: float | None = None
    held_out: np.ndarray | None = None


def failure(error: Exception) -> tuple[str, str | None]:
    """Give the message and the remedy of an exception; a method's library may raise anything."""
    if isinstance(error, StrideError | IndexFormatError):
        return error.message, error.fix
    return f"{type(error).__name__}: {first_line(error)}", None


def fitted_method(workspace: Workspace, spec: str) -> Method:
    """Open a method and fit it."""
    from stride_cli.research.methods.registry import open_method

    method = open_method(spec)
    method.fit(workspace)
    return method


def run_method(
    workspace: Workspace,
    spec: str,
    queries: QuerySet,
    *,
    masks: np.ndarray | None = None,
    truth_rows: np.ndarray | None = None,
    describe: bool = False,
) -> Run:
    """Fit a method and score the queries, block after block.

    Parameters
    ----------
    spec : str                            as `stride_cli.research.methods.registry.open_method` takes it
    masks : (R, n) bool, optional         subsets to predict the responses of
    truth_rows : (R,) int64, optional     where these subsets stand in the index's truth, every α included
    describe : bool                       also look at how the scores are spread

    Raises
    ------
    UsageError, MissingExtraError         the method does not exist, or not here, or not for this workspace
    NumericalError                        a score is not finite
    """
    predicted, aside = [], 0.0
    with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
        started = time.perf_counter()
        method = fitted_method(workspace, spec)
        fitted = time.perf_counter()
        counter = DistributionCounter() if describe else None
        for block in score_blocks(method, queries, workspace.n_chunks):
            paused = time.perf_counter()
            if masks is not None:
                predicted.append(predicted_response(block, masks))
            if counter is not None:
                counter.add(block)
            aside += time.perf_counter() - paused
        ended = time.perf_counter()
    used = getattr(method, "used_truth_rows", None)
    return Run(
        predicted=np.concatenate(predicted) if predicted else np.zeros((len(queries), 0)),
        distribution=counter.result() if counter is not None else None,
        fit_seconds=fitted - started,
        score_seconds=ended - fitted - aside,
        bytes_per_chunk=float(method.bytes_per_chunk),
        held_out=None if used is None or truth_rows is None else ~np.asarray(used, bool)[truth_rows],
    )


def score_blocks(method: Method, queries: QuerySet, n_chunks: int) -> Iterator[np.ndarray]:
    """Yield the blocks of `Method.score`, (q, n), Q rows in all, with their shapes checked.

    Raises
    ------
    NumericalError      a score is not finite
    """
    rows = 0
    for block in method.score(queries):
        rows += len(block)
        yield checked_block(method, block, n_chunks)
    if rows != len(queries):
        raise ValueError(f"{method.name} scored {rows} queries, expected {len(queries)}")


def document_blocks(method: Method, queries: QuerySet, index: Index) -> Iterator[np.ndarray]:
    """Yield scores of documents, the sums over their chunks: (q, D) float64, Q rows in all."""
    owner = np.asarray(index.array("corpus/chunk_document"))
    for block in score_blocks(method, queries, index.n_chunks):
        yield document_scores(block, owner, index.n_documents)


def checked_block(method: Method, block: np.ndarray, n_chunks: int) -> np.ndarray:
    """Check a block of scores, (q, n).

    Raises
    ------
    NumericalError      a score is not finite
    """
    if block.ndim != 2 or block.shape[1] != n_chunks:
        raise ValueError(f"{method.name} gave scores of shape {block.shape}, expected (q, {n_chunks})")
    if not np.isfinite(block).all():
        raise NumericalError(f"{method.name}: a score is not finite", fix="run it with --dtype fp32")
    return block


class ScoreFile:
    """All scores of a run, written block after block; they appear when they are whole.

    A .npy file has the scores of chunks, (Q, n) float32. A directory has those of documents, as bergson 2.5
    judges them: below zero where a document supports a query, ``scores.bin`` a row a document, each score
    with a byte that says that it was written, ``info.json`` the layout.

    Parameters
    ----------
    path : Path, optional      .npy, or a directory; None: nothing is written
    shape : (Q, n)
    n_documents : D
    """

    def __init__(self, path: Path | None, shape: tuple[int, int], n_documents: int) -> None:
        self._path = path
        self._array: np.memmap | None = None
        if path is None:
            return
        if path.suffix not in (".npy", ""):
            raise UsageError(
                f"--scores is '{path}' (expected a .npy file, or a directory)",
                fix="for example --scores scores.npy",
            )
        if not path.resolve().parent.is_dir():
            raise UsageError(f"there is no directory '{path.parent}'", fix="make it, or give another path")
        if not path.suffix and path.exists():
            raise UsageError(f"there is something at '{path}'", fix="remove it, or give another path")
        self._partial = path.with_name(path.name + ".partial")
        if path.suffix:
            self._array = np.lib.format.open_memmap(self._partial, mode="w+", dtype=np.float32, shape=shape)
            return
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()
        names = [f"{part}_{query}" for query in range(shape[0]) for part in ("score", "written")]
        layout: Any = {"names": names, "formats": ["float32", "bool"] * shape[0], "itemsize": 8 * shape[0]}
        layout["offsets"] = [8 * (place // 2) + 4 * (place % 2) for place in range(2 * shape[0])]
        info = {"attribute_tokens": False, "num_items": n_documents, "num_rows": n_documents}
        info |= {"num_scores": shape[0], "dtype": layout}
        (self._partial / "info.json").write_text(json.dumps(info) + "\n", encoding="utf-8")
        self._array = np.memmap(
            self._partial / "scores.bin", dtype=np.dtype(layout), mode="w+", shape=(n_documents,)
        )

    def write(self, row: int, block: np.ndarray, documents: np.ndarray) -> None:
        """Put the scores of queries from `row` on: of chunks (q, n), or of documents (q, D)."""
        if self._array is None:
            return
        if self._array.dtype.names is None:
            self._array[row : row + len(block)] = block
            return
        for query, values in enumerate(documents, start=row):
            self._array[f"score_{query}"], self._array[f"written_{query}"] = -values, True

    def __enter__(self) -> ScoreFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._array is None or self._path is None:
            return
        self._array.flush()
        self._array = None
        if kind is None:
            self._partial.replace(self._path)
        elif self._partial.is_dir():
            shutil.rmtree(self._partial)
        else:
            self._partial.unlink()
