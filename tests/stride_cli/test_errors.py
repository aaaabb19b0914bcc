"""Every error that a user can meet comes with what to do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import index_format.errors
from stride_cli import errors
from stride_cli.research.methods.registry import open_method

ROOT = Path(__file__).parents[2]
# what is asked of Python functions by Python code alone, and what says that this program is wrong
NOT_OF_COMMANDS = {"recovery", "lexical.py", "distribution.py", "retraining.py"}
# constructors of methods: `open_method` adds the options that there are
COMPLETED = {"stride_cli/research/methods"}


def test_every_error_has_a_remedy() -> None:
    kinds = {
        name
        for module in (errors, index_format.errors)
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, errors.StrideError | index_format.errors.IndexFormatError)
    }
    seen, bare = 0, []
    for file in sorted((ROOT / "stride_cli").rglob("*.py")):
        name = file.relative_to(ROOT)
        if NOT_OF_COMMANDS & set(name.parts) or any(name.is_relative_to(each) for each in COMPLETED):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            if getattr(called, "id", getattr(called, "attr", "")) in kinds:
                seen += 1
                if not any(keyword.arg == "fix" for keyword in node.exc.keywords):  # type: ignore[union-attr]
                    bare.append(f"{name}:{node.lineno}")
    assert seen > 200 and bare == []


def test_a_method_that_refuses_its_options_says_which_there_are() -> None:
    with pytest.raises(errors.UsageError, match="ngrams starts at 1") as refused:
        open_method("tfidf:ngrams=0")
    assert refused.value.fix is not None and "options of tfidf: " in refused.value.fix
    with pytest.raises(errors.UsageError, match="damping is nan"):
        open_method("trak:damping=nan")
