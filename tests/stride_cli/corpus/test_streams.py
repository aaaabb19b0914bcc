from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.streams import (
    DamagedStream,
    ReadLog,
    Source,
    find_sources,
    open_stream,
    read_lines,
    total_bytes,
)
from stride_cli.errors import CorpusError

zstandard = pytest.importorskip("zstandard")


def read_all(path: Path) -> bytes:
    with open_stream(Source(path.name, path, "jsonl"), ReadLog()) as stream:
        return stream.read()


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.booleans())
def test_lines_are_those_of_the_data_and_long_ones_are_passed_over(lines: list[bytes], ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    expected = [
        (number, None if len(line.removesuffix(b"\n")) > 5 else line)
        for number, line in enumerate(io.BytesIO(data).readlines(), 1)
    ]
    assert list(read_lines(io.BytesIO(data), 5)) == expected


def test_a_long_line_is_never_held_whole() -> None:
    class Measured(io.BytesIO):
        largest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            Measured.largest = max(Measured.largest, len(line))
            return line

    stream = Measured(b"x" * 5_000_000 + b"\nshort\n")
    assert list(read_lines(stream, 1000)) == [(1, None), (2, b"short\n")]
    assert Measured.largest <= 1 << 16


def test_compression_is_known_by_content_too(tmp_path: Path) -> None:
    for name, data in (
        ("a.jsonl.gz", gzip.compress(b"hello\n")),
        ("b.jsonl", gzip.compress(b"hello\n")),
        ("c.jsonl.zst", zstandard.compress(b"hello\n")),
        ("d.jsonl", zstandard.compress(b"hello\n")),
        ("e.jsonl", b"hello\n"),
    ):
        (tmp_path / name).write_bytes(data)
        assert read_all(tmp_path / name) == b"hello\n", name


def test_archives_of_several_members(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one") + gzip.compress(b"two"))
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"one") + zstandard.compress(b"two"))
    assert read_all(tmp_path / "a.gz") == b"onetwo"
    assert read_all(tmp_path / "a.zst") == b"onetwo"


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_every_truncation_is_noticed(tmp_path: Path, suffix: str) -> None:
    text = b"".join(b"line %d of many\n" % number for number in range(50))
    whole = gzip.compress(text) if suffix == "gz" else zstandard.compress(text)
    path = tmp_path / f"a.jsonl.{suffix}"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedStream):
            read_all(path)
    path.write_bytes(whole)
    assert read_all(path) == text


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_wrong_archive_is_noticed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(b'{"id": "a"}\n')
    with pytest.raises(DamagedStream, match="damaged"):
        read_all(path)


def test_globs_are_sorted_and_names_stay_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "odd[1].jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}\n")
    names = lambda *given: [source.name for source in find_sources(given)]  # noqa: E731
    assert names("?.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("**/c.jsonl") == ["deep/c.jsonl"]
    assert names("b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert names("odd[1].jsonl") == ["odd[1].jsonl"]  # a file of that name comes before the pattern
    assert [source.kind for source in find_sources(["-"])] == ["jsonl"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "no corpus given"),
        (["nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["nothing*.jsonl"], "matches no file"),
        (["directory"], "found a directory"),
        (["table.csv"], "found '.csv'"),
        (["-", "-"], "given twice"),
    ],
)
def test_sources_that_cannot_be(
    given: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    Path("table.csv").write_text("id,text\n")
    with pytest.raises(CorpusError, match=expected) as error:
        find_sources(given)
    assert error.value.fix


def test_kinds_by_name(tmp_path: Path) -> None:
    kinds = {
        "a.jsonl": "jsonl", "a.ndjson.gz": "jsonl", "a.JSONL.zst": "jsonl", "a.parquet": "parquet",
        "a.txt": "text", "a.md.gz": "text", "README": "text",
    }  # fmt: skip
    for name, kind in kinds.items():
        (tmp_path / name).touch()
        assert find_sources([str(tmp_path / name)])[0].kind == kind, name


def test_the_log_counts_bytes_of_all_sources(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    sources = find_sources([str(tmp_path / "*.jsonl")])
    log = ReadLog()
    assert total_bytes(sources) == 2000
    assert total_bytes([*sources, Source("<stdin>", None, "jsonl")]) is None
    for source in sources:
        with open_stream(source, log) as stream:
            stream.read()
    assert log.bytes_done == 2000
