"""What a shell offers when Tab is pressed behind an option: fixed values, methods, spaces, indexes.

Nothing here imports more than the standard library and light modules: a Tab should be answered at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

Completer = Callable[[str], list[str]]

SPACES = (
    "residual",
    "residual-matrix",
    "mlp-matrix",
    "linear-matrix",
    "logit",
    "token-logit",
    "pair-logit",
    "head-matrix",
)


def take_named_shell(arguments: Sequence[str]) -> None:
    """Let ``--install-completion SHELL`` mean that shell, with the name or without.

    typer either looks for the shell it runs in and passes over a name, or takes names only: which of the two
    is decided by a variable that it reads when it builds the command.
    """
    options = {"--install-completion", "--show-completion"}
    if any(before in options and not name.startswith("-") for before, name in itertools.pairwise(arguments)):
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"


def one_of(*values: str) -> Completer:
    """Offers those of the values that begin as what was typed."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def joined(separator: str, values: Callable[[], list[str]]) -> Completer:
    """Offers values behind the last separator, none of them twice."""

    def complete(incomplete: str) -> list[str]:
        before, found, last = incomplete.rpartition(separator)
        taken = before.split(separator)
        return [before + found + value for value in values() if value.startswith(last) and value not in taken]

    return complete


def complete_index(incomplete: str) -> list[str]:
    """Indexes, and the directories that may lead to one, which end in a slash."""
    folder, slash, name = incomplete.rpartition("/")
    place = Path(folder + slash).expanduser() if slash else Path()
    try:
        below = sorted(entry for entry in place.iterdir() if entry.is_dir() and entry.name.startswith(name))
    except OSError:
        return []
    shown = [entry for entry in below if name.startswith(".") or not entry.name.startswith(".")]
    return [f"{folder}{slash}{entry.name}{'' if (entry / 'zarr.json').is_file() else '/'}" for entry in shown]


def _methods() -> list[str]:
    return list(import_module("stride_cli.research.methods.registry").METHODS)


def _records() -> list[str]:
    from stride_cli.schema import RECORDS

    return list(RECORDS)


def complete_method(incomplete: str) -> list[str]:
    """Attribution methods."""
    return one_of(*_methods())(incomplete)


def complete_record(incomplete: str) -> list[str]:
    """Names of records."""
    return one_of(*_records())(incomplete)


complete_methods = joined(",", _methods)
complete_spaces = joined("+", lambda: list(SPACES))
