"""Random input for what reads files of others: a try is a failure where an exception escapes.

Every module in ``tests/fuzz/targets`` has ``TARGETS: dict[str, Callable[[random.Random], None]]``: name →
one try, of which all randomness comes from the generator that it is given. What it allows to be raised it
catches itself (`tests.fuzz.allowed`), and its input it may say (`tests.fuzz.trying`), so that a failure is
told with it. What all tries share and takes long to make, a module's ``PREPARE()`` makes before the first.
``python -m tests.fuzz --help`` runs them for as long as one likes.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from index_format.errors import IndexFormatError
from stride_cli.errors import StrideError
from tests.fuzz import targets as _modules

Target = Callable[[random.Random], None]
_given: list[bytes] = []


def known_targets() -> dict[str, Target]:
    """All targets by name."""
    found: dict[str, Target] = {}
    for module in _target_modules():
        for name, target in module.TARGETS.items():
            assert name not in found, f"two targets are called {name}"
            found[name] = target
    return found


def prepare(name: str) -> None:
    """Make what tries of this target share, so that none of them takes the time for it."""
    for module in _target_modules():
        if name in module.TARGETS and hasattr(module, "PREPARE"):
            module.PREPARE()


def _target_modules() -> Iterator[Any]:
    for module in pkgutil.iter_modules(_modules.__path__):
        yield importlib.import_module(f"{_modules.__name__}.{module.name}")


def trying(data: bytes) -> None:
    """Say what the try at hand gives to what is tested; several calls, several inputs."""
    _given.append(data)


@contextmanager
def allowed() -> Iterator[None]:
    """Within, an error is allowed that says what is wrong and what to do; no other exception."""
    try:
        yield
    except (StrideError, IndexFormatError) as error:
        assert error.fix, f"no remedy: {error}"
        assert len(str(error)) < 2000, f"too long: {error}"


def one_try(target: Target, generator: random.Random) -> tuple[BaseException, list[bytes]] | None:
    """Run a target once; None, or what escaped and what `trying` was told."""
    _given.clear()
    try:
        target(generator)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error, list(_given)
    return None
