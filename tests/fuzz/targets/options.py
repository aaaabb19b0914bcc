"""Any option of any command, with any value: an answer or a remedy, soon, and nothing written elsewhere.

Commands run in this process, in a scratch directory with a copy of a small index, its model and its corpus.
Those that would take long (they train) are given an index and a corpus that do not exist, so that their
options are read and no more; `stride demo` is left out. What would be written outside the scratch directory
is refused before it is (an audit hook of the interpreter), and a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz import trying
from tests.fuzz.targets.indexes import SECRET, sample

_LONG = ("tune", "verify-hit", "train", "calibrate", "model train", "model finetune", "evaluate")
_LEFT_OUT = ("demo",)
# run a shell, reach for a network, or end in a shell's configuration
_NEVER = ("--command", "--install-completion", "--show-completion", "--help")
_NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "3", "0.5", "1e-300", "1e400", str(10**400), str(2**64),
    "-0.0", "٣", "1_0", "0x10",
)  # fmt: skip
_FINE = (
    "0",
    "1",
    "2",
    "3",
    "5",
    "0.1",
    "0.5",
    "prompts.jsonl",
    "corpus.jsonl",
)  # mostly a value of some kind
_TEXTS = (
    "", " ", "\x00", "a\x00b", "\ud800", "\udcff", "[red]", "[/]", "\x1b[31m", "\u202e", "{}", '{"a": [1]}',
    "[[[[", "x" * 5000, "true", "None", "--top", "-", "%s", "$HOME", "a,b", "a=b", "stride:read=0",
    "tfidf:x=1", "漢字", "é" * 300,
)  # fmt: skip
_PATHS = (
    "absent", "absent/x", ".", "..", "../..", "../x", "corpus.jsonl", "prompts.jsonl", "run.stride", "model",
    "run.stride/operators", "corpus.jsonl/x", "loop", "dangling", "\udcff.jsonl", "n" * 300, "p/" * 3000, "~",
    "file:x",
)  # fmt: skip
_WORDS = (
    "linear", "exact", "auto", "closed", "sgd", "paper", "cpu", "cuda", "cuda:99", "fp32", "bf16", "skip",
    "record", "error", "tfidf", "bm25", "pairs", "chance", "stride", "docs", "html", "csv", "json", "sarif",
    "local", "ray", "documents",
)  # fmt: skip
_SENTENCE = "The French Revolution began in"
_USUAL = {
    "--model": "model", "--out": "out", "--file": "prompts.jsonl", "--queries": "prompts.jsonl",
    "--read": "0", "--size": "5", "--device": "cpu", "--chunks": "3",
    "--controls": "prompts.jsonl", "--title": "x",
    "--methods": "tfidf",
}  # fmt: skip
_SOON = (
    "--index",
    "--model",
    "--out",
    "--read",
    "--size",
)  # without which it is another command, or takes long
_FIRST = {
    "query": _SENTENCE, "report": _SENTENCE, "verify-hit": _SENTENCE, "audit": "prompts.jsonl",
    "baseline": "tfidf", "select": "prompts.jsonl", "schema": "stride.answer/1", "index export": "documents",
    "model info": "model",
    "evaluate selection": "absent",
}  # fmt: skip
_CODES = (0, 1, 2, 3, 130)


class Escaped(BaseException):
    """Something outside the scratch directory would be written; not for the program to handle."""


def options(r: random.Random) -> None:
    """One command line."""
    with _scratch() as home:
        here = home / "a" / "b"
        line = _command_line(r)
        settings, environment = _settings(r, here)
        trying(json.dumps([line, settings, environment]).encode())
        code, out, err = _run(line, home, here, environment)
        assert code in _CODES, f"exit code {code}: {err[-500:]}"
        assert "Traceback" not in err, err[-2000:]
        if code in (2, 3):
            assert "\n  fix: " in err or "for help" in err or "skipped" in err or "bad_input" in out, (
                f"no remedy: {err!r}"
            )
        assert len(err) < 20_000, f"{len(err)} characters on stderr: {err[:200]!r}"
        assert not set(err) & set("\x1b\x00\x9b\u202e\ud800\udcff"), f"controls are shown: {err!r}"
        _check_records(out)
        for place in (home, home / "a", here):
            assert (place / "thesis.txt").read_bytes() == SECRET, f"a victim in {place}"


TARGETS = {"options": options}


def _run(line: list[str], home: Path, here: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    from stride_cli.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    own = {
        "HOME": str(home / "home"),
        "TMPDIR": str(home / "temporary"),
        "XDG_CACHE_HOME": str(home / "home" / "cache"),
        "XDG_STATE_HOME": str(home / "home" / "state"),
        "XDG_CONFIG_HOME": str(home / "home" / "config"),
        "HF_HUB_OFFLINE": "1",
        "STRIDE_NO_PROGRESS": "1",
    }
    before = Path.cwd()
    os.chdir(here)
    try:
        with (
            mock.patch.dict(os.environ, own | environment),
            mock.patch.object(tempfile, "tempdir", str(home / "temporary")),
            mock.patch.object(sys, "argv", ["stride", *line]),
            mock.patch.object(sys, "stdin", io.StringIO("The French Revolution began in\n")),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            _guard.within(home),
        ):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
            else:
                code = 0
    finally:
        os.chdir(before)
    assert not _guard.refused, f"would have written {_guard.refused}"
    return code, out.getvalue(), err.getvalue()


def _command_line(r: random.Random) -> list[str]:
    """A command that could be meant, with one to four of its options, or its arguments, hurt."""
    long = r.random() < 0.25
    name = r.choice(sorted(each for each in _commands() if _is_long(each) == long))
    index, corpus = ("absent.stride", "absent.jsonl") if long else ("run.stride", "corpus.jsonl")
    known = {max(each.opts, key=len): each for each in _commands()[name] if each.param_type_name == "option"}
    values: dict[str, list[str]] = {}
    for option, value in {"--index": index, **_USUAL}.items():
        if option in known and r.random() < (0.97 if known[option].required or option in _SOON else 0.4):
            values[option] = [value]
    takes = any(each.param_type_name == "argument" for each in _commands()[name])
    # their arguments are in place of --index, or there to be refused
    takes &= name not in ("train", "index info", "index verify")
    arguments = [_FIRST.get(name, corpus)] if takes else []
    if r.random() < 0.15:
        arguments = r.choice(([], [_value(r)], [*arguments, _value(r)]))
    choices = sorted(option for option in known if option not in _NEVER)
    if arguments and r.random() < 0.8:
        values.pop("--file", None)  # which is in place of them
    for option in r.sample(choices, min(len(choices), r.choice((1, 1, 1, 2, 4)))):
        values[option] = [] if known[option].is_flag else [_value(r)]
    if long:  # whatever else is hurt, nothing is trained
        arguments = arguments and [corpus]
        values |= {"--index": [index]} if "--index" in known else {}
    words = [word for option, given in sorted(values.items()) for word in (option, *given)]
    if r.random() < 0.05:
        words.append("--" + _value(r))
    return [*name.split(), *(words + arguments if r.random() < 0.5 else arguments + words)]


def _is_long(name: str) -> bool:
    return name in _LONG or name.split()[0] in _LONG


def _value(r: random.Random) -> str:
    return r.choice(r.choice((_NUMBERS, _FINE, _FINE, _TEXTS, _PATHS, _WORDS)))


def _settings(r: random.Random, here: Path) -> tuple[str, dict[str, str]]:
    """Now and then a stride.yaml, or a variable, that says something odd."""
    text, environment = "", {}
    if r.random() < 0.15:
        section, _, name = r.choice(_keys()).partition(".")
        text = f"{section}:\n  {name}: {r.choice((json.dumps(_value(r)), _value(r)))}\n"
        # bytes that are no UTF-8 where a value has some
        (here / "stride.yaml").write_bytes(text.replace("\ud800", "").encode("utf-8", "surrogateescape"))
    if r.random() < 0.15:
        value = _value(r).replace("\0", "").replace("\ud800", "")
        environment["STRIDE_" + r.choice(_keys()).replace(".", "_").upper()] = value
    return text, environment


def _check_records(out: str) -> None:
    """What stdout got is one JSON document, or one a line, where it looks like any."""
    if not out.startswith("{"):
        return
    try:
        json.loads(out)
    except ValueError:
        for line in out.splitlines():
            json.loads(line)


@cache
def _commands() -> dict[str, list[Any]]:
    """Every command but those left out, with its parameters."""
    import typer

    from stride_cli.commands.app import command_line

    found: dict[str, list[Any]] = {}

    def add(command: Any, name: str) -> None:
        for word, each in getattr(command, "commands", {}).items():
            add(each, f"{name} {word}".strip())
        if not hasattr(command, "commands") and name not in _LEFT_OUT:
            found[name] = command.params

    add(typer.main.get_command(command_line()), "")
    return found


@cache
def _keys() -> list[str]:
    from stride_cli.config import settings

    return [
        each["key"]
        for each in settings()
        if each["key"] not in ("general.allow_download", "general.trust_code")
    ]


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory for one try; what a command is run in is two below it."""
    whole = sample()
    with tempfile.TemporaryDirectory(prefix="stride-options-") as folder:
        home = Path(folder).resolve()
        here = home / "a" / "b"
        here.mkdir(parents=True)
        for name in ("home", "temporary"):
            (home / name).mkdir()
        for place in (home, home / "a", here):
            (place / "thesis.txt").write_bytes(SECRET)
        whole.copy(here)
        shutil.copytree(whole.home / "model", here / "model")
        lines = (whole.home / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (here / "corpus.jsonl").write_text("".join(lines[:5]), encoding="utf-8")
        asked = (
            {"id": "a", "prompt": "The French", "response": " Revolution", "text": "The French Revolution"},
        )
        (here / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
        (here / "loop").symlink_to("loop")
        (here / "dangling").symlink_to("nowhere")
        yield home


class _Guard:
    """Refuses, while it is set, what would be written outside a directory.

    An audit hook of the interpreter's, which cannot be taken away again. It sees what Python opens, makes,
    moves and removes; not what libraries do by themselves.
    """

    def __init__(self) -> None:
        self._home: str | None = None
        self._set = False
        self.refused: list[str] = []

    @contextlib.contextmanager
    def within(self, home: Path) -> Iterator[None]:
        from stride_cli.startup import kernel_cache

        self._allowed = (f"{home}/", f"{kernel_cache()}/", "/dev/null", "/dev/tty")
        if not self._set:
            self._set = True
            sys.addaudithook(self._look)
        self.refused.clear()
        self._home = str(home)
        try:
            yield
        finally:
            self._home = None

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._home is None:
            return
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                self._refuse(event, path, -1)
        elif event in (
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "os.truncate",
            "os.chmod",
            "os.chown",
            "shutil.rmtree",
        ):
            directory = arguments[-1] if event in ("os.mkdir", "os.remove", "os.rmdir") else -1
            self._refuse(event, arguments[0], directory)
        elif event == "os.rename":
            self._refuse(event, arguments[0], arguments[2])
            self._refuse(event, arguments[1], arguments[3])
        elif event in ("os.link", "os.symlink"):
            self._refuse(event, arguments[1], arguments[-1])
        elif event in ("subprocess.Popen", "os.system", "os.exec"):
            self._told(event, str(arguments[0]))

    def _refuse(self, event: str, path: Any, directory: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor: it was opened before
        name = os.fsdecode(path)
        if isinstance(directory, int) and directory >= 0:
            name = str(Path(f"/proc/self/fd/{directory}").readlink() / name)
        whole = Path(os.path.realpath(Path(name).parent), Path(name).name)
        if not f"{whole}/".startswith(self._allowed) and whole.parent.name != "__pycache__":
            self._told(event, str(whole))

    def _told(self, event: str, what: str) -> None:
        self.refused.append(f"{event} {what}")
        raise Escaped(f"{event} {what}")


_guard = _Guard()
PREPARE = sample
