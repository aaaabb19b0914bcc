from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.sources import ReadLog, Source, find_sources
from stride_cli.corpus.streams import open_stream, read_lines
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
        with pytest.raises(CorpusError, match=r"expected (a whole archive|gzip data|zstd data)"):
            read_all(path)
    path.write_bytes(whole)
    assert read_all(path) == text


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
