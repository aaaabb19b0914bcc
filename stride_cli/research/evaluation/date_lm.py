"""Read sets of DATE-LM (Jiao et al. 2025, arXiv:2507.09424): two splits of prompts with responses.

``train`` is what the model was fine-tuned on, ``ref`` the queries. Fields tell which task a set is of:

- Counterfact: causes share a query's ``counterfactual_entity`` and ``true_entity``;
- ftrace: causes have the query's first fact among their ``facts``;
- Toxicity/Bias-Filtering: causes have the ``type`` Unsafe, the same for all queries.

Documents and queries are called by their rows, from 0.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_format.durable import make_directory, replace_file
from stride_cli.characters import shortened
from stride_cli.corpus.readers import read_records
from stride_cli.errors import CorpusError, UsageError, first_line, required

TASKS = ("counterfact", "ftrace", "toxicity")
_ENTITIES = ("counterfactual_entity", "true_entity")
_UNSAFE = "Unsafe"
_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_NO_ROWS = {"state.json", "dataset_info.json", "dataset_dict.json"}  # beside the rows that `datasets` saves
_FIX = (
    "give a directory with the splits train and ref: train.jsonl and ref.jsonl, or .parquet, or what "
    "datasets' save_to_disk wrote"
)


@dataclass(frozen=True)
class DateLm:
    """A set, as `stride evaluate causes` takes it.

    Attributes
    ----------
    task : one of TASKS
    train, queries : files of JSON Lines
    n_train, n_ref : rows of the splits; those of `ref` that no training row caused are not among the queries
    n_queries : that are
    """

    task: str
    train: Path
    queries: Path
    n_train: int
    n_ref: int
    n_queries: int

    @property
    def one_list(self) -> bool:
        """Tell whether its scores are one list over the training rows, the mean over all queries."""
        return self.task == "toxicity"


def convert(folder: str | Path, out: Path) -> DateLm:
    """Write a set as a corpus and queries with known causes: ``train.jsonl`` and ``queries.jsonl`` in `out`.

    Files that hold the same already stay as they are.

    Raises
    ------
    UsageError             there is no such directory, or no split in it
    CorpusError            with file and row: a row that cannot be read or lacks a field; fields of no task;
                           no query that any row caused
    MissingExtraError      Parquet or Arrow files without pyarrow
    """
    folder = Path(folder)
    train, ref = list(_read(folder, "train")), list(_read(folder, "ref"))
    task = _task(train[0], ref[0])
    causes = _CAUSES[task](train)
    documents = [{"id": str(row), **_texts(record, where)} for row, (where, record) in enumerate(train)]
    queries = []
    for row, (where, record) in enumerate(ref):
        found = causes(where, record)
        if len(found) == len(train):
            raise CorpusError(
                f"{where}: all {len(train):,} rows of train are its causes: nothing is left to tell them "
                "from",
                fix="give the whole train split",
            )
        if found:
            queries.append({"id": str(row), **_texts(record, where), "causes": [str(each) for each in found]})
    if not queries:
        raise CorpusError(
            f"{folder}: no row of ref has a cause in train ({_RULES[task]})",
            fix="give both splits of the same subset",
        )
    make_directory(out)
    for name, rows in (("train", documents), ("queries", queries)):
        path = out / f"{name}.jsonl"
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        if not path.is_file() or path.read_bytes() != data:
            replace_file(path, data)
    return DateLm(task, out / "train.jsonl", out / "queries.jsonl", len(train), len(ref), len(queries))


def _texts(record: Mapping[str, Any], where: str) -> dict[str, str]:
    return {name: _text(record, name, where) for name in ("prompt", "response")}


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if name not in record else f"is {shortened(repr(value), 40)}"
        raise CorpusError(
            f"{where}: '{name}' {what} (expected some text)", fix="every row of DATE-LM has it: copy it again"
        )
    return value


# ---------------------------------------------------------------------------------------------------- causes


def _task(train: tuple[str, Mapping[str, Any]], ref: tuple[str, Mapping[str, Any]]) -> str:
    """Tell the task of both splits by their first rows."""
    both = train[1].keys() & ref[1].keys()
    if both >= set(_ENTITIES):
        return "counterfact"
    if "facts" in both:
        return "ftrace"
    if "type" in train[1]:
        return "toxicity"
    raise CorpusError(
        f"{train[0]}: expected counterfactual_entity and true_entity (Counterfact), facts (ftrace), in both "
        f"splits, or type (Toxicity/Bias-Filtering); found {', '.join(sorted(train[1])) or 'no field'}",
        fix="give a set of DATE-LM; or name causes by ids yourself (--train, --queries)",
    )


_Rows = list[tuple[str, Mapping[str, Any]]]
_Causes = Callable[[str, Mapping[str, Any]], list[int]]


def _by_entities(train: _Rows) -> _Causes:
    def pair(where: str, record: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(_text(record, name, where) for name in _ENTITIES)

    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, (where, record) in enumerate(train):
        rows[pair(where, record)].append(row)
    return lambda where, record: rows.get(pair(where, record), [])


def _by_facts(train: _Rows) -> _Causes:
    def facts(where: str, record: Mapping[str, Any]) -> list[str]:
        given = record.get("facts")
        if not isinstance(given, list) or not all(isinstance(fact, str) for fact in given):
            raise CorpusError(
                f"{where}: 'facts' is {shortened(repr(given), 40)} (expected a list of facts)",
                fix="every row of ftrace has one: copy it again",
            )
        return given

    rows: dict[str, list[int]] = defaultdict(list)
    for row, (where, record) in enumerate(train):
        for fact in dict.fromkeys(facts(where, record)):
            rows[fact].append(row)
    return lambda where, record: [row for fact in facts(where, record)[:1] for row in rows.get(fact, [])]


def _by_type(train: _Rows) -> _Causes:
    unsafe = [row for row, (where, record) in enumerate(train) if _text(record, "type", where) == _UNSAFE]
    return lambda where, record: unsafe


_CAUSES = {"counterfact": _by_entities, "ftrace": _by_facts, "toxicity": _by_type}
_RULES = {
    "counterfact": "the same counterfactual_entity and true_entity",
    "ftrace": "its first fact among a row's facts",
    "toxicity": f"type {_UNSAFE}",
}


# --------------------------------------------------------------------------------------------------- reading


def _read(folder: Path, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a split, each with its file and row for people."""
    files = _files(folder, split)
    some = False
    for file in files:
        for where, record in _READERS[_kind(file)](file):
            some = True
            yield where, record
    if not some:
        raise CorpusError(f"{files[0]}: there is no row in it", fix="copy the set again")


def _files(folder: Path, split: str) -> list[Path]:
    """Find the files of a split, by name: in its own directory, or called after it."""
    if not folder.is_dir():
        raise UsageError(f"there is no directory '{folder}'", fix=_FIX)
    for place in (folder / split, folder, folder / "data"):
        if not place.is_dir():
            continue
        own = place == folder / split
        files = sorted(
            file
            for file in place.iterdir()
            if file.is_file()
            and _kind(file)
            and file.name not in _NO_ROWS
            and (own or re.fullmatch(rf"{split}[-.].*", file.name))
        )
        if len({_kind(file) for file in files}) > 1:
            raise UsageError(
                f"'{place}' has the split {split} twice: {files[0].name}, {files[-1].name}",
                fix="leave one of them there",
            )
        if files:
            return files
    subsets = sorted(
        each.name
        for each in folder.iterdir()
        if each.is_dir() and (any(each.glob(f"{split}[-.]*")) or (each / split).is_dir())
    )
    raise UsageError(
        f"'{folder}' has no split {split}",
        fix=f"name one of its subsets: {folder / subsets[0]}" if subsets else _FIX,
    )


def _kind(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in (".gz", ".zst")]
    return _KINDS.get(suffixes[-1] if suffixes else "", "")


def _jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for line, record in read_records(str(file)):
        yield f"{file}:{line}", record


def _table(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read Parquet, or the stream of Arrow that `datasets` saves; damage is a CorpusError."""
    pyarrow, _, _ = (required(name, "parquet") for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))
    kind = _kind(file).capitalize()
    try:
        found = (
            pyarrow.parquet.read_table(file)
            if kind == "Parquet"
            else pyarrow.ipc.open_stream(str(file)).read_all()
        )
        for row, record in enumerate(found.to_pylist()):
            yield f"{file}: row {row}", record
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorpusError(
            f"{file}: expected a readable {kind} file, found: {first_line(error)}", fix="copy the file again"
        ) from None


_READERS = {"jsonl": _jsonl, "parquet": _table, "arrow": _table}
