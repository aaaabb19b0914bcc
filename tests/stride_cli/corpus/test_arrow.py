"""Arrow files: both formats, what is refused, and no file that ends the process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stride_cli.corpus import streams
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.errors import CorpusError

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")

ROWS = {"id": ["a", "b", "c"], "text": ["x", None, "z"], "other": [1, 2, 3]}


def write(path: Path, table, new=ipc.new_stream, **options) -> str:
    with new(str(path), table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return str(path)


@pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file])
def test_both_formats_are_read(tmp_path: Path, new) -> None:
    path = write(tmp_path / "a.arrow", pyarrow.table(ROWS), new)
    found = list(read_documents([path], ReadOptions(on_bad="skip")))
    assert [(each.id, each.text, each.line) for each in found] == [("a", "x", 1), ("c", "z", 3)]
    with pytest.raises(CorpusError, match=r"a.arrow:2: expected text, found null in the field 'text'"):
        list(read_documents([path]))


def test_texts_that_a_dictionary_holds_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"id": ["a", "b"], "text": pyarrow.array(["x", "x"]).dictionary_encode()})
    assert [each.text for each in read_documents([write(tmp_path / "a.arrow", table)])] == ["x", "x"]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file])
def test_compressed_buffers_are_refused(tmp_path: Path, codec: str, new) -> None:
    """How far they expand nobody knows before."""
    table = pyarrow.table({"id": ["a"], "text": ["x" * 100_000]})
    with pytest.raises(CorpusError, match="found compressed buffers"):
        list(read_documents([write(tmp_path / "a.arrow", table, new, compression=codec)]))
    repeated = pyarrow.table({"id": ["a"], "text": pyarrow.array(["x" * 100_000]).dictionary_encode()})
    with pytest.raises(CorpusError, match="found compressed buffers"):
        list(read_documents([write(tmp_path / "b.arrow", repeated, new, compression=codec)]))


def test_rows_that_cost_nothing_are_told(tmp_path: Path, monkeypatch) -> None:
    """A column of nulls has as many rows as it says."""
    monkeypatch.setattr(streams, "UNWATCHED", 1 << 16)
    monkeypatch.setattr(streams, "MOST_EXPANSION", 10)
    rows = 5_000
    nulls = pyarrow.table({"id": pyarrow.nulls(rows)})
    with ipc.new_stream(str(tmp_path / "a.arrow"), nulls.schema) as writer:
        writer.write_table(nulls)
    with pytest.raises(CorpusError, match="expand to"):
        list(read_documents([f"{tmp_path}/a.arrow"], ReadOptions(on_bad="skip", number_ids=True)))


def test_columns_of_other_types_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pyarrow.table({"id": ["a"], "text": [{"a": 1}]}))
    with pytest.raises(CorpusError, match="a value of type struct"):
        list(read_documents([path]))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["id", "id"])
    with pytest.raises(CorpusError, match="expected one column 'id', found 2"):
        list(read_documents([write(tmp_path / "b.arrow", twice)]))


def test_a_bit_turned_anywhere_is_an_error_or_another_text(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "h"}]] * 3
    path = Path(write(tmp_path / "a.arrow", pyarrow.table({"id": ["a", "b", "c"], "messages": talk})))
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            assert len(list(read_documents([str(path)], ReadOptions(on_bad="skip")))) <= 3
        except CorpusError as error:
            assert error.fix
