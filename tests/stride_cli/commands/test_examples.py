"""The scripts in examples/, run on a small real index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def test_own_corpus(workspace: Path, tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    stride = tmp_path / "stride"
    stride.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stride_cli "$@"\n')
    stride.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "examples/own_corpus.sh"), str(workspace / "corpus.jsonl"), str(workspace)],
        input="The French Revolution began in\n",
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["documents"][0]["document"] == "history/french-revolution"


def test_ask(workspace: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples/ask.py"),
            str(workspace / "run.stride"),
            "The French Revolution began in",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "1789" in lines[0] and lines[1].strip().startswith("supports")
    assert "history/french-revolution" in lines[1] and "duality gap" in lines[-1]
