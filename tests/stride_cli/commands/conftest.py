"""The command line in this process, and a small real run: trained model, index, operators."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.kept import kept, own_copy

DEMO = Path(__file__).parents[3] / "stride_cli" / "demo"


@dataclass(frozen=True)
class Outcome:
    """What a command line left: exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


def run_stride(line: str, *, stdin: str = "") -> Outcome:
    """`stride LINE` through `main`, as the console script calls it; NAME=VALUE before it are settings."""
    from stride_cli.__main__ import main

    words, settings = shlex.split(line), {}
    while words and words[0].startswith("STRIDE_"):
        name, _, settings[name] = words.pop(0).partition("=")
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(sys, "argv", ["stride", *words]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape")))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert "Traceback" not in err.getvalue()
    return Outcome(int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def run_apart() -> Callable[..., tuple[dict, set[str]]]:
    """A command in a process of its own: the record that it prints, and the modules that it has imported."""
    code = (
        "import sys\n"
        "from stride_cli.commands import app\n"
        "try:\n"
        "    app.main()\n"
        "finally:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )

    def run(*line: str) -> tuple[dict, set[str]]:
        done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=True)
        return json.loads(done.stdout), set(done.stderr.split())

    return run


@pytest.fixture(scope="session")
def run() -> Callable[..., Outcome]:
    return run_stride


def trained_workspace(folder: Path) -> None:
    """Fill it with corpus.jsonl (60 documents of the demo corpus), model, run.stride with operators."""
    lines = (DEMO / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if json.loads(line)["id"].startswith("history/")][:60]
    if not any('"history/french-revolution"' in line for line in wanted):
        wanted[0] = next(line for line in lines if '"history/french-revolution"' in line)
    (folder / "corpus.jsonl").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    commands = (
        f"model train {folder}/corpus.jsonl --out {folder}/model --epochs 20 --layers 2 --width 64 "
        "--vocab 1024",
        f"index build {folder}/corpus.jsonl --model {folder}/model --out {folder}/run.stride",
        f"train --index {folder}/run.stride --nulls 100",
    )
    for command in commands:
        result = run_stride(command)
        assert result.code == 0, result.err


@pytest.fixture(scope="session")
def workspace(kept_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `trained_workspace` of one's own."""
    return own_copy(kept(kept_home, trained_workspace), tmp_path_factory.mktemp("own") / "workspace")


@pytest.fixture
def grown(workspace: Path, tmp_path: Path) -> Path:
    """A copy of run.stride with a document, "new", that neither the model nor the operators have seen."""
    copy = Path(shutil.copytree(workspace / "run.stride", tmp_path / "grown.stride"))
    more = {"id": "new", "text": "The French Revolution began in 1789, they say."}
    (tmp_path / "more.jsonl").write_text(json.dumps(more) + "\n")
    appended = run_stride(f"index append {tmp_path}/more.jsonl --index {copy}")
    # without --overwrite, stride train says that there are operators already
    assert appended.code == 0 and appended.err.endswith(f"; next: stride train --index {copy} --overwrite\n")
    return copy


@pytest.fixture
def few_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen chunks are read for a prompt, not all: reading is most of the time that a query takes."""
    monkeypatch.setenv("STRIDE_QUERY_READ", "15")


@pytest.fixture
def as_by_default(few_read: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of `few_read`: as many are read as by default, here all."""
    monkeypatch.delenv("STRIDE_QUERY_READ")


@contextlib.contextmanager
def one_is_killed(workers: Callable[[], list[int]]) -> Iterator[None]:
    """The first worker that there is, as soon as there is one."""
    killed: list[int] = []

    def kill_one() -> None:
        while not (found := workers()):
            time.sleep(0.002)
        os.kill(found[0], signal.SIGKILL)
        killed.append(found[0])

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    yield
    killer.join(10)
    assert killed
