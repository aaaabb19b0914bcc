"""The notebooks of examples/: `python -m tests.notebook [NAME …]` runs the cells of all of them, or of those
that are named, and stores what they give today."""

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

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("attribution", "habit", "leak")


def place(name: str) -> Path:
    return EXAMPLES / f"{name}.ipynb"


def read(name: str) -> list[dict[str, Any]]:
    """The cells, each with its source as one string."""
    notebook = json.loads(place(name).read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def stored(name: str) -> str:
    """All that its cells have printed."""
    outputs = [output for cell in read(name) for output in cell.get("outputs", [])]
    return "".join(text for output in outputs for text in output.get("text", []))


def execute(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression, as a notebook shows them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "notebook", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
    return printed.getvalue(), value


def main(chosen: list[str]) -> None:
    for name in chosen or NAMES:
        notebook = json.loads(place(name).read_text(encoding="utf-8"))
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
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        place(name).write_text(text, encoding="utf-8")


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
    main(sys.argv[1:])
