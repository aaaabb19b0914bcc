from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.readers import Document, Fields, ReadOptions, read_documents
from stride_cli.corpus.streams import ReadLog
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
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b'{"id": "a", "text": "x"}\r\n\n{"id": "b", "text": "y"}'
    )
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "c", "text": "z"}\n')
    found = list(read_documents([str(tmp_path / "*.jsonl")]))
    assert [(d.id, Path(d.source).name, d.line) for d in found] == [
        ("a", "a.jsonl", 1),
        ("b", "a.jsonl", 3),
        ("c", "b.jsonl", 1),
    ]


def test_text_files_are_documents_named_by_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    Path("notes/b.txt").write_text("two\nlines\n")
    Path("notes/a.md").write_text("{not json}")
    Path("LICENSE").write_text("free")
    found = list(read_documents(["notes/*", "LICENSE"]))
    assert [(d.id, d.text) for d in found] == [
        ("notes/a.md", "{not json}"),
        ("notes/b.txt", "two\nlines\n"),
        ("LICENSE", "free"),
    ]


def test_other_field_names(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"key": "a", "body": "x", "text": 5}, {"key": "b", "q": "y", "a": "z"}])
    fields = Fields(id="key", text="body", prompt="q", response="a", messages="")
    assert brief(list(read_documents([path], ReadOptions(fields=fields)))) == [
        ("a", "x", None, None, None),
        ("b", None, "y", "z", None),
    ]


def test_a_form_is_switched_off_by_an_empty_name(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"id": "a", "text": "x", "prompt": "y", "response": "z"}])
    with pytest.raises(CorpusError, match="'text' and also 'prompt' and 'response'") as error:
        list(read_documents([path]))
    assert "--text-field ''" in (error.value.fix or "")
    assert next(read_documents([path], ReadOptions(fields=Fields(text="")))).response == "z"
    assert next(read_documents([path], ReadOptions(fields=Fields(prompt="")))).text == "x"


def test_numbered_ids(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"text": "x"}, {"id": "x", "text": "y"}, {"id": "x", "text": "z"}])
    assert [d.id for d in read_documents([path], ReadOptions(number_ids=True))] == ["0", "1", "2"]
    assert [d.id for d in read_documents([path], ReadOptions(number_ids=True), first_number=5)] == [
        "5",
        "6",
        "7",
    ]


GOOD = b'{"id": "good", "text": "x"}\n'
BAD = [
    (b'{"id": "a", "text": "x"\n', "corpus.jsonl:2: .*broken JSON", "--on-bad"),
    (b'["a", "x"]\n', "corpus.jsonl:2: .*found a list", "jq"),
    (b'"a"\n', "corpus.jsonl:2: .*found a string", "--on-bad"),
    (b"[" * 100_000 + b"\n", "corpus.jsonl:2: .*nested too deeply", "--on-bad"),
    (b'{"name": "a", "text": "x"}\n', "corpus.jsonl:2: .*'id', found the fields 'name', ", "--number-ids"),
    (b'{"id": "", "text": "x"}\n', "corpus.jsonl:2: .*found an empty one", "--id-field"),
    (b'{"id": null, "text": "x"}\n', "corpus.jsonl:2: .*expected an id", "--id-field"),
    (b'{"id": 1.5, "text": "x"}\n', "corpus.jsonl:2: .*a string or an integer, found a number", "--on-bad"),
    (b'{"id": true, "text": "x"}\n', "corpus.jsonl:2: .*found true or false", "--on-bad"),
    (b'{"id": ' + b"9" * 5000 + b', "text": "x"}\n', "corpus.jsonl:2: ", "--on-bad"),
    (b'{"id": "a\\u0000", "text": "x"}\n', "corpus.jsonl:2: .*NUL", "--on-bad"),
    (GOOD, "corpus.jsonl:2: .*'good' again, first at .*corpus.jsonl:1", "--number-ids"),
    (b'{"id": "a"}\n', "corpus.jsonl:2: expected 'text', or .* found the fields 'id'", "--text-field"),
    (b'{"id": "a", "prompt": "x"}\n', "corpus.jsonl:2: expected 'text', or", "--text-field"),
    (b'{"id": "a", "text": ""}\n', "corpus.jsonl:2: .*found the field 'text' empty", "--on-bad"),
    (b'{"id": "a", "text": " \\n\\t"}\n', "corpus.jsonl:2: .*empty", "--on-bad"),
    (b'{"id": "a", "prompt": "x", "response": ""}\n', "corpus.jsonl:2: .*'response' empty", "--on-bad"),
    (b'{"id": "a", "text": 5}\n', "corpus.jsonl:2: .*'text' to be a string, found a number", "--on-bad"),
    (b'{"id": "a", "text": ["x"]}\n', "corpus.jsonl:2: .*found a list", "--on-bad"),
    (b'{"id": "a", "prompt": 1, "response": "x"}\n', "corpus.jsonl:2: .*'prompt' to be a string", "--on-bad"),
    (b'{"id": "a", "messages": "x"}\n', "corpus.jsonl:2: .*a list of {role, content}", "--on-bad"),
    (b'{"id": "a", "messages": []}\n', "corpus.jsonl:2: .*'messages' empty", "--on-bad"),
    (b'{"id": "a", "messages": ["x"]}\n', "corpus.jsonl:2: .*message 1 of 'messages'", "--on-bad"),
    (b'{"id": "a", "messages": [{"role": "user"}]}\n', "corpus.jsonl:2: .*'content' of mess", "--on-bad"),
    (b'{"id": "a", "text": "caf\xe9"}\n', "corpus.jsonl:2: expected UTF-8, found the byte 0xe9", "iconv"),
    (b'{"id": "a", "text": "x\0y"}\n', "corpus.jsonl:2: .*NUL", "--on-bad"),
    (b'{"id": "a", "text": "x\\u0000y"}\n', "corpus.jsonl:2: .*NUL .*'text'", "--on-bad"),
    (b'{"id": "a", "text": "\\ud800"}\n', "corpus.jsonl:2: .*surrogate", "--on-bad"),
    (b'{"id": "a", "text": "' + b"x" * 300_000 + b'"}\n', "corpus.jsonl:2: .*at most 200,000", "--max-"),
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


def test_the_first_ten_skipped_are_told_and_then_a_total(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"id": "a", "text": "x"}, *[{"id": "a", "text": "x"}] * 25])
    told: list[str] = []
    log = ReadLog("skip", told.append)
    assert len(list(read_documents([path], log=log))) == 1
    assert log.skipped == 25
    assert len(told) == 11 and told[-1] == "skipped 25 bad records in all"


def test_the_same_file_twice_has_duplicate_ids(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"id": "a", "text": "x"}])
    with pytest.raises(CorpusError, match=r"'a' again, first at .*corpus.jsonl:1"):
        list(read_documents([path, path]))


def test_ids_of_an_index_are_taken(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"id": "a", "text": "x"}])
    with pytest.raises(CorpusError, match="first at the index that is appended to"):
        list(read_documents([path], known_ids=["b", "a"]))


@pytest.mark.parametrize("data", [b"", b"\n\n", gzip.compress(b"", mtime=0)])
def test_no_document_at_all(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(data)
    with pytest.raises(CorpusError, match="at least one document, found none"):
        list(read_documents([str(tmp_path / "corpus.jsonl")]))


def test_no_document_left_after_skipping(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(b"broken\n")
    with pytest.raises(CorpusError, match=r"found none \(1 bad records were skipped\)"):
        list(read_documents([str(tmp_path / "corpus.jsonl")], log=ReadLog("skip", lambda text: None)))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_a_truncated_archive_is_never_skipped(suffix: str, on_bad: str, tmp_path: Path) -> None:
    data = lines([{"id": number, "text": f"text {number * 7919}"} for number in range(500)])
    whole = gzip.compress(data) if suffix == "gz" else zstandard.compress(data)
    path = tmp_path / f"corpus.jsonl.{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorpusError, match=rf"corpus.jsonl.{suffix}:\d+: .*truncated"):
        list(read_documents([str(path)], ReadOptions(on_bad=on_bad)))


def test_text_files_that_are_none(tmp_path: Path) -> None:
    cases = {
        "a.txt": (b"", "empty"),
        "b.txt": (b"one\ntwo \xff\n", "b.txt:2: expected UTF-8"),
        "c.txt": (b"one\ntwo\nthree \0\n", "c.txt:3: .*NUL"),
        "part-0000": (lines(), "found JSON Lines"),
        "long.txt": (b"x" * 2000, "at most 1,000 bytes"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorpusError, match=message):
            list(read_documents([str(tmp_path / name)], ReadOptions(max_document_bytes=1000)))


def test_parquet_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(CorpusError, match=r"a.parquet:1: .*readable Parquet"):
        list(read_documents([str(path)]))
    parquet.write_table(pyarrow.table({"name": ["x"], "text": ["y"]}), path)
    with pytest.raises(CorpusError, match=r"a.parquet:1: .*'id', found the fields 'name', 'text'"):
        list(read_documents([str(path)]))
    table = pyarrow.table({"id": list(range(1000)), "text": [f"t{n}" for n in range(999)] + [" "]})
    parquet.write_table(table, path)
    with pytest.raises(CorpusError, match=r"a.parquet:1000: .*empty"):
        list(read_documents([str(path)]))
    found = list(read_documents([str(path)], log=ReadLog("skip", lambda text: None)))
    assert [(d.id, d.text) for d in found] == [(str(n), f"t{n}") for n in range(999)]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorpusError, match="readable Parquet"):
        list(read_documents([str(path)]))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stride_cli.errors import MissingExtraError

    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines()))
    (tmp_path / "a.parquet").write_bytes(b"")
    for module, name, extra in (("zstandard", "a.jsonl.zst", "zstd"), ("pyarrow", "a.parquet", "parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError) as error:
            list(read_documents([str(tmp_path / name)]))
        assert error.value.fix == f"pip install 'stride-tda[{extra}]'"


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
