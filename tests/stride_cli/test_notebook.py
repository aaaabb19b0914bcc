"""examples/attribution.ipynb: its cells run in order, and its outputs are kept and still true in kind."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "attribution.ipynb"


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


def test_it_is_small_and_complete() -> None:
    cells = read()
    assert NOTEBOOK.stat().st_size < 100_000
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code[1:])
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    kinds = {kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})}
    assert "text/html" in kinds  # the plot


@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in read():
        if cell["cell_type"] != "code":
            continue
        printed, value = execute(cell["source"], names)
        kept = "".join(text for output in cell["outputs"] for text in output.get("text", []))
        assert bool(printed) == bool(kept)
        assert len(printed.splitlines()) == len(kept.splitlines())
        assert (value is not None) == any("data" in output for output in cell["outputs"])
    answer, scores = names["answer"], names["scores"]
    assert answer.supporters and "history/french-revolution" in answer.document_ids.values()
    assert [score["method"] for score in scores] == ["stride", "chance"]
