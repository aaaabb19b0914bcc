"""What is no corpus is named by file and line with a remedy and exit code 2, and nothing is written."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

RECORD = '{"id": "a", "text": "some words"}\n'
FILES = {
    "utf16.jsonl": RECORD.encode("utf-16"),
    "latin.jsonl": RECORD.encode() + b'{"id": "b", "text": "caf\xe9"}\n',
    "plain.jsonl.gz": RECORD.encode(),
    "cut.jsonl.gz": gzip.compress(RECORD.encode())[:-9],
    "line.jsonl.gz": gzip.compress(b"0" * (17 << 20)),
    "bomb.jsonl.gz": gzip.compress(b"0" * (4 << 20)) * 25,
    "deep.jsonl": b'{"id": "a", "text": ' + b"[" * 100_000 + b"\n",
    "digits.jsonl": b'{"id": ' + b"9" * 5000 + b', "text": "x"}\n',
    "half.jsonl": b'{"id": "a", "text": "\\ud800"}\n',
    "twice.jsonl": b'{"id": "a", "text": "x", "text": "y"}\n',
    "carriage.jsonl": RECORD.replace("\n", "\r").encode() * 2,
    "table.parquet": b"PAR1 and no more",
    "book.jsonl.xz": b"",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "link.jsonl").symlink_to("nowhere.jsonl")
    (folder / "directory").mkdir()
    return folder


@pytest.mark.parametrize(
    ("corpus", "message", "fix"),
    [
        ("utf16.jsonl", "utf16.jsonl:1: expected UTF-8, found UTF-16", "iconv -f UTF-16"),
        ("latin.jsonl", "latin.jsonl:2: expected UTF-8, found the byte 0xe9", "--on-bad skip"),
        ("plain.jsonl.gz", "plain.jsonl.gz:1: expected gzip data", "suffix"),
        ("cut.jsonl.gz", "cut.jsonl.gz:1: expected a whole archive", "gzip -t"),
        ("line.jsonl.gz", "line.jsonl.gz:1: expected a line of at most 16,777,216 bytes", "--max-document-"),
        ("bomb.jsonl.gz --on-bad skip", "over 1,000 times", "zcat"),
        ("deep.jsonl", "deep.jsonl:1: expected a JSON object", "--on-bad skip"),
        ("digits.jsonl", "digits.jsonl:1: ", "--on-bad skip"),
        ("half.jsonl", "half.jsonl:1: expected text that is valid Unicode", "--on-bad skip"),
        ("twice.jsonl", "twice.jsonl:1: expected each field once", "--on-bad skip"),
        ("carriage.jsonl", "carriage.jsonl:1: ", "tr "),
        ("table.parquet", "table.parquet:1: expected a readable Parquet file", "again"),
        ("book.jsonl.xz", "found '.xz'", "xz -dc"),
        ("link.jsonl", "found a symbolic link to nothing: nowhere.jsonl", "ls -l"),
        ("directory", "found a directory", "directory/*.jsonl"),
        ("/dev/zero", "/dev/zero:1: expected a line of at most", "--max-document-bytes"),
    ],
)
def test_refused(
    run, place: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, message: str, fix: str
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    result = run(f"model train {corpus} --out model --device cpu")
    assert result.code == 2, result.err
    remedy = result.err.partition("fix: ")[2]
    assert message in result.err and fix in remedy and result.out == ""
    assert sorted(place.rglob("*")) == before
