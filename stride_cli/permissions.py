"""Permissions to run code of, and download models for, an index or a model from elsewhere; none by default.

They are variables of the environment, so that every process that a command starts has them too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from stride_cli.errors import ModelError
from stride_cli.options import MORE, Options, option
from stride_cli.remembered import recall, remember

_YES = ("1", "true", "yes")
_named: set[str] = set()  # digests of files that this process was told to run


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


def variable(name: str) -> str:
    """Name the variable of the environment that gives a permission."""
    return f"STRIDE_GENERAL_{name}".upper()


@contextmanager
def permitted(permissions: Permissions) -> Iterator[None]:
    """Give permissions within the block, here and in processes that are started; none is taken away."""
    given = {variable(each.name): "1" for each in fields(permissions) if getattr(permissions, each.name)}
    with with_variables(given):
        yield


@contextmanager
def with_variables(given: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block, here and in processes that are started."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def may_download() -> bool:
    """Check the permission to fetch a hub model that only an index or a recipe names."""
    return _is_given("allow_download")


def name_code(source: str, where: str | Path) -> None:
    """Trust a file that the user has named to be run, from now on, on this machine.

    Parameters
    ----------
    source : its text
    where : its path, for messages
    """
    digest = _digest(source)
    _named.add(digest)
    remember("code", digest, str(Path(where).absolute()))


def may_run(source: str) -> bool:
    """Check that code may be run: the user has named its file here, or has said so."""
    digest = _digest(source)
    return _is_given("trust_code") or digest in _named or recall("code", digest) is not None


def require_trust(source: str, where: str | Path) -> None:
    """Refuse to run code that came from elsewhere.

    Parameters
    ----------
    source : its text
    where : its place, for messages

    Raises
    ------
    ModelError
    """
    if not may_run(source):
        raise ModelError(
            f"{where} is Python code, and no model was trained with it on this machine "
            f"(SHA-256 {_digest(source)[:16]}…): it was not run",
            fix="read it, and run it with --trust-code only if you would run any program of its author",
        )


def _is_given(name: str) -> bool:
    return os.environ.get(variable(name), "").lower() in _YES


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
