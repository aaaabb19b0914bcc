"""Shell completion, as shells ask for it: by the environment, one process a Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bash_completes(tmp_path: Path) -> None:
    """A real bash, with the script as --show-completion prints it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "stride").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stride_cli "$@"\n')
    (tools / "stride").chmod(0o755)
    (tmp_path / "one.stride").mkdir()
    (tmp_path / "one.stride/zarr.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "oil.txt").touch()
    lines = {
        "ev": ["evaluate"],
        "evaluate comp": ["compare"],
        "query --resp": ["--response"],
        "query --dtype ": ["auto", "fp32", "bf16"],
        "train --space residual+res": ["residual+residual-matrix"],
        "audit --format s": ["sarif"],
        "evaluate compare --methods bm25,tf": ["bm25,tfidf"],
        "query --index o": ["one.stride", "other/"],
        "schema stride.model": ["stride.model/1", "stride.model_info/1"],
    }
    typed = [line + ("''" if line.endswith(" ") else "") for line in lines]
    asking = "".join(
        f"COMP_WORDS=(stride {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); "
        '_stride_completion stride; echo "${COMPREPLY[*]}"\n'
        for line in typed
    )
    show = 'eval "$(stride --show-completion)"\ncomplete -p stride\n'
    done = subprocess.run(
        ["bash", "--norc", "-c", show + asking],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    first, *answers = done.stdout.splitlines()
    assert "_stride_completion stride" in first, done.stderr
    assert dict(zip(lines, (answer.split() for answer in answers), strict=True)) == lines, done.stderr
