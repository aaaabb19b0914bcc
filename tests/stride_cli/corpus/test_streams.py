from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.sources import ReadLog, Source, find_sources, total_bytes
from stride_cli.corpus.streams import DamagedStream, open_stream, read_lines, refuse_foreign
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


def test_an_archive_of_another_name_is_named(tmp_path: Path) -> None:
    for suffix, kind in (("gz", "gzip"), ("zst", "zstd")):
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(b'{"id": "a"}\n')
        with pytest.raises(DamagedStream, match=f"expected {kind} data, as the name says") as error:
            read_all(path)
        assert "suffix of what it holds" in error.value.fix


def test_a_zstd_window_beyond_memory_has_a_remedy(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.zst").write_bytes(writer.compress(b"words\n" * 1000) + writer.flush())
    with pytest.raises(DamagedStream, match="window of at most 128 MiB") as error:
        read_all(tmp_path / "a.zst")
    assert "--long=31" in error.value.fix


@pytest.mark.parametrize(
    ("data", "kind", "remedy"),
    [
        (bz2.compress(b"x"), "bzip2", "bzip2 -dc FILE | stride"),
        (lzma.compress(b"x"), "xz", "xz -dc FILE | stride"),
        (b"PAR1\x15\x04", "Parquet", "ends in .parquet"),
        (b"PK\x03\x04" + bytes(30), "a zip archive", "JSON Lines"),
    ],
)
def test_formats_that_are_not_read_are_named(data: bytes, kind: str, remedy: str) -> None:
    with pytest.raises(CorpusError, match=f"<stdin>:1: .* found {kind}") as error:
        refuse_foreign(data, "<stdin>")
    assert remedy in (error.value.fix or "")
    for text in (b"", b"{", b"{}", b"PK", b"PAR1 is a word", b"BZh", b"\xef\xbb\xbf{}", "漢字".encode()):
        refuse_foreign(text, "<stdin>")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_pipe_may_give_its_first_bytes_one_by_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data = self.data.read(min(size, len(buffer)))
            buffer[: len(data)] = data
            return len(data)

    text = b"".join(b"line %d\n" % number for number in range(100))
    for data in (text, gzip.compress(text), zstandard.compress(text), b"", b"x"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Pipe(data))))
        with open_stream(Source("<stdin>", None, "jsonl"), ReadLog()) as stream:
            assert stream.read() == (text if len(data) > 1 else data)


def test_what_the_operating_system_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(size)

    lines = read_lines(Failing(b"one\ntwo\n"), 100)
    assert next(lines) == (1, b"one\n")
    with pytest.raises(DamagedStream, match="Input/output error") as error:
        next(lines)
    assert error.value.line == 2
    monkeypatch.setattr(sys, "stdin", None)
    with (
        pytest.raises(CorpusError, match="<stdin>: cannot be read: it is closed"),
        open_stream(Source("<stdin>", None, "jsonl"), ReadLog()),
    ):
        pass
    with (
        pytest.raises(CorpusError, match="cannot be opened: Is a directory"),
        open_stream(Source("gone", tmp_path, "jsonl"), ReadLog()),
    ):
        pass


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
        (["table.jsonl.xz"], "found '.xz'"),
        (["dangling.jsonl"], "found a symbolic link to nothing: gone.jsonl"),
        (["loop.jsonl"], "loop.jsonl: cannot be opened: Too many levels"),
        (["a" * 300], "cannot be opened: File name too long"),
        (["*" + "a" * 300], "matches no file"),
        (["a\0.jsonl"], "no such file"),
        (["*\0.jsonl"], "matches no file"),
    ],
)
def test_sources_that_cannot_be(
    given: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    Path("table.csv").write_text("id,text\n")
    Path("table.jsonl.xz").touch()
    Path("dangling.jsonl").symlink_to("gone.jsonl")
    Path("loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(CorpusError, match=expected) as error:
        find_sources(given)
    assert error.value.fix


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
