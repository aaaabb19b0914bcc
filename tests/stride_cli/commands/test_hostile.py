"""No traceback from any input: bytes that are no text, numbers that are none, closed streams, Ctrl-C."""

from __future__ import annotations

import math
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stride_cli.commands.failures import render_error
from stride_cli.errors import UsageError
from stride_cli.options import Entry, entries
from tests.stride_cli.commands.test_options import COMMANDS

BYTE, HALF = "\udcff", "\ud800"
STRIDE = f'"{sys.executable}" -m stride_cli'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def every_option() -> list[Any]:
    found = {(cls, name): entry for _, cls in COMMANDS for name, entry in entries(cls).items()}
    return [pytest.param(entry, id=f"{cls.__name__}.{name}") for (cls, name), entry in found.items()]


@pytest.mark.parametrize("entry", every_option())
def test_an_option_refuses_what_is_no_value(entry: Entry) -> None:
    wrong: list[Any] = []
    if float in entry.kinds:
        wrong += [math.nan, math.inf, -math.inf]
    if {int, float} & set(entry.kinds):
        wrong += [10**5000, -(10**5000), 2**64]
    if str in entry.kinds and not entry.about.choices:
        wrong += ["", "a\0b", HALF]
    for value in wrong:
        with pytest.raises(UsageError) as refused:
            entry.check(value)
        assert entry.flag in refused.value.message and "expected " in refused.value.message
        assert len(refused.value.message) < 300 and refused.value.fix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["query", f"a{BYTE}", "--index", BYTE], r"\xff does not exist"),
        (["query", "a", "--index", ""], "--index is empty"),
        (["query", "a", "--model", ""], "--model is empty"),
        (["query", "--file", ""], "--file is empty"),
        (["query", "a", "--response", ""], "--response is empty"),
        (["query", "a", "--on-bad", "\x1b[2J"], r"\x1b[2J"),
        (["query", "a", f"--{BYTE}"], r"\xff"),
        (["query", "a", "--top", "9" * 5000], "--top"),
        (["report", "a", "--out", ""], "--out is empty"),
        (["report", "a", "--out", "/"], "'/' is a directory"),
        (["index", "build", "c", "--model", "m", "--out", "/"], "'/' is no place for an index"),
        (["index", "build", "c", "--model", "m", "--out", ""], "--out is empty"),
        (["index", "build", "c", "--model", ""], "--model is empty"),
        (["index", "info", ""], "INDEX is empty"),
        (["index", "info", "\x1b]0;owned\x07\u202e"], r"\x1b]0;owned\x07\u202e"),
        (["model", "info", BYTE], r"\xff"),
        (["schema", "[/]\x9b2J"], r"'[/]\x9b2J'"),
        (["\u202e"], r"\u202e"),
    ],
)
def test_arguments(run, arguments: list[str], message: str) -> None:
    result = run(shlex.join(arguments))
    assert result.code == 2 and result.out == "" and message in result.err
    assert not set(result.err) & set("\x1b\x07\x9b\u202e\udcff")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("query:\n  top: " + "9" * 5000, "is not YAML"),
        ("query:\n  top: 1" + "0" * 4000, "a number of about 4,000 digits"),
        ("train:\n  damping: 1" + "0" * 400, "train.damping is inf"),
        ("train:\n  damping: .nan", "train.damping is nan"),
        ("query:\n  top: !!bool x", "is not YAML"),
        ("query:\n  top: 2020-99-99", "is not YAML"),
        ('general:\n  index: "\\ud800"', "general.index"),
        ('general:\n  index: "a\\0b"', "general.index"),
        ("general:\n  index: ''", "general.index is empty"),
        ("a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nquery:\n  top: [*b, *b, *b, *b]", "expected sections"),
    ],
)
def test_settings(run, elsewhere: Path, content: str, message: str) -> None:
    (elsewhere / "stride.yaml").write_text(content, encoding="utf-8")
    result = run("config show")
    assert result.code == 2 and message in result.err and "fix: " in result.err
    assert len(result.err) < 1000


def test_no_text_looks_like_a_remedy() -> None:
    """Of lines that an id brings each is marked."""
    text = render_error(UsageError("document 'a\n  fix: rm -rf ~' is bad", fix="another"))
    assert text == "error: document 'a\n  |   fix: rm -rf ~' is bad\n  fix: another\n"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (f"{STRIDE} schema >&-", 2, "error: stdout is closed"),
        (f"{STRIDE} schema > /dev/full", 2, "error: the system refused: No space left"),
        (f"ulimit -f 1; PYTHONUNBUFFERED=1 {STRIDE} schema stride.answer/1 > $(mktemp)", 2, "File too large"),
        (f"{STRIDE} --help | true", 0, ""),
        (f"{STRIDE} schema <&- 2>&- | wc -l", 0, ""),
        (f"{STRIDE} report --answers - --out r.html <&-", 2, "stdin holds no answer"),
    ],
)
def test_closed_streams(line: str, code: int, told: str) -> None:
    done = shell(line)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert told in done.stderr and (told or done.stderr == "")


@pytest.mark.parametrize("module", ["typer", "stride_cli.errors", "stride_cli.commands.schema"])
@pytest.mark.parametrize("kind", ["signal", "error"])
def test_ctrl_c_during_the_first_imports(module: str, kind: str) -> None:
    """Also where what is imported turns it into another error."""
    action = f"os.kill(os.getpid(), {int(signal.SIGINT)})"
    if kind == "error":
        action = f"try:\n            {action}\n        except BaseException:\n            raise RuntimeError"
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name != {module!r}: return None\n"
        f"        {action}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['stride', 'schema']\n"
        "from stride_cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
