"""Prompts of files and stdin: what a line may be, and that a bad one stops no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.commands.prompts import Prompt, read_prompts
from stride_cli.errors import QueryError


def prompts_of(tmp_path: Path, content: bytes) -> list[Prompt]:
    (tmp_path / "prompts.txt").write_bytes(content)
    return list(read_prompts([], tmp_path / "prompts.txt"))


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (b"The war of", "The war of"),
        (b'"The war of"', "The war of"),
        (b'"one\\ntwo"', "one\ntwo"),
        (b'"To be," he said', '"To be," he said'),
        (b"[INST] who [/INST]", "[INST] who [/INST]"),
        (b"1984 was", "1984 was"),
        (b"NaN", "NaN"),
        (b"1984", "1984"),
        (b"\xef\xbb\xbfThe war of", "The war of"),
        (b'\xef\xbb\xbf{"prompt": "The war of"}\r\n', "The war of"),
    ],
)
def test_what_a_line_asks(tmp_path: Path, line: bytes, prompt: str) -> None:
    (found,) = prompts_of(tmp_path, line)
    assert found.asked == {"prompt": prompt} and found.line == 1 and found.id is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "broken JSON"),
        (b'{"prompt": "a", "id": NaN}', "NaN is no JSON number"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"prompt": ["a"]}', "'prompt' is a list"),
        (b'{"prompt": "a", "span": 1}', "'span' is a number"),
        (b'{"prompt": "a", "id": [1]}', "'id' is a list"),
        (b'{"prompt": "a", "id": "\\ud800"}', "'id' has half of a surrogate pair ('\\ud800')"),
        (b'{"prompt": "a", "response": "\\udc00"}', "'response' has half of a surrogate pair"),
        (b'{"prompt": "a\\u0000"}', "'prompt' contains a NUL"),
        (b'{"prompt": "a\xff"}', "'prompt' is not UTF-8 (found the byte 0xff)"),
        (b"\xff\xfeT\x00", "is not UTF-8 (found the byte 0xff)"),
        (b'{"text": "a"}', "there is no 'prompt' (found text)"),
    ],
)
def test_what_cannot_be_asked_is_named_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    found = prompts_of(tmp_path, b"good\n\n" + line + b"\nalso good\n")
    assert [each.line for each in found] == [1, 3, 4]
    bad = found[1].asked
    assert isinstance(bad, QueryError) and bad.fix
    assert bad.message.startswith(f"{tmp_path}/prompts.txt:3: ") and message in bad.message


def test_one_bad_prompt_stops_no_other(run, workspace: Path, tmp_path: Path) -> None:
    """Those that are bad only once they are tokenised, too; what is read together keeps its order."""
    lines = [
        "The French Revolution began in",
        "word " * 600,
        '{"id": "s", "prompt": "The", "response": "war", "span": "peace"}',
        "{}",
        "The Berlin Wall fell in",
    ]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    line = f"query --file {file} --index {workspace}/run.stride --top 1 --read 10"
    recorded = run(f"{line} --on-bad record")
    assert recorded.code == 2 and "recorded 3 bad prompts" in recorded.err
    kinds = [record["schema"] for record in recorded.records]
    assert kinds == ["stride.answer/1", *["stride.bad_input/1"] * 3, "stride.answer/1"]
    assert [record["line"] for record in recorded.records[1:4]] == [2, 3, 4]
    assert recorded.records[2]["id"] == "s" and "span" in recorded.records[2]["message"]
    stopped = run(line)
    assert stopped.code == 2 and len(stopped.records) == 1 and f"{file}:2: the query has" in stopped.err
