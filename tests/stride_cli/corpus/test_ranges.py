"""Ranges of a corpus: every document is in one, and in turn they are the corpus, whatever holds it."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from stride_cli.corpus.options import Range
from stride_cli.corpus.readers import read_documents
from stride_cli.errors import CorpusError, UsageError

_FILES = ["a.jsonl", "b.jsonl.gz", "empty.jsonl", "c.parquet", "d.txt", "e.arrow"]


def _records(count: int) -> list[dict[str, str]]:
    rng = random.Random(4)
    return [{"id": f"é{n}", "text": "x" * rng.randint(1, 90)} for n in range(count)]


def _lines(records: list[dict[str, str]]) -> bytes:
    # blank lines, and no line break at the end
    return "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """JSON Lines, plain and packed, Parquet of several row groups, Arrow, a text, an empty file."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    place = tmp_path_factory.mktemp("files")
    records = _records(60)
    (place / "a.jsonl").write_bytes(_lines(records[:15]))
    (place / "b.jsonl.gz").write_bytes(gzip.compress(_lines(records[15:35])))
    (place / "empty.jsonl").write_bytes(b"")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(records[35:48]), place / "c.parquet", row_group_size=5
    )
    (place / "d.txt").write_text("one document")
    rows = pyarrow.Table.from_pylist(records[48:])
    with pyarrow.ipc.new_stream(str(place / "e.arrow"), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=4)
    return [str(place / name) for name in _FILES]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_ranges_in_turn_are_the_corpus(files: list[str], count: int) -> None:
    whole = [(found.id, found.text, found.source, found.line) for found in read_documents(files)]
    assert len(whole) == 61
    joined, sizes = [], []
    for number in range(1, count + 1):
        part = list(read_documents(files, part=Range(number, count)))
        sizes.append(len(part))
        joined += [(found.id, found.text, found.source, found.line) for found in part]
    assert joined == whole
    assert max(sizes) < 61 or count == 1


def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(_lines(_records(20)) + b"\n{broken")
    list(read_documents([str(corpus)], part=Range(1, 2)))
    with pytest.raises(CorpusError, match=r"c\.jsonl:40: expected a JSON object"):
        list(read_documents([str(corpus)], part=Range(2, 2)))


@pytest.mark.parametrize("written", ["", "3", "0/4", "5/4", "1/0", "a/b", "1/2/3", "-1/2"])
def test_no_range(written: str) -> None:
    with pytest.raises(UsageError, match="expected I/N"):
        Range.parse(written)


def test_a_stream_has_no_ranges() -> None:
    with pytest.raises(UsageError, match="<stdin> is a stream"):
        read_documents(["-"], part=Range(1, 2))
