"""Parquet and Arrow files as corpora: both give the same documents, and damage and bombs end in an error."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.corpus.sources import ReadLog
from stride_cli.errors import CorpusError

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TALK = [{"role": "user", "content": "hi", "n": 1}, {"role": "assistant", "content": "ho", "n": 2}]


def write(table: Any, path: Path) -> str:
    """Write a table as the suffix says: .parquet, .stream.arrow or .file.arrow (compressed)."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=300)
        return str(path)
    new = ipc.new_file if path.name.endswith(".file.arrow") else ipc.new_stream
    packed = ipc.IpcWriteOptions(compression="zstd" if new is ipc.new_file else None)
    with new(str(path), table.schema, options=packed) as writer:
        writer.write_table(table, max_chunksize=300)
    return str(path)


def silent() -> ReadLog:
    return ReadLog("skip", lambda text: None)


@pytest.mark.parametrize("name", ["a.parquet", "a.stream.arrow", "a.file.arrow"])
def test_rows_are_documents_or_named(tmp_path: Path, name: str) -> None:
    texts = [f"t{number % 7}" for number in range(999)] + [" ", None]
    columns = {"id": [str(number) for number in range(1001)], "text": texts, "other": [[1]] * 1001}
    path = write(pyarrow.table(columns), tmp_path / name)
    with pytest.raises(CorpusError, match=rf"{name}:1000: .*empty"):
        list(read_documents([path]))
    found = list(read_documents([path], log=silent()))
    assert [(each.id, each.text, each.line) for each in found] == [
        (str(n), f"t{n % 7}", n + 1) for n in range(999)
    ]
    coded = pyarrow.table({**columns, "text": pyarrow.array(texts).dictionary_encode()})
    again = read_documents([write(coded, tmp_path / name)], log=silent())
    assert [each.text for each in again] == [each.text for each in found]
    with pytest.raises(CorpusError, match=rf"{name}:1: expected a row of at most 2 bytes"):
        list(read_documents([path], ReadOptions(max_document_bytes=2)))
    talks = pyarrow.table({"id": ["a", "b"], "messages": [TALK, None]})
    (document,) = read_documents([write(talks, tmp_path / name)], log=silent())
    assert document.messages == tuple(TALK)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damage_is_an_error(tmp_path: Path, name: str) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["id", "text", "text"])
    with pytest.raises(CorpusError, match=rf"{name}: expected one column 'text', found 2"):
        list(read_documents([write(twice, tmp_path / name)]))
    path = Path(write(pyarrow.table({"id": ["a", "b"], "messages": [TALK, TALK]}), tmp_path / name))
    whole = path.read_bytes()
    for damaged in (b"PAR1 no table", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=rf"{name}:1: expected a readable (Parquet|Arrow) file"):
            list(read_documents([str(path)]))
    draw = random.Random(0)
    for _ in range(150):  # none of these may end the process
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            assert len(list(read_documents([str(path)], log=silent()))) <= 2
        except CorpusError as error:
            assert error.fix


def repeated(value: str, count: int) -> Any:
    """A column that holds a value once, and `count` references to it."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [value])


def write_bombs(folder: Path) -> None:
    """Write files of some 100 kB that expand to 100 MB and more."""
    for pack, suffix in ((gzip.compress, "gz"), (zstandard.compress, "zst")):
        (folder / f"line.jsonl.{suffix}").write_bytes(pack(b"0" * (4 << 20)) * 25)
    blank = zstandard.compress((b" " * 1023 + b"\n") * 4096)
    (folder / "blank.jsonl.zst").write_bytes(blank * 25)
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    page = pyarrow.table({"id": ["a"], "text": ["a" * (65 << 20)]})
    parquet.write_table(page, folder / "page.parquet", use_dictionary=False, **options)
    long = random.Random(0).randbytes(1 << 15).hex()
    texts = pyarrow.table({"id": range(3000), "text": repeated(long, 3000)})
    parquet.write_table(texts, folder / "texts.parquet", **options)
    message = pyarrow.StructArray.from_arrays(
        [repeated("user", 30_000), repeated(long, 30_000)], ["role", "content"]
    )
    offsets = pyarrow.array(range(0, 30_001, 100), pyarrow.int32())
    talks = pyarrow.table({"id": range(300), "messages": pyarrow.ListArray.from_arrays(offsets, message)})
    parquet.write_table(talks, folder / "talks.parquet", **options)


def test_a_small_file_that_expands_to_far_more_is_refused(tmp_path: Path) -> None:
    write_bombs(tmp_path)
    options = ReadOptions(max_document_bytes=1 << 20)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(CorpusError, match="over 1,000 times") as caught:
            list(read_documents([str(path)], options, log=silent()))
        assert path.name in caught.value.message and "can be piped in" in str(caught.value.fix)
    with pytest.raises(CorpusError, match="a row of at most 1,048,576 bytes"):
        list(read_documents([f"{tmp_path}/talks.parquet"], options))
