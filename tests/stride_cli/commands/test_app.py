"""The whole command line: quick to start, helpful, quiet in pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

PANELS = ("Ask", "Build", "Check", "Research")


def commands() -> list[str]:
    """Every command, by walking what is registered."""
    from stride_cli.commands.app import command_line

    def walk(command, path: str) -> list[str]:
        if hasattr(command, "commands"):
            return [
                name for key, sub in command.commands.items() for name in walk(sub, f"{path} {key}".strip())
            ]
        return [path]

    return walk(typer.main.get_command(command_line()), "")


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from stride_cli.commands.app import command_line\n"
        "command_line()\n"
        "heavy = {'torch', 'transformers', 'numba', 'zarr', 'scipy', 'pyarrow', 'numpy', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_query_of_an_own_checkpoint_imports_what_it_needs(workspace: Path, run_apart: Any) -> None:
    line = ["query", "Rome", "--index", f"{workspace}/run.stride", "--json", "--read", "1"]
    record, imported = run_apart(*line)
    assert record["read"] == 1
    assert {"torch", "numba"} <= imported
    needless = {
        "transformers", "torch._dynamo", "torch._inductor", "sympy", "triton", "zarr", "pandas", "pyarrow",
        "scipy.optimize", "scipy.stats", "rich", "httpx", "starlette", "huggingface_hub", "datasets",
    }  # fmt: skip
    assert not imported & needless


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help_that_ends_in_an_example(run, command: str) -> None:
    result = run(f"{command} --help")
    assert result.code == 0
    tail = result.out.strip().splitlines()
    assert any(line.strip().startswith("Example") for line in tail)
    assert "stride " in tail[-1] and tail[-1].startswith("  "), tail[-1]


def section(text: str, title: str) -> list[str]:
    """The rows of one panel of a help text, each beginning with the names of what it describes."""
    body = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in body.splitlines() if line.startswith("  ") and line[2] != " "]


def test_help_lists_commands_in_groups_each_description_whole(run) -> None:
    from stride_cli.commands.app import command_line

    def walk(group) -> None:
        for name, command in group.commands.items():
            short = command.get_short_help_str(60)
            assert len(short) <= 60 and short == command.get_short_help_str(500), name
            if hasattr(command, "commands"):
                walk(command)

    root = typer.main.get_command(command_line())
    walk(root)
    text = run("--help").out
    listed = {title: [row.split()[0] for row in section(text, title)] for title in PANELS}
    assert [text.index(f"\n{title}:") for title in PANELS] == sorted(text.index(f"\n{p}:") for p in PANELS)
    assert {name for names in listed.values() for name in names} == set(root.commands)
    assert "query" in listed["Ask"] and "index" in listed["Build"] and "audit" in listed["Check"]
    for name, command in root.commands.items():
        assert f"{name} " in text and f"  {command.short_help}\n" in text  # on one line
