"""What travels together is an object with a name; what a command can be told, a field of a dataclass."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import OptionInfo

from stride_cli.commands.app import command_line
from stride_cli.commands.options import Flags
from stride_cli.options import kinds_of
from stride_cli.research.methods.registry import METHODS

ROOT = Path(__file__).parents[3]
MOST = 8


def commands(
    group: typer.Typer | None = None, path: str = "stride"
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command as it is written, before it was given its flags."""
    group = group or command_line()
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        yield f"{path} {name}", inspect.unwrap(command.callback)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance, f"{path} {below.name}")


def number_of_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args]
    bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - bound + len(function.args.kwonlyargs)


def test_no_function_has_more_than_eight_parameters() -> None:
    """But for commands, whose parameters are flags, methods, whose are what a spec says (``less:rank=8``),
    and kernels, which take arrays and numbers only."""
    exempt = {(function.__module__, function.__qualname__) for _, function in commands()}
    exempt |= {(entry.load().__module__, "__init__") for entry in METHODS.values()}
    seen, long = 0, []
    for room in ("stride_cli", "index_format"):
        for file in sorted((ROOT / room).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                seen += 1
                if node.name.endswith("kernel") or (module, node.name) in exempt:
                    continue
                if number_of_parameters(node) > MOST:
                    long.append(f"{module}.{node.name} takes {number_of_parameters(node)}")
    assert seen > 1000 and long == []


def told_by_hand(function: Callable[..., Any]) -> Iterator[str]:
    """Flags that are numbers or choices, and are not of a dataclass's `Flags`.

    Of a flag that takes a text nobody can tell what it may be.
    """
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if get_origin(parameter.annotation) is not Annotated:
            continue
        hint, about, *_ = get_args(parameter.annotation)
        if isinstance(about, Flags) or not isinstance(about, OptionInfo):
            continue
        kinds = [kind for kind in kinds_of(hint) if kind is not NoneType]
        choice = any(kind is Literal or issubclass(kind, Enum) for kind in kinds)
        if choice or {int, float} & set(kinds) or about.min is not None or about.max is not None:
            yield parameter.name


def test_numbers_and_choices_of_commands_are_fields_of_dataclasses() -> None:
    """There they have ranges, and what is out of range is refused with a remedy, wherever it comes from."""
    by_hand = [f"{name} {flag}" for name, function in commands() for flag in told_by_hand(function)]
    assert by_hand == []
