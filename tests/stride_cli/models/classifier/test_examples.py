"""Files of examples: what is read from them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stride_cli.errors import CorpusError
from stride_cli.models.classifier.examples import Columns, class_numbers, find_classes, read_examples

TABLE = Columns(label="status", id="name", drop=("remark",))


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    file = folder / "data.npz"
    np.savez(file, **arrays)
    return file


def table(folder: Path, text: str, name: str = "data.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_npz(digits_file: Path) -> None:
    examples = read_examples(digits_file)
    assert examples.shape == (8, 8) and examples.inputs.dtype == np.uint8 and len(examples) == 600
    assert find_classes(examples) == [str(digit) for digit in range(10)]
    assert examples.ids[17] == "17"
    np.testing.assert_array_equal(
        class_numbers(examples, find_classes(examples)), np.load(digits_file)["labels"]
    )


def test_table(table_file: Path) -> None:
    examples = read_examples(table_file, TABLE)
    assert examples.inputs.shape == (120, 4) and examples.ids[3] == "p3"
    assert examples.columns.features == ("a", "a.1", "c", "d")  # the header names "a" twice
    assert find_classes(examples) == ["ill", "well"]


def test_table_as_parquet_is_the_same(table_file: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    plain = read_examples(table_file, TABLE)
    columns = {name: plain.inputs[:, place] for place, name in enumerate(plain.columns.features)}
    file = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"name": plain.ids, **columns, "status": plain.labels}), file)
    again = read_examples(file, Columns(label="status", id="name"))
    np.testing.assert_array_equal(again.inputs, plain.inputs)
    assert again.labels == plain.labels and again.fingerprint() == plain.fingerprint()


def test_fingerprint_knows_inputs_labels_ids_and_order(tmp_path: Path) -> None:
    inputs, labels = np.arange(12.0).reshape(4, 3), np.array([0, 1, 0, 1])
    first = read_examples(npz(tmp_path, inputs=inputs, labels=labels))
    found = {first.fingerprint(), first.fingerprint(np.array([1, 0, 2, 3])), first.fingerprint(np.arange(3))}
    for changed in (
        {"inputs": inputs + 1e-9, "labels": labels},
        {"inputs": inputs, "labels": 1 - labels},
        {"inputs": inputs, "labels": labels, "ids": np.array(["a", "b", "c", "d"])},
        {"inputs": inputs.reshape(4, 1, 3), "labels": labels},
    ):
        found.add(read_examples(npz(tmp_path, **changed)).fingerprint())
    assert len(found) == 7


BAD_ARRAYS = [
    ({"pictures": np.zeros((3, 2)), "labels": np.arange(3)}, "no inputs"),
    ({"inputs": np.zeros((3, 2))}, "no labels"),
    ({"inputs": np.array([["a", "b"]]), "labels": np.arange(1)}, "expected numbers"),
    ({"inputs": np.zeros((3, 2)), "labels": np.arange(2)}, r"expected \(3,\)"),
    ({"inputs": np.zeros((3, 2)), "labels": np.array([0, 1.5, 1])}, "label of row 1 is 1.5"),
    ({"inputs": np.array([[0, 1], [0, np.nan]]), "labels": np.arange(2)}, "value 1 of row 1 is nan"),
    ({"inputs": np.zeros((2, 2)), "labels": np.arange(2), "ids": np.array(["a", "a"])}, "more than once"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS)
def test_refused_archives(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CorpusError, match=message) as caught:
        read_examples(npz(tmp_path, **arrays))
    assert "data.npz" in caught.value.message and caught.value.fix


BAD_TABLES = [
    ("a,b\n1,2\n", "which column holds the labels", Columns()),
    ("a,b\n1,2\n", "no column 'status' .found a, b", Columns(label="status")),
    ("a,status\n1,x\n2,\n", "row 1 has no label", Columns(label="status")),
    ("a,status\n1,x\nsome,y\n", r"'a' holds text .row 1: 'some'", Columns(label="status")),
    ("a,status\n1,x\n?,y\n", "column 'a' of row 1 is nan", Columns(label="status")),
    ("a,status\n1,x\n2\n", "row 1 has 1 cells .expected 2", Columns(label="status")),
    ("", "is empty", Columns(label="status")),
    ("a,status\n1,x\n", "no column 'b'", Columns(label="status", features=("a", "b"))),
]


@pytest.mark.parametrize(("text", "message", "columns"), BAD_TABLES)
def test_refused_tables(tmp_path: Path, text: str, message: str, columns: Columns) -> None:
    with pytest.raises(CorpusError, match=message):
        read_examples(table(tmp_path, text), columns)
