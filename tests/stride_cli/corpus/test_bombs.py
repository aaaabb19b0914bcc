"""Small files that expand to gigabytes are refused, in little memory; measured in a process of its own."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

LIMIT = 4 << 20  # --max-document-bytes
PIECE = 4 << 20
PIECES = 2560  # 10 GB in all
PAGE = 65 << 20

# reads every file of the command line, some with --on-bad skip too; one JSON line each
CHILD = """
import json, sys, time
from pathlib import Path
import pyarrow.parquet, zstandard, gzip
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.corpus.streams import ReadLog
from stride_cli.errors import StrideError

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

# a bit of every byte of a table's metadata, turned: asked for a column of some, pyarrow ends the process
whole, flipped = Path(sys.argv[2]).read_bytes(), Path(sys.argv[2]).with_name("flipped.parquet")
size = int.from_bytes(whole[-8:-4], "little") + 8
for place in range(-size, 0):
    data = bytearray(whole)
    data[place] ^= 1 << place % 8
    flipped.write_bytes(data)
    try:
        list(read_documents([str(flipped)], log=ReadLog("skip", lambda text: None)))
    except StrideError as caught:
        assert caught.fix

for name in sys.argv[3:]:
    for on_bad in ("error", "skip") if "line" in name or "rows" in name else ("error",):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is there now
        before, count, error, began = peak(), 0, None, time.process_time()
        options = ReadOptions(number_ids="numbered" in name, max_document_bytes=int(sys.argv[1]))
        try:
            for _ in read_documents([name], options, log=ReadLog(on_bad, lambda text: None)):
                count += 1
        except StrideError as caught:
            error = [caught.message, caught.fix]
        print(json.dumps({
            "file": Path(name).name, "on_bad": on_bad, "documents": count, "error": error,
            "bytes": peak() - before, "seconds": time.process_time() - began,
        }))
"""


def zeros(kind: str, content: bytes) -> bytes:
    """A compressed file of 10 GB: members or frames of the same bytes, one after the other."""
    piece = content * (PIECE // len(content))
    return (gzip.compress(piece, 6) if kind == "gz" else zstandard.compress(piece)) * PIECES


def repeated(value: str, count: int) -> Any:
    """A column that holds a value once, and `count` times a reference to it."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [value])


def write(table: Any, path: Path, **options: Any) -> None:
    parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bombs")
    for kind in ("gz", "zst"):
        (folder / f"line.jsonl.{kind}").write_bytes(zeros(kind, b"0"))
        (folder / f"text.txt.{kind}").write_bytes((folder / f"line.jsonl.{kind}").read_bytes())
    (folder / "blank.jsonl.zst").write_bytes(zeros("zst", b" " * 1023 + b"\n"))
    long = random.Random(0).randbytes(1 << 19).hex()  # 1 MiB, which compresses to half
    write(pyarrow.table({"text": repeated(long, 300_000)}), folder / "numbered-dictionary.parquet")
    write(pyarrow.table({"id": ["a"], "text": ["a" * PAGE]}), folder / "page.parquet", use_dictionary=False)
    # one row, in which 300,000 messages refer to one text of 1 MiB; and 300 rows with a thousand each
    for name, lists in (("row", 1), ("rows", 300)):
        offsets = pyarrow.array(range(0, 300_001, 300_000 // lists), pyarrow.int32())
        content = repeated(long, 300_000)
        message = pyarrow.StructArray.from_arrays([repeated("user", 300_000), content], ["role", "content"])
        messages = pyarrow.ListArray.from_arrays(offsets, message)
        write(pyarrow.table({"messages": messages}), folder / f"numbered-{name}.parquet")
    column = parquet.ParquetFile(folder / "page.parquet").metadata.row_group(0).column(1)
    lying = folder / "lying.parquet"
    data = (folder / "page.parquet").read_bytes()
    # the metadata at the end then tell of a few bytes: the number, as a varint, of as many bytes
    lying.write_bytes(data.replace(varint(column.total_uncompressed_size), varint(97, 4)))
    assert parquet.ParquetFile(lying).metadata.row_group(0).column(1).total_uncompressed_size == 97
    names = sorted(str(path) for path in folder.iterdir())
    table = tmp_path_factory.mktemp("whole") / "whole.parquet"
    parquet.write_table(pyarrow.table({"id": ["a"], "text": ["x"]}), table, store_schema=False)
    command = [sys.executable, "-c", CHILD, str(LIMIT), str(table), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(each["file"], each["on_bad"]): each for each in found}


def varint(value: int, size: int = 0) -> bytes:
    """A number as Thrift's compact protocol writes it (zigzag), in at least so many bytes."""
    value <<= 1
    made = bytearray()
    while value > 127 or len(made) + 1 < size:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


@pytest.mark.parametrize(
    ("file", "on_bad", "expected"),
    [
        ("line.jsonl.gz", "error", "line of at most 4,194,304 bytes"),
        ("line.jsonl.gz", "skip", "over 1,000 times"),
        ("line.jsonl.zst", "error", "line of at most 4,194,304 bytes"),
        ("line.jsonl.zst", "skip", "over 1,000 times"),
        ("blank.jsonl.zst", "error", "over 1,000 times"),
        ("text.txt.gz", "error", "file of at most 4,194,304 bytes"),
        ("text.txt.zst", "error", "file of at most 4,194,304 bytes"),
        ("page.parquet", "error", "over 1,000 times"),
        ("lying.parquet", "error", "over 1,000 times"),
        ("numbered-dictionary.parquet", "error", "over 1,000 times"),
        ("numbered-row.parquet", "error", "at most 10,000 messages"),
        ("numbered-rows.parquet", "error", "row of at most 4,194,304 bytes"),
        ("numbered-rows.parquet", "skip", "over 1,000 times"),
    ],
)
def test_refused_in_little_memory(
    results: dict[tuple[str, str], dict[str, Any]], file: str, on_bad: str, expected: str
) -> None:
    found = results[file, on_bad]
    message, fix = found["error"]
    assert expected in message and file in message and fix
    # the line itself, its copies in buffers, and what 512 bytes of zstd expand to
    assert found["bytes"] < 64 << 20
    assert found["seconds"] < 5
    assert found["documents"] < 1000
