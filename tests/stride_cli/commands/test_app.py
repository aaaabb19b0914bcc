"""The whole command line: quick to start, helpful, quiet in pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer


def commands() -> list[str]:
    """Every command, by walking what is registered."""
    from stride_cli.commands.app import app

    def walk(command, path: str) -> list[str]:
        if hasattr(command, "commands"):
            return [
                name for key, sub in command.commands.items() for name in walk(sub, f"{path} {key}".strip())
            ]
        return [path]

    return walk(typer.main.get_command(app), "")


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys, stride_cli.commands.app\n"
        "heavy = {'torch', 'transformers', 'numba', 'zarr', 'scipy', 'pyarrow', 'numpy', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help_that_ends_in_an_example(run, command: str) -> None:
    result = run(f"{command} --help")
    assert result.code == 0
    tail = result.out.strip().splitlines()
    assert any(line.strip().startswith("Example") for line in tail)
    assert "stride " in tail[-1] and tail[-1].startswith("  "), tail[-1]


def test_version(run) -> None:
    from stride_cli import __version__

    assert run("--version").out == f"stride {__version__}\n"


@pytest.mark.parametrize("line", ["nonsense", "index nonsense", "query --no-such-flag", "model train"])
def test_usage_errors_exit_with_2(run, line: str) -> None:
    result = run(line)
    assert result.code == 2 and result.out == ""


def test_without_an_index_here_the_error_says_how_to_get_one(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run('query "x"')
    assert result.code == 2 and "stride index build" in result.err
    (tmp_path / "a.stride").mkdir()
    (tmp_path / "b.stride").mkdir()
    result = run('query "x"')
    assert result.code == 2 and "a.stride, b.stride" in result.err


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -m stride_cli schema | head -1 > {os.devnull}'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""


def test_config_show_names_sources(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRIDE_QUERY_TOP", "7")
    records = {record["key"]: record for record in run("config show").records}
    assert records["query.top"] == {
        "schema": "stride.setting/1",
        "key": "query.top",
        "value": 7,
        "source": "STRIDE_QUERY_TOP",
    }
    assert records["query.bottom"]["source"] == "default"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stride_cli", "--debug", "index", "info", str(tmp_path / "no.stride")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_schema_of_an_unknown_record(run) -> None:
    result = run("schema nothing/9")
    assert result.code == 2 and "stride.answer/1" in result.err
