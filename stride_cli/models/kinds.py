"""Telling classifiers from language models, on disk; light to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from index_format.reader import Index

FILE_NAME = "classifier.json"
DATA_SUFFIXES = (".npz", ".csv", ".tsv")


def is_classifier(path: str | Path) -> bool:
    """Whether there is a classifier's directory at `path`."""
    return (Path(path).expanduser() / FILE_NAME).is_file()


def is_classifier_index(index: Index) -> bool:
    """Whether an index holds examples of a classifier instead of text."""
    return (index.attributes.get("config") or {}).get("kind") == "classifier"


def is_examples(path: str | Path) -> bool:
    """Whether a path is, by its suffix, a file of labelled examples (Parquet may hold text as well)."""
    return Path(path).suffix.lower() in DATA_SUFFIXES
