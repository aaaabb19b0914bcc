"""Offers of a shell when Tab is pressed behind an option: fixed values, methods, spaces, indexes.

Light to import, as a Tab should be answered at once. typer offers an option's listed choices by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Completer = Callable[[str], list[str]]

SPACES = [
    *("residual", "residual-matrix", "mlp-matrix", "output-matrix", "linear-matrix"),
    *("logit", "token-logit", "pair-logit", "head-matrix"),
]


def joined(separator: str, values: Callable[[], list[str]]) -> Completer:
    """Offer values behind the last separator, none of them twice."""

    def complete(incomplete: str) -> list[str]:
        before, found, last = incomplete.rpartition(separator)
        taken = before.split(separator)
        return [before + found + value for value in values() if value.startswith(last) and value not in taken]

    return complete


def one_of(*values: str) -> Completer:
    """Offer those of the values that begin as what was typed."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def complete_index(incomplete: str) -> list[str]:
    """Offer indexes, and the directories that may lead to one, which end in a slash."""
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


def complete_method(incomplete: str) -> list[str]:
    """Offer attribution methods."""
    return one_of(*_methods())(incomplete)


def complete_record(incomplete: str) -> list[str]:
    """Offer names of records."""
    from stride_cli.schema import records

    return one_of(*records())(incomplete)


complete_methods = joined(",", _methods)
complete_spaces = joined("+", lambda: SPACES)
