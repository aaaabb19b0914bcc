"""Telling classifiers from language models, on disk; light to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from index_format.reader import Index

Kind = Literal["language", "classifier"]
FILE_NAME = "classifier.json"
DATA_SUFFIXES = (".npz", ".csv", ".tsv")


def kind_of(path: str | Path) -> Kind:
    """The kind of the model at `path` (directory, hub id or .gguf file)."""
    return "classifier" if (Path(path).expanduser() / FILE_NAME).is_file() else "language"


def kind_of_index(index: Index) -> Kind:
    """Tell an index of text from one of a classifier's examples."""
    return "classifier" if (index.attributes.get("config") or {}).get("kind") == "classifier" else "language"


def refuse_classifier(index: Index, why: str, *, fix: str = "give the index of a language model") -> None:
    """Raise UsageError for an index without text; `why` is for people: "an audit compares texts"."""
    if kind_of_index(index) != "language":
        raise UsageError(f"index '{index.path}' is of a classifier, and {why}", fix=fix)


def is_examples(path: str | Path) -> bool:
    """True for a file of labelled examples, by its suffix (Parquet may hold text as well)."""
    return Path(path).suffix.lower() in DATA_SUFFIXES
