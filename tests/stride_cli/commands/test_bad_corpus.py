"""A corpus that cannot be read ends a command with file, line, remedy and exit code 2; nothing is written."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

RECORD = b'{"id": "a", "text": "some words"}\n'
FILES = {
    "latin.jsonl": RECORD + b'{"id": "b", "text": "caf\xe9"}\n',
    "cut.jsonl.gz": gzip.compress(RECORD)[:-9],
    "bomb.jsonl.gz": gzip.compress(b"0" * (4 << 20)) * 25,
    "table.parquet": b"PAR1 and no more",
    "book.jsonl.xz": b"",
}


@pytest.mark.parametrize(
    ("corpus", "message", "fix"),
    [
        ("latin.jsonl", "latin.jsonl:2: expected UTF-8, found the byte 0xe9", "--on-bad skip"),
        ("cut.jsonl.gz", "cut.jsonl.gz:1: expected a whole archive", "gzip -t"),
        ("bomb.jsonl.gz --on-bad skip", "over 1,000 times", "zcat"),
        ("table.parquet", "table.parquet:1: expected a readable Parquet file", "again"),
        ("book.jsonl.xz", "found '.xz'", "xz -dc"),
        ("/dev/zero", "/dev/zero:1: expected a line of at most", "--max-document-bytes"),
    ],
)
def test_refused(run, tmp_path: Path, monkeypatch, corpus: str, message: str, fix: str) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    result = run(f"model train {corpus} --out model --device cpu")
    assert result.code == 2, result.err
    assert message in result.err and fix in result.err.partition("fix: ")[2] and result.out == ""
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
