"""Prompts of files and stdin: what a line may be, and that a bad one stops no other."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stride_cli.commands.prompts import BadInput, Prompt, answered, count_prompts, read_prompts
from stride_cli.data.query_files import named_file
from stride_cli.errors import QueryError, StrideError, UsageError


def prompts_of(tmp_path: Path, content: bytes) -> list[Prompt]:
    (tmp_path / "prompts.txt").write_bytes(content)
    return list(read_prompts([], tmp_path / "prompts.txt", "stride query"))


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


def test_ids_are_those_of_documents(tmp_path: Path) -> None:
    found = prompts_of(
        tmp_path, b'{"id": 7, "prompt": "a"}\n{"id": "b", "prompt": 3}\n{"id": null, "prompt": "c"}'
    )
    assert [each.id for each in found] == ["7", "b", None]


def test_a_file_without_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QueryError, match="holds no prompt"):
        prompts_of(tmp_path, b"\n \n")
    with pytest.raises(UsageError, match="there is no file"):
        read_prompts([], tmp_path / "gone", "stride query")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(QueryError, match="stdin holds no prompt"):
        list(read_prompts(["-"], None, "stride query"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    """stride query --file <(command)"""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("one\ntwo\n"))
    writer.start()
    assert count_prompts(tmp_path / "pipe") == 0  # how many come is not known
    found = [prompt.asked["prompt"] for prompt in read_prompts([], tmp_path / "pipe", "stride query")]
    writer.join()
    assert found == ["one", "two"]
    with pytest.raises(UsageError, match="is a pipe"):
        named_file(tmp_path / "pipe")


class Session:
    """Answers with the prompt itself; one that is "bad" has no answer."""

    def outcomes(self, prompts: Any, options: Any) -> Any:
        for prompt in list(prompts):  # all are read before the first is answered
            if isinstance(prompt, StrideError):
                yield prompt
            elif prompt["prompt"] == "bad":
                yield QueryError("the prompt is bad", fix="another")
            else:
                yield prompt["prompt"]


def test_outcomes_find_their_prompts(tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    found = prompts_of(tmp_path, b'one\n{}\nbad\n{"id": "x", "prompt": "bad"}\ntwo\n')
    session: Any = Session()
    options: Any = None
    bad = BadInput("record", as_json=True)
    got = [(prompt.line, answer) for prompt, answer in answered(session, found, options, bad, given={})]
    assert got == [(1, "one"), (5, "two")] and bad.count == 3
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["line"], record.get("id")) for record in records] == [(2, None), (3, None), (4, "x")]
    file = f"{tmp_path}/prompts.txt"
    assert records[1] == {
        "schema": "stride.bad_input/1",
        "source": file,
        "line": 3,
        "message": f"{file}:3: the prompt is bad",
        "fix": "another",
    }
    skipping = BadInput("skip", as_json=True)
    assert len(list(answered(session, found, options, skipping, given={}))) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("skipped ") == 3 and f"{file}:3: the prompt is bad" in told.err
    with pytest.raises(QueryError, match=r"prompts\.txt:2: "):
        list(answered(session, found, options, BadInput("error", as_json=True), given={}))


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
