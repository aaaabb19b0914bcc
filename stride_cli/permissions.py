"""Permissions to run code of, and download models for, what came from elsewhere; none by default."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from stride_cli.errors import ModelError
from stride_cli.options import MORE, Options, option
from stride_cli.remembered import recall, remember


@dataclass(frozen=True)
class Permissions(Options):
    """Permissions that the user gives."""

    trust_code: bool = option(
        False,
        "Run the Python file (network.py) of a classifier that was not trained on this machine.",
        setting=True,
        personal=True,
        panel=MORE,
    )
    allow_download: bool = option(
        False,
        "Download the model that the index names, where it is one of the hub.",
        setting=True,
        panel=MORE,
    )


def name_code(source: str, where: str | Path) -> None:
    """Trust the text of a file that the user has named to be run, from now on, on this machine."""
    remember("code", _digest(source), str(Path(where).absolute()))


def may_run(source: str, permissions: Permissions) -> bool:
    """Check that code may be run: the user has named its file on this machine, or has said so."""
    return permissions.trust_code or recall("code", _digest(source)) is not None


def require_trust(source: str, where: str | Path, permissions: Permissions) -> None:
    """Refuse to run the text of a file that came from elsewhere: a ModelError says where it is."""
    if not may_run(source, permissions):
        raise ModelError(
            f"{where} is Python code, and no model was trained with it on this machine "
            f"(SHA-256 {_digest(source)[:16]}…): it was not run",
            fix="read it, and run it with --trust-code only if you would run any program of its author",
        )


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
