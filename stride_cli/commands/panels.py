"""Help in panels, plain: everyday options first, commands in groups.

typer has panels where rich draws its help. Ours is plain text, which starts at once and reads the same in a
pipe; the names of panels are typer's own (``rich_help_panel``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from stride_cli.options import MORE

_LONGEST = 60  # characters of a command's description in a list, whole
_Row = tuple[str, str]

ASK, BUILD, CHECK, RESEARCH = "Ask", "Build", "Check", "Research"


def _write(formatter: Any, rows: Iterable[tuple[str | None, _Row]], otherwise: str) -> None:
    """Write rows by panel: those of none, `MORE`, groups of commands, then others in order of appearance."""
    found: dict[str, list[_Row]] = {name: [] for name in (otherwise, MORE, ASK, BUILD, CHECK, RESEARCH)}
    for panel, row in rows:
        found.setdefault(panel or otherwise, []).append(row)
    for title, listed in found.items():
        if listed:
            with formatter.section(title):
                formatter.write_dl(listed)


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    """Arguments, then options by panel; --help, which the parser adds last, stands with those of none."""
    arguments, options = [], []
    for parameter in command.get_params(context):
        row = parameter.get_help_record(context)
        if row is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append((None, row))
        else:
            options.append((getattr(parameter, "rich_help_panel", None), row))
    _write(formatter, arguments, "Arguments")
    _write(formatter, options, "Options")


class _Command(TyperCommand):
    """A command whose help lists its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class _Group(TyperGroup):
    """A group of commands whose help lists them by panel, each description whole."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        commands.sort(key=lambda named: not isinstance(named[1], TyperGroup))  # those with commands below
        listed = [
            (getattr(command, "rich_help_panel", None), (name, command.get_short_help_str(_LONGEST)))
            for name, command in commands
            if not command.hidden
        ]
        _write(formatter, listed, "Commands")


class CommandLine(typer.Typer):
    """typer's, with help in panels."""

    def __init__(self, **about: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, rich_markup_mode=None, **about)

    def command(self, name: str | None = None, **about: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Command, **about)


def example(*commands: str) -> str:
    """The end of a help text, whose lines stay as they are."""
    return "\b\nExample:\n" + "\n".join(f"  {command}" for command in commands)
