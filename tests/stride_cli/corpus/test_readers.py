from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus import streams
from stride_cli.corpus.readers import Document, Fields, ReadOptions, read_documents
from stride_cli.corpus.sources import ReadLog
from stride_cli.errors import CorpusError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "text": "first\ttext, ünï 漢字 🙂"},
    {"id": 7, "prompt": "question", "response": "answer"},
    {"id": "c", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
]


def brief(documents: list[Document]) -> list[tuple]:
    return [(d.id, d.text, d.prompt, d.response, d.messages) for d in documents]


EXPECTED = [
    ("a", "first\ttext, ünï 漢字 🙂", None, None, None),
    ("7", None, "question", "answer", None),
    ("c", None, None, None, tuple(RECORDS[2]["messages"])),
]


def lines(records: list[Any] = RECORDS) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines()))
    rows = [{**record, "id": str(record["id"])} for record in RECORDS]
    names = ("id", "text", "prompt", "response", "messages")
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names} | {"other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    # a field that a row does not have is null in a table
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert brief(list(read_documents([str(tmp_path / name)]))) == EXPECTED, name
    for data in (lines(), gzip.compress(lines()), zstandard.compress(lines())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        assert brief(list(read_documents(["-"]))) == EXPECTED


def test_source_and_line_are_kept_across_files_and_blank_lines(tmp_path: Path) -> None:
    records = b'{"id": "a", "text": "x"}\r\n\n{"id": "b", "text": "y"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + records)
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "c", "text": "z"}\n')
    found = list(read_documents([str(tmp_path / "*.jsonl")]))
    assert [d.id for d in found] == ["a", "b", "c"]
    assert [(Path(d.source).name, d.line) for d in found] == [("a.jsonl", 1), ("a.jsonl", 3), ("b.jsonl", 1)]


def test_text_files_are_documents_named_by_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    Path("notes/b.txt").write_text("two\nlines\n")
    Path("notes/a.md").write_text("{not json}")
    Path("LICENSE").write_text("free")
    found = list(read_documents(["notes/*", "LICENSE"]))
    assert [d.id for d in found] == ["notes/a.md", "notes/b.txt", "LICENSE"]
    assert [d.text for d in found] == ["{not json}", "two\nlines\n", "free"]
    with pytest.raises(CorpusError) as caught:  # a folder is not read, and what is said of it works
        list(read_documents(["notes"]))
    (pattern,) = re.findall("'(.*)'", caught.value.fix)
    assert [d.id for d in read_documents([pattern])] == ["notes/b.txt"]


def test_other_field_names(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"key": "a", "body": "x", "text": 5}, {"key": "b", "q": "y", "a": "z"}])
    fields = Fields(id="key", text="body", prompt="q", response="a", messages="")
    assert brief(list(read_documents([path], ReadOptions(fields=fields)))) == [
        ("a", "x", None, None, None),
        ("b", None, "y", "z", None),
    ]


def test_numbered_ids(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"text": "x"}, {"id": "x", "text": "y"}, {"id": "x", "text": "z"}])
    numbered = ReadOptions(number_ids=True)
    assert [d.id for d in read_documents([path], numbered)] == ["0", "1", "2"]
    assert [d.id for d in read_documents([path], numbered, first_number=5)] == ["5", "6", "7"]


GOOD = b'{"id": "good", "text": "x"}\n'
BAD = [
    (b'{"id": "a", "text": "x"\n', "corpus.jsonl:2: .*broken JSON", "--on-bad"),
    (b'["a", "x"]\n', "corpus.jsonl:2: .*found a list", "jq"),
    (b"[" * 100_000 + b"\n", "corpus.jsonl:2: .*nested too deeply", "--on-bad"),
    (b'{"name": "a", "text": "x"}\n', "corpus.jsonl:2: .*'id', found the fields 'name', ", "--number-ids"),
    (b'{"id": null, "text": "x"}\n', "corpus.jsonl:2: .*expected an id", "--field id="),
    (b'{"id": 1.5, "text": "x"}\n', "corpus.jsonl:2: .*a string or an integer, found a number", "--on-bad"),
    (GOOD, "corpus.jsonl:2: .*'good' again, first at .*corpus.jsonl:1", "--number-ids"),
    (b'{"id": "' + b"x" * (1 << 20) + b'x", "text": "x"}\n', "corpus.jsonl:2: .*at most", "--"),
    (b'{"id": "a"}\n', "corpus.jsonl:2: expected 'text', or .* found the fields 'id'", "--field text="),
    (b'{"id": "a", "text": null}\n', "corpus.jsonl:2: .*found null in the field 'text'", "--on-bad"),
    (b'{"id": "a", "text": " \\n\\t"}\n', "corpus.jsonl:2: .*empty", "--on-bad"),
    (b'{"id": "a", "text": 5}\n', "corpus.jsonl:2: .*'text' to be a string, found a number", "--on-bad"),
    (b'{"id": "a", "messages": "x"}\n', "corpus.jsonl:2: .*a list of {role, content}", "--on-bad"),
    (b'{"id": "a", "messages": [{"role": "user"}]}\n', "corpus.jsonl:2: .*'content' of mess", "--on-bad"),
    (b'{"id": "a", "text": "caf\xe9"}\n', "corpus.jsonl:2: expected UTF-8, found the byte 0xe9", "iconv"),
    (b'{"id": "a", "text": "x\\u0000y"}\n', "corpus.jsonl:2: .*NUL .*'text'", "--on-bad"),
    (b'{"id": "a", "text": "\\ud800"}\n', "corpus.jsonl:2: .*surrogate", "--on-bad"),
    (b'{"id": "a", "text": "' + b"x" * 300_000 + b'"}\n', "corpus.jsonl:2: .*at most 200,000", "--max-"),
    (b'{"id": "a", "text": NaN}\n', "corpus.jsonl:2: .*'text' to be a string, found the number NaN", "--on-"),
    (b'{"id": "a", "id": "b", "text": "x"}\n', "corpus.jsonl:2: .*once, found 'id' more", "--on-bad"),
    (b'{"id": "a", "messages": [{"role": "u", "content": "x", "content": "y"}]}\n',
     "corpus.jsonl:2: expected each field once, found 'content' more than once in message 1", "--on-bad"),
    (b'{"id": "a", "messages": [' + b",".join([b"{}"] * 10_001) + b"]}\n",
     "corpus.jsonl:2: .*at most 10,000 mess", "split"),
    (b'{"id": "a", "n": ' + b"9" * 5000 + b', "text": "x"}\n', "corpus.jsonl:2: .*: an integer of m", "--on"),
    (b'{"id": "a", "text": "x"}\r{"id": "b", "text": "y"}\n', "corpus.jsonl:2: .*carriage returns", "tr '"),
    (b'{"id": "a", "\x1b[31m": 1}\n', "corpus.jsonl:2: expected a JSON object", "--on-bad"),
    (b'{"id": "a", "\\u001b[31m": 1}\n', r"corpus.jsonl:2: .*the fields 'id', '\\x1b\[31m'", "--field text="),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "fix"), BAD, ids=[bad[1][16:40] for bad in BAD])
def test_bad_lines_are_named_or_skipped(
    line: bytes, message: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(GOOD + line + b'{"id": "last", "text": "y"}\n')
    with pytest.raises(CorpusError, match=message) as error:
        list(read_documents([str(path)], ReadOptions(max_document_bytes=200_000)))
    assert fix in (error.value.fix or "")
    assert len(error.value.message) < 400
    log = ReadLog("skip")
    found = list(read_documents([str(path)], ReadOptions(max_document_bytes=200_000), log=log))
    assert [d.id for d in found] == ["good", "last"]
    assert log.skipped == 1
    told = capsys.readouterr()
    assert "corpus.jsonl:2:" in told.err and "skipped 1 bad record in all" in told.err
    assert told.out == ""


def test_marks_of_byte_order_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in front of each of the files that were put together, too."""
    data = b"".join(b"\xef\xbb\xbf" + line + b"\r\n" for line in lines().splitlines())
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords\r\nand\rmore")
    assert brief(list(read_documents([str(tmp_path / "a.jsonl")]))) == EXPECTED
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert brief(list(read_documents(["-"]))) == EXPECTED
    assert next(read_documents([str(tmp_path / "a.txt")])).text == "words\r\nand\rmore"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_unicode_is_named(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = encoding.upper().replace("16-", "16")
    data = lines().decode().encode(encoding)
    for name, content in (("a.jsonl", data), ("a.jsonl.gz", gzip.compress(data)), ("a.txt", data)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=f"{name}:1: expected UTF-8, found {kind}") as error:
            list(read_documents([str(path)]))
        assert f"iconv -f {kind} -t UTF-8 {path}" in (error.value.fix or "")
    (tmp_path / "b.txt").write_text("words")
    log = ReadLog("skip", lambda text: None)  # a file of text is a record
    assert [d.text for d in read_documents([str(tmp_path / "*.txt")], log=log)] == ["words"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    with pytest.raises(CorpusError, match=f"<stdin>:1: .*found {kind}"):
        list(read_documents(["-"], log=ReadLog("skip")))


def test_a_file_that_changes_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines())
    table = pyarrow.table({"id": ["a", "b", "c"], "text": ["x", "y", "z"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        documents = read_documents([str(tmp_path / name)], log=ReadLog("skip"))
        next(documents)
        with (tmp_path / name).open("ab") as file:
            file.write(b"\n")
        with pytest.raises(CorpusError, match=rf"{name}: .* it changed: [\d,]+ bytes before, [\d,]+ after"):
            list(documents)


def test_endless_input_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_ENDLESS_LINE", 10_000_000)
    with pytest.raises(CorpusError, match=r"/dev/zero:1: .* a line of at most 1,000,000 bytes"):
        list(read_documents(["/dev/zero"], ReadOptions(max_document_bytes=1_000_000)))
    with pytest.raises(CorpusError, match=r"/dev/zero:1: .* goes on beyond 10,000,000 bytes"):
        list(read_documents(["/dev/zero"], log=ReadLog("skip")))


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(lines())))
    thread.start()
    assert brief(list(read_documents([str(pipe)]))) == EXPECTED
    thread.join()
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(CorpusError, match=r"pipe.parquet: expected a Parquet file, found a pipe"):
        list(read_documents([str(tmp_path / "pipe.parquet")]))


@pytest.mark.parametrize("data", [b"", b"\n\n", gzip.compress(b"", mtime=0), b"broken\n"])
def test_no_document_at_all(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(data)
    skipped = r" \(1 bad records were skipped\)" if data == b"broken\n" else ""
    with pytest.raises(CorpusError, match=f"at least one record, found none{skipped}$"):
        list(read_documents([str(tmp_path / "corpus.jsonl")], log=ReadLog("skip", lambda text: None)))


def test_memory_is_bounded_by_the_document(tmp_path: Path) -> None:
    """A line of 50 MB costs no 50 MB."""
    import tracemalloc

    path = tmp_path / "corpus.jsonl"
    path.write_bytes(GOOD + b'{"id": "a", "text": "' + b"x" * 50_000_000 + b'"}\n')
    tracemalloc.start()
    try:
        with pytest.raises(CorpusError, match="at most 1,000,000 bytes"):
            list(read_documents([str(path)], ReadOptions(max_document_bytes=1_000_000)))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.text(
            st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
        ).filter(lambda text: not text.isspace())),
        min_size=1,
        unique_by=lambda pair: pair[0],
    ),
    st.booleans(),
)  # fmt: skip
def test_any_text_comes_through(pairs: list[tuple[str, str]], ascii_only: bool) -> None:
    data = "".join(
        json.dumps({"id": i, "text": t}, ensure_ascii=ascii_only) + "\n" for i, t in pairs
    ).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        assert [(d.id, d.text) for d in read_documents(["-"])] == pairs
