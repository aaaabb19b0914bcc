"""The whole command line: quick to start, helpful, quiet in pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer


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
