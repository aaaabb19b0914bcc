"""examples/attribution.ipynb: `python -m tests.notebook` runs its cells and stores what they give today."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "attribution.ipynb"


def read() -> list[dict[str, Any]]:
    """The cells, each with its source as one string."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def execute(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression, as a notebook shows them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        value = (
            None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
        )
    return printed.getvalue(), value


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number, started = 0, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                printed, value = execute("".join(cell["source"]), names)
                cell["execution_count"] = number
                cell["outputs"] = _outputs(printed, value, number)
                print(printed, end="", file=sys.stderr)
        os.chdir(started)
    NOTEBOOK.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _outputs(printed: str, value: Any, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        plain = f"<{type(value).__name__}>"
        data = {"text/html": value._repr_html_().splitlines(keepends=True), "text/plain": [plain]}
        found.append(
            {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return found


if __name__ == "__main__":
    main()
