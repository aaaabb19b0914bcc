"""Shell completion, as shells ask for it: by the environment, one process a Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stride_cli.commands import completion


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_ask_with_a_line(run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    asked = {
        "_STRIDE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "stride train --recipe ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    found = run("").out
    assert "paper" in found


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


def test_what_is_offered_is_what_is_accepted() -> None:
    from stride_cli.models.classifier.classifier_recipe import OPTIMIZERS, SCHEDULES
    from stride_cli.models.classifier.networks import NETWORKS
    from stride_cli.models.language.bpe import SMALLEST_VOCABULARY
    from stride_cli.operators.closed import CURVATURES
    from stride_cli.operators.options import FLAT
    from stride_cli.operators.spaces import SPACES
    from stride_cli.options import entries
    from stride_cli.research.paper.losses import STABILITY_VARIANTS
    from stride_cli.training.options import ClassifierOptions, TrainOptions

    fit, train = entries(*FLAT), entries(TrainOptions)
    assert set(fit["curvature"].about.choices) == set(CURVATURES)
    assert set(fit["variant"].about.choices) == set(STABILITY_VARIANTS)
    assert set(completion.SPACES) == set(SPACES)
    examples = entries(ClassifierOptions)
    assert set(examples["network"].about.suggest) == set(NETWORKS)
    assert examples["optimizer"].about.choices == OPTIMIZERS
    assert examples["schedule"].about.choices == SCHEDULES
    assert train["vocab"].about.low == SMALLEST_VOCABULARY


def test_indexes_complete_below_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/a.stride").mkdir(parents=True)
    (tmp_path / "runs/a.stride/zarr.json").touch()
    (tmp_path / "runs/.hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completion.complete_index("") == ["runs/"]
    assert completion.complete_index("runs/") == ["runs/a.stride"]
    assert completion.complete_index(f"{tmp_path}/runs/a") == [f"{tmp_path}/runs/a.stride"]
    assert completion.complete_index("nowhere/x") == []
