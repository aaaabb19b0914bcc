"""Errors, each with its exit code and what to do next."""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXIT_DONE = 0
EXIT_FOUND = 1
EXIT_USAGE = 2

# how torch says so where it has no class
_NO_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class StrideError(Exception):
    """An error the user can act on: one line of what is wrong and one line of what to do.

    Parameters
    ----------
    message : str
        Names the thing, the expected and the found.
    fix : str, optional
        What to do next, often a command.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(StrideError, ValueError):
    """A flag, a value or a combination of them that cannot work."""


class CorpusError(StrideError, ValueError):
    """A corpus that cannot be read; names the file and line."""


class EmptyRange(CorpusError):
    """No document begins in the part of a corpus that was asked for."""


class ModelError(StrideError, ValueError):
    """A checkpoint that cannot be loaded, or whose structure is not understood."""


class QueryError(StrideError, ValueError):
    """A query that cannot be measured: empty, too long, or without a scored token."""


class NumericalError(StrideError, ArithmeticError):
    """Values that are not finite, or a solver that did not reach its tolerance."""


class StorageError(StrideError, OSError):
    """The disk refused: full, read-only, or no permission."""


class MissingExtraError(StrideError, ImportError):
    """An optional dependency is not installed; names the extra."""


def required(module: str, extra: str, package: str = "") -> Any:
    """Import a module of an optional dependency; MissingExtraError names the extra that brings it."""
    try:
        return import_module(module)
    except ImportError:
        raise require_extra(package or module.partition(".")[0], extra) from None


def require_extra(module: str, extra: str) -> MissingExtraError:
    """The error for an optional dependency that is absent, naming the extra that brings it."""
    return MissingExtraError(
        f"this needs the Python package '{module}', which is not installed",
        fix=f"pip install 'stride-attribution[{extra}]'",
    )


def located(error: StrideError, where: str) -> StrideError:
    """The same error, which says where: ``prompts.jsonl:3: the prompt is empty …``."""
    return type(error)(f"{where}: {error.message}", fix=error.fix)


def out_of_memory(error: BaseException) -> bool:
    """True where there was too little memory, of the machine or of a device.

    torch has a class for the second, and words alone for the first.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
