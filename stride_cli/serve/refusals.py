"""What goes wrong, as a JSON record with the right status; never a traceback."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from index_format.errors import IndexFormatError
from stride_cli.errors import (
    EXIT_USAGE,
    MissingExtraError,
    ModelError,
    NumericalError,
    QueryError,
    StorageError,
    StrideError,
    first_line,
    out_of_memory,
)

if TYPE_CHECKING:
    from stride_cli.schema.serve_records import ServeErrorRecord

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (QueryError, 422),
    (NumericalError, 422),
    (ModelError, 503),
    (MissingExtraError, 501),
    (StorageError, 507),
    (StrideError, 400),
    (IndexFormatError, 503),
)


class Refusal(StrideError):
    """A request that is refused before anything is asked of a model; knows its status."""

    def __init__(self, status: int, message: str, *, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status = status


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for a defect of this program."""
    if isinstance(error, Refusal):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_record(error: Exception) -> ServeErrorRecord:
    """What a client is told; a defect is told on stderr in full, and to the client in a line."""
    if isinstance(error, StrideError | IndexFormatError):
        return _record(type(error).__name__, error.message, error.fix, error.exit_code)
    if out_of_memory(error):
        return _record("UsageError", "there is not enough memory for this", "ask for less", EXIT_USAGE)
    traceback.print_exception(error, file=sys.stderr)
    message = f"an error that should not be: {type(error).__name__}: {first_line(error)}"
    return _record("InternalError", message, "what the server says on stderr belongs in a bug report", 1)


def _record(kind: str, message: str, fix: str | None, exit_code: int) -> ServeErrorRecord:
    return {
        "schema": "stride.error/1",
        "kind": kind,
        "message": message,
        "fix": fix,
        "exit_code": exit_code,
    }
