"""Import truths that others have measured: models retrained on subsets, or their losses.

- ``stride-lds``: JSON Lines, a retrained model a line: ``{"train_subset": [rows of the run's own training
  set], "train_subset_global": [the same documents, as rows of the whole corpus], "test_loss": [a loss a
  query]}``. A line with ``_meta`` is a header.
- A bank, the directory that ``bergson validate --save_models true`` writes: ``subsets.json`` lists the
  documents that each model was trained without, ``retrained/subset_0``, ``_1`` … are the models.

Rows count documents from 0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import local_directory
from stride_cli.characters import shortened
from stride_cli.corpus.readers import read_records
from stride_cli.data.query_files import read_queries
from stride_cli.errors import CorpusError, QueryError, UsageError, first_line
from stride_cli.models.kinds import refuse_classifier
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.research.training.truth import Truth

_LINE = (
    'one object a line: {"train_subset": [0, 3, …], "train_subset_global": [12, 90, …], '
    '"test_loss": [2.31, …]}'
)
_FIELDS = {"corpus": "train_subset_global", "pool": "train_subset"}
_OTHERS = {"corpus": "pool", "pool": "corpus"}
_MEANING = {
    "corpus": "the index is of the run's own training set, not of the whole corpus",
    "pool": "the index is of the whole corpus, not of the run's own training set",
}
_BANK = "give a directory that bergson validate --save_models true wrote, with every model of it"
_LARGEST = 1e300  # JSON has whole numbers of any length


@dataclass(frozen=True, eq=False)
class MeasuredSubsets:
    """Subsets of a file or a bank, and their losses.

    Attributes
    ----------
    documents : list of (m_r,) int64   documents of subset r, by number, ascending
    losses : (R, S, Q) float64         of the S models trained on it
    share : float                      mean size of a subset, as a share of all documents that any has
    """

    documents: list[np.ndarray]
    losses: np.ndarray
    share: float


def read_subsets(path: str | Path, n_documents: int, *, rows: str = "corpus") -> MeasuredSubsets:
    """Read the subsets and losses of a file.

    Parameters
    ----------
    n_documents : of the index
    rows : "corpus": the index is of the whole corpus (``train_subset_global``); "pool": of the documents that
        the run drew its subsets from (``train_subset``)

    Raises
    ------
    UsageError       there is no such file
    CorpusError      with file and line: a field that is missing or of another kind; rows that are none,
                     twice, out of range, or not those that an earlier line names; losses that are not finite,
                     or of another number of queries; no subset at all, or none that leaves a document out
    """
    if not Path(path).is_file():
        raise UsageError(f"there is no file '{path}'", fix="give the path of a file of retrained losses")
    lines = _Lines(n_documents, rows)
    for number, record in read_records(str(path)):
        if "_meta" not in record or "test_loss" in record:
            lines.add(record, f"{path}:{number}")
    if not lines.losses:
        raise CorpusError(f"{path}: there is no retrained model in it", fix=_LINE)
    subsets = [np.frombuffer(key, np.int64) for key in lines.losses]
    pool = len(np.unique(np.concatenate(subsets)))
    if min(map(len, subsets)) == pool:
        raise CorpusError(
            f"{path}: every subset has all {pool:,} documents: there is nothing to tell apart",
            fix="give losses of models trained on different subsets",
        )
    few, most = (by(lines.losses.items(), key=lambda item: len(item[1])) for by in (min, max))
    if len(few[1]) < len(most[1]):
        raise CorpusError(
            f"{lines.first[few[0]]}: its subset has {len(few[1])} retrained models, another has "
            f"{len(most[1])}",
            fix="leave the surplus lines out: every subset needs as many models",
        )
    losses = np.array(list(lines.losses.values()), np.float64)
    return MeasuredSubsets(subsets, losses, float(np.mean([len(each) for each in subsets])) / pool)


class _Lines:
    """Losses of every subset, by its documents' numbers, as the lines of a file are read."""

    def __init__(self, n_documents: int, rows: str) -> None:
        self.n_documents, self.rows = n_documents, rows
        self.losses: dict[bytes, list[np.ndarray]] = {}
        self.first: dict[bytes, str] = {}  # where a subset stands first
        self._places = np.full(n_documents, -1, np.int64)  # row of the corpus of every row of the pool
        self._queries: tuple[int, str] | None = None

    def add(self, record: Mapping[str, Any], where: str) -> None:
        """Take in one line; CorpusError with `where`."""
        losses = _losses(record, where)
        count, before = self._queries = self._queries or (len(losses), where)
        if count != len(losses):
            raise CorpusError(
                f"{where}: 'test_loss' has {len(losses):,} losses, that of {before} {count:,}",
                fix="every line needs a loss of the same queries, in the same order",
            )
        both = {name: _rows(record, name, where) for name in _FIELDS.values() if name in record}
        other = _OTHERS[self.rows]
        chosen = both.get(_FIELDS[self.rows])
        if chosen is None:
            more = f"; or read the other rows with --rows {other}" if _FIELDS[other] in both else ""
            raise CorpusError(
                f"{where}: '{_FIELDS[self.rows]}' is missing (expected rows of documents)", fix=_LINE + more
            )
        if chosen.max() >= self.n_documents:
            theirs = both.get(_FIELDS[other])
            fits = theirs is not None and theirs.max() < self.n_documents
            raise _out_of_range(
                where,
                _FIELDS[self.rows],
                chosen,
                self.n_documents,
                fix=f"if {_MEANING[self.rows]}: --rows {other}"
                if fits
                else "give the index of the corpus that these models were trained on, with every document "
                "of it",
            )
        if len(both) == 2:
            self._check_places(both["train_subset"], both["train_subset_global"], where)
        key = np.sort(chosen).tobytes()
        self.losses.setdefault(key, []).append(losses)
        self.first.setdefault(key, where)

    def _check_places(self, local: np.ndarray, whole: np.ndarray, where: str) -> None:
        """Check that both kinds of rows name the same documents, as in all lines before."""
        if len(local) != len(whole):
            raise CorpusError(
                f"{where}: 'train_subset' has {len(local):,} rows, 'train_subset_global' {len(whole):,}",
                fix="both name the same documents, in the same order",
            )
        if local.max() >= self.n_documents:
            fix = "give the index of the corpus that these models were trained on"
            raise _out_of_range(where, "train_subset", local, self.n_documents, fix)
        before = self._places[local]
        wrong = np.flatnonzero((before >= 0) & (before != whole))
        if len(wrong):
            row = int(wrong[0])
            raise CorpusError(
                f"{where}: row {local[row]:,} of 'train_subset' is row {whole[row]:,} of the corpus, and in "
                f"a line before it is row {before[row]:,}",
                fix="give lines of one run: all draw from the same training set",
            )
        self._places[local] = whole


def _out_of_range(where: str, field: str, rows: np.ndarray, n_documents: int, fix: str) -> CorpusError:
    return CorpusError(
        f"{where}: '{field}' has row {rows.max():,}, and the index has {n_documents:,} documents "
        "(rows count from 0)",
        fix=fix,
    )


def read_bank(folder: Path, n_documents: int) -> list[np.ndarray]:
    """Read which documents each model of a bank was trained on, (m_r,) int64 ascending.

    Raises
    ------
    CorpusError      no list of lists of rows in ``subsets.json``; a row that the index has not; a model that
                     is not there, or in whose training left-out documents still counted
    """
    listed = folder / "subsets.json"
    try:
        left_out = dict(enumerate(json.loads(listed.read_bytes())))
        settings = (folder / "config.yaml").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise CorpusError(f"{listed}: expected a bank's, found: {first_line(error)}", fix=_BANK) from None
    if weights := {each for each in re.findall(r"subset_weight: (\S+)", settings) if float(each)}:
        raise CorpusError(
            f"{folder}: left-out documents were trained on with the weight {weights.pop()} (expected 0)",
            fix="make the bank with --subset_weight 0",
        )
    documents = []
    for number in left_out:
        rows = _rows(left_out, number, str(listed), fix=_BANK)
        if rows.max() >= n_documents:
            raise _out_of_range(str(listed), f"{number}", rows, n_documents, "give the index of its corpus")
        if not (model := folder / f"retrained/subset_{number}").is_dir():
            raise CorpusError(f"{model}: there is no such model in the bank", fix=_BANK)
        documents.append(np.delete(np.arange(n_documents), rows))
    return documents


def bank_losses(workspace: Workspace, folder: Path, n_subsets: int, queries: QuerySet) -> np.ndarray:
    """Measure the queries under every model of a bank, (R, 1, Q) float64."""
    from stride_cli.research.methods.gradients.passes import load_checkpoint
    from stride_cli.training.language_trainer import query_losses

    losses = []
    with progress("bank", n_subsets, unit="models") as bar:
        for number in range(n_subsets):
            model = load_checkpoint(workspace, folder / f"retrained/subset_{number}")
            losses.append(query_losses(model, queries))
            bar.advance()
    return np.array(losses)[:, None]


def _rows(record: Mapping[Any, Any], name: Any, where: str, *, fix: str = _LINE) -> np.ndarray:
    """Read the row numbers of one field, (m,) int64."""
    given = record[name]
    if not isinstance(given, list) or not given:
        found = "an empty list" if given == [] else shortened(repr(given), 40)
        raise CorpusError(f"{where}: '{name}' is {found} (expected a list of row numbers)", fix=fix)
    for value in given:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise CorpusError(
                f"{where}: '{name}' has {shortened(repr(value), 40)} (expected whole numbers from 0)",
                fix=fix,
            )
    rows = np.array(given, np.int64)
    values, counts = np.unique(rows, return_counts=True)
    if len(values) < len(rows):
        raise CorpusError(
            f"{where}: '{name}' has row {values[counts > 1][0]:,} twice", fix="name every row once"
        )
    return rows


def _losses(record: Mapping[str, Any], where: str) -> np.ndarray:
    """Read the losses of one line, (Q,) float64."""
    given = record.get("test_loss")
    if not isinstance(given, list) or not given:
        found = "is missing" if "test_loss" not in record else f"is {shortened(repr(given), 40)}"
        raise CorpusError(
            f"{where}: 'test_loss' {found} (expected a list of losses, one of every query)", fix=_LINE
        )
    for position, value in enumerate(given):
        if type(value) not in (int, float) or not abs(value) < _LARGEST:
            raise CorpusError(
                f"{where}: loss {position} of 'test_loss' is {shortened(repr(value), 40)} (expected a finite "
                "number)",
                fix="leave the model out whose training diverged, or this query of every line",
            )
    return np.array(given, np.float64)


def import_truth(
    where: WorkspacePath,
    path: str | Path,
    queries: str | Path,
    *,
    rows: str = "corpus",
    overwrite: bool = False,
    chat: bool | None = None,
) -> tuple[Workspace, QuerySet, Truth]:
    """Make a file of retrained losses, or a bank of retrained models, the truth of an index.

    Parameters
    ----------
    path, rows : see `read_subsets`; or the directory of a bank
    queries : file of the queries, of ``test_loss`` in its order; where they have no ids, they are numbered
    overwrite : replace another truth
    chat : how prompts are put to the model, see `queries.form_of`

    Returns
    -------
    Workspace, QuerySet, Truth

    Raises
    ------
    QueryError       another number of queries than of losses
    UsageError       the index has another truth; a classifier's index
    IndexReadOnly    an index that is read over the network, or from a zip
    and what `read_subsets`, `read_bank`, `load_checkpoint` and `read_queries` raise
    """
    from index_format.reader import Index
    from stride_cli.research.training.truth import Truth, base_losses, store_truth

    local_directory(where.index)  # refused before a model is opened
    index = Index.open(where.index)
    refuse_classifier(index, "these rows are of documents")
    bank, n = Path(path), index.n_documents
    known = None if bank.is_dir() else read_subsets(path, n, rows=rows)
    kept = read_bank(bank, n) if known is None else known.documents
    workspace = where.open()
    asked = read_queries(workspace, queries, number_ids=not _has_ids(queries), chat=chat)
    measured = known or MeasuredSubsets(
        kept, bank_losses(workspace, bank, len(kept), asked), float(np.mean([len(each) for each in kept])) / n
    )
    n_subsets, n_seeds, n_queries = measured.losses.shape
    if len(asked) != n_queries:
        raise QueryError(
            f"{queries} has {len(asked):,} queries, and the lines of {path} have losses of {n_queries:,}",
            fix="give the queries whose losses these are, in their order",
        )
    owner = np.asarray(index.array("corpus/chunk_document"))
    masks = np.stack([np.isin(owner, documents) for documents in measured.documents])
    digest = hashlib.sha256(np.packbits(masks, axis=1).tobytes() + measured.losses.tobytes()).hexdigest()
    trainer = f"imported {digest}"
    if index.has("truth") and not overwrite:
        old = Truth.from_index(index)
        if old.trainer != trainer or old.queries.fingerprint() != asked.fingerprint():
            raise UsageError(
                f"index {index.path} has another truth, of {old.n_subsets:,} subsets and "
                f"{len(old.queries):,} queries",
                fix="replace it with --overwrite, or import into a copy of the index",
            )
        return workspace, asked, old
    share = min(max(round(measured.share, 3), 0.001), 0.999)
    truth = Truth(
        masks=masks,
        alpha=np.full(n_subsets, share),
        losses=measured.losses,
        margins=None,
        base_losses=base_losses(workspace, asked),
        queries=asked,
        seeds=np.arange(n_seeds, dtype=np.int64),
        trainer=trainer,
    )
    store_truth(workspace, truth)
    return workspace, asked, truth


def _has_ids(path: str | Path) -> bool:
    """Tell whether the first query of a file of JSON Lines has an id."""
    names: Sequence[str] = Path(path).suffixes
    if not Path(path).is_file() or ".parquet" in names:
        return True
    return next(("id" in record for _, record in read_records(str(path))), True)
