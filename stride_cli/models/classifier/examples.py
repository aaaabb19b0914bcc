"""Labelled examples of a classifier, read from .npz, CSV or Parquet."""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli.errors import CorpusError, required

INPUT_NAMES = ("images", "inputs", "X", "x", "data")
LABEL_NAMES = ("labels", "y", "target")
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
SUFFIXES = (".npz", *TABLE_SUFFIXES)
PICTURE_SUFFIXES = (".png",)
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


@dataclass(frozen=True)
class Columns:
    """Columns of a table: of labels (an .npz has them in an array of its own), of ids (else rows are called
    by their numbers), those that are not read, and those that are inputs, in order (empty: all others)."""

    label: str | None = None
    id: str | None = None
    drop: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examples:
    """N examples of one file: inputs (N, …) as in the file, so that pixels stay integers; names of their
    classes, integers without a point; unique ids; and the columns, with the features that were read."""

    path: str
    inputs: np.ndarray
    labels: list[str] | None
    ids: list[str]
    columns: Columns

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def fingerprint(self, rows: np.ndarray | None = None) -> str:
        """SHA-256 in hex over inputs, labels and ids of the given rows (all), in order."""
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        digest = hashlib.sha256(f"{self.inputs.dtype.name}|{self.shape}|{len(rows)}|".encode())
        for start in range(0, len(rows), 4096):
            some = rows[start : start + 4096]
            digest.update(np.ascontiguousarray(self.inputs[some]).tobytes())
        for names in (self.ids, self.labels or []):
            for row in rows.tolist() if names else []:
                encoded = names[row].encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


def read_examples(path: str | Path, columns: Columns | None = None, *, need_labels: bool = True) -> Examples:
    """Read a whole file of examples; without `need_labels`, labels may be absent.

    ``.npz``: an array of inputs (``images``, ``inputs``, ``X``, ``x`` or ``data``; first axis: examples) and
    one of labels (``labels``, ``y`` or ``target``), and perhaps one of ids. CSV, TSV and Parquet: a header,
    then one example a row; every column that is not the label, the id or dropped must be numeric.

    Raises CorpusError: no such file, not readable, no such column, text where numbers should be, values that
    are missing or not finite, labels that are no classes; names the row.
    """
    file, columns = Path(path), columns or Columns()
    suffix = file.suffix.lower()
    if not file.is_file():
        raise CorpusError(f"there is no file '{path}'", fix="give an .npz, .csv, .tsv or .parquet file")
    if suffix == ".npz":
        examples = _read_npz(file, columns)
    elif suffix in TABLE_SUFFIXES:
        header, cells = _read_parquet(file) if suffix == ".parquet" else _read_text_table(file)
        examples = _from_table(file, header, cells, columns, need_labels)
    else:
        raise CorpusError(
            f"'{path}' is not a file of examples (expected {', '.join(SUFFIXES)}, found '{suffix}')",
            fix="numpy.savez(FILE, inputs=…, labels=…) writes one",
        )
    if len(examples) == 0:
        raise CorpusError(f"{path}: there is no example in it", fix="give one row or more")
    if examples.labels is None and need_labels:
        raise CorpusError(
            f"{path}: there are no labels (expected an array {', '.join(LABEL_NAMES)})",
            fix="numpy.savez(FILE, inputs=…, labels=…); of a table: --field label=COLUMN",
        )
    _check_finite(examples)
    repeated = [name for name, count in Counter(examples.ids).items() if count > 1]
    if repeated:
        raise CorpusError(
            f"{path}: the id '{repeated[0]}' occurs more than once",
            fix="leave --field id= out to number rows",
        )
    return examples


def read_picture(path: str | Path, shape: Sequence[int]) -> np.ndarray:
    """A PNG as one input of a classifier, uint8 of its `shape`: (H, W), (C, H, W) or (H, W, C), C of 1 or 3.

    Grey or colour as the classifier's inputs are, pixels 0 … 255.

    Raises CorpusError: no such file, damaged, of another size; the classifier's inputs are no images.
    Raises MissingExtraError: Pillow is not installed.
    """
    shape = tuple(shape)
    if not Path(path).is_file():
        raise CorpusError(f"there is no file '{path}'", fix="give a .png, .npz, .csv or .parquet file")
    first = len(shape) == 3 and shape[0] in (1, 3)
    channels = 1 if len(shape) == 2 else shape[0] if first else shape[-1]
    if len(shape) not in (2, 3) or channels not in (1, 3):
        raise CorpusError(
            f"'{path}' is a picture, and the classifier's inputs have shape {shape}",
            fix="give an .npz, .csv or .parquet file",
        )
    image = required("PIL.Image", "images", "pillow")
    try:
        with image.open(path) as opened:
            pixels = np.asarray(opened.convert("L" if channels == 1 else "RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        raise CorpusError(f"{path}: not a readable picture ({error})", fix="copy the file again") from error
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    size = shape[1:] if first else shape[:2]
    if pixels.shape[:2] != tuple(size):
        raise CorpusError(
            f"{path} has {pixels.shape[0]} × {pixels.shape[1]} pixels, height × width "
            f"(the classifier's inputs have {size[0]} × {size[1]})",
            fix="scale it as the training images were",
        )
    return (np.moveaxis(pixels, 2, 0) if first else pixels).reshape(shape)


def find_classes(examples: Examples) -> list[str]:
    """The names of the classes: integers by value, else in alphabetical order.

    Raises CorpusError: fewer than two, or so many that the labels look like measurements.
    """
    names = set(examples.labels or ())
    whole = all(name.lstrip("-").isdigit() for name in names)
    classes = sorted(names, key=int) if whole else sorted(names)
    if len(classes) < 2:
        raise CorpusError(
            f"{examples.path}: every label is '{classes[0]}' (expected two classes or more)",
            fix="give the column or array of the classes",
        )
    if len(classes) > 2 and len(classes) > len(examples) / 2:
        raise CorpusError(
            f"{examples.path}: {len(classes):,} labels in {len(examples):,} rows (expected classes)",
            fix="give the column of the classes with --field label=",
        )
    return classes


def class_numbers(examples: Examples, classes: Sequence[str]) -> np.ndarray:
    """Labels as numbers of classes, (N,) int64.

    Raises CorpusError: a label is none of the classes; names the row.
    """
    assert examples.labels is not None
    known = {name: number for number, name in enumerate(classes)}
    numbers = np.array([known.get(label, -1) for label in examples.labels], np.int64)
    if (numbers < 0).any():
        row = int(np.flatnonzero(numbers < 0)[0])
        shown = ", ".join(classes[:12]) + (" …" if len(classes) > 12 else "")
        raise CorpusError(
            f"{examples.path}: the label of row {row}, '{examples.labels[row]}', is out of range "
            f"(the classes are {shown})",
            fix="correct the label, or train the model on data with all classes",
        )
    return numbers


def label_names(values: np.ndarray, where: str) -> list[str]:
    """Labels (N,), integers, whole floats, bools or strings, as names of classes; CorpusError for another
    number, which names the file `where`."""
    if values.dtype.kind not in "biuf":
        return [str(value).strip() for value in values]
    wrong = np.flatnonzero(~(np.isfinite(values) & (values == np.round(values))))
    if len(wrong):
        raise CorpusError(
            f"{where}: the label of row {wrong[0]} is {values[wrong[0]]} (expected a class: a whole number "
            "or a name)",
            fix="give the column or array of the classes",
        )
    return [str(int(value)) for value in values]


# Reading


def _read_npz(file: Path, columns: Columns) -> Examples:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile and zlib have classes of their own for damage
        raise CorpusError(
            f"{file}: not a readable .npz ({error})", fix="copy the file again, or write it with numpy.savez"
        ) from error
    found = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
    name = next((name for name in INPUT_NAMES if name in arrays), None)
    if name is None:
        raise CorpusError(
            f"{file}: there are no inputs (expected an array {', '.join(INPUT_NAMES)}; found {found})",
            fix="numpy.savez(FILE, inputs=…, labels=…)",
        )
    inputs = arrays[name]
    if inputs.ndim < 2 or inputs.dtype.kind not in "biuf":
        raise CorpusError(
            f"{file}: '{name}' is {inputs.dtype.name} of shape {inputs.shape} (expected numbers of shape "
            "(examples, …))",
            fix="give one row, or image, an example",
        )
    if columns.id is not None and columns.id not in arrays:
        raise CorpusError(
            f"{file}: there is no array '{columns.id}' (found {found})", fix="leave --field id= out"
        )
    label = next((key for key in (columns.label, *LABEL_NAMES) if key in arrays), None)
    key = columns.id or ("ids" if "ids" in arrays else None)
    for one in (label, key):
        if one is not None and arrays[one].shape != (len(inputs),):
            raise CorpusError(
                f"{file}: '{one}' has shape {arrays[one].shape} (expected ({len(inputs)},), one for each of "
                f"'{name}' {inputs.shape})",
                fix="give inputs, labels and ids of the same examples",
            )
    labels = None if label is None else label_names(arrays[label], str(file))
    ids = range(len(inputs)) if key is None else arrays[key]
    return Examples(str(file), inputs, labels, [str(value) for value in ids], columns)


def _read_text_table(file: Path) -> tuple[list[str], list[list[str]]]:
    """Header and columns of a CSV or TSV file, as text."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file} is not UTF-8: {error.reason}", fix=f"iconv -t UTF-8 {file}") from error
    except csv.Error as error:
        raise CorpusError(f"{file}: not a readable table ({error})", fix="check its quotes") from error
    if not rows:
        raise CorpusError(f"{file} is empty (expected a header and rows)", fix="give a table")
    header = _unique([name.strip() for name in rows[0]])
    for number, row in enumerate(rows[1:]):
        if len(row) != len(header):
            raise CorpusError(
                f"{file}: row {number} has {len(row)} cells (expected {len(header)}, as the header)",
                fix="correct that row",
            )
    return header, [list(column) for column in zip(*rows[1:], strict=True)] or [[] for _ in header]


def _read_parquet(file: Path) -> tuple[list[str], list[Any]]:
    parquet = required("pyarrow.parquet", "parquet")
    try:
        table = parquet.read_table(file)
    except Exception as error:  # pyarrow has many error classes
        raise CorpusError(f"{file}: not readable as Parquet ({error})", fix="copy the file again") from error
    cells = [table.column(number).to_pylist() for number in range(table.num_columns)]
    return _unique(list(table.column_names)), cells


def _unique(names: list[str]) -> list[str]:
    """Names with .1, .2 … behind repetitions."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        result.append(name if not seen[name] else f"{name}.{seen[name]}")
        seen[name] += 1
    return result


def _from_table(
    file: Path, header: list[str], cells: list[Any], columns: Columns, need_labels: bool
) -> Examples:
    place = {name: number for number, name in enumerate(header)}
    found = ", ".join(header)

    def column(name: str, option: str) -> Any:
        if name not in place:
            raise CorpusError(f"{file}: there is no column '{name}' (found {found})", fix=f"correct {option}")
        return cells[place[name]]

    labels = None
    if columns.label is None and need_labels:
        raise CorpusError(
            f"{file}: which column holds the labels? (found {found})", fix="name it with --field label=COLUMN"
        )
    if columns.label is not None and (need_labels or columns.label in place):
        values = column(columns.label, "--field label=")
        missing = next((row for row, value in enumerate(values) if _is_missing(value)), None)
        if missing is not None:
            raise CorpusError(f"{file}: row {missing} has no label", fix="fill it in, or remove the row")
        labels = [str(value).strip() for value in values]
        if all(_is_number(name) for name in labels):
            labels = label_names(np.array([float(name) for name in labels]), str(file))
    ids = range(len(cells[0]))
    if columns.id is not None and (need_labels or columns.id in place):
        ids = column(columns.id, "--field id=")
    for name in columns.drop if not columns.features else ():
        column(name, "--field drop=")
    taken = {columns.label, columns.id, *columns.drop}
    features = columns.features or tuple(name for name in header if name not in taken)
    if not features:
        raise CorpusError(f"{file}: no column is left to be an input", fix="--field drop=NAME of fewer")
    numbers = [_numbers(file, name, column(name, "the columns: they are the model's")) for name in features]
    chosen = replace(columns, features=features)
    return Examples(str(file), np.stack(numbers, axis=1), labels, [str(value) for value in ids], chosen)


def _numbers(file: Path, name: str, values: Sequence[Any]) -> np.ndarray:
    """One column as float64; NaN where a value is missing."""
    found = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            found[row] = math.nan if _is_missing(value) else float(value)
        except (TypeError, ValueError):
            raise CorpusError(
                f"{file}: column '{name}' holds text (row {row}: {str(value)[:40]!r}; expected numbers)",
                fix=f"leave it out with --field 'drop={name}', or make it the ids with --field 'id={name}'",
            ) from None
    return found


def _check_finite(examples: Examples) -> None:
    if examples.inputs.dtype.kind != "f":
        return
    flat, features = examples.inputs.reshape(len(examples), -1), examples.columns.features
    for start in range(0, len(flat), 4096):
        bad = np.argwhere(~np.isfinite(flat[start : start + 4096]))
        if len(bad):
            row, place = int(bad[0][0]) + start, int(bad[0][1])
            where = f"column '{features[place]}'" if features else f"value {place}"
            raise CorpusError(
                f"{examples.path}: {where} of row {row} is {flat[row, place]} (expected a finite number)",
                fix="fill missing values in, or remove the row",
            )


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    return value.strip().lower() in _MISSING if isinstance(value, str) else value != value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
