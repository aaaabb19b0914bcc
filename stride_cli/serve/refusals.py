"""Errors as JSON records with the right HTTP status; never a traceback."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from index_format.errors import IndexFormatError
from stride_cli import errors
from stride_cli.errors import EXIT_USAGE, StrideError, first_line, out_of_memory

if TYPE_CHECKING:
    from stride_cli.schema.serve_records import ServeErrorRecord

_STATUS: dict[type, int] = {
    errors.QueryError: 422,
    errors.NumericalError: 422,
    errors.ModelError: 503,
    errors.MissingExtraError: 501,
    errors.StorageError: 507,
    StrideError: 400,
    IndexFormatError: 503,
}


class Refusal(StrideError):
    """A request that is refused before anything is asked of a model; knows its status."""

    def __init__(self, status: int, message: str, *, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status = status


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for a defect of this program."""
    if isinstance(error, Refusal):
        return error.status
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def error_record(error: Exception) -> ServeErrorRecord:
    """Tell a client what is wrong; a defect in one line, whose traceback goes to stderr."""
    if isinstance(error, StrideError | IndexFormatError):
        kind, message, fix, code = type(error).__name__, error.message, error.fix, error.exit_code
    elif out_of_memory(error):
        kind, message, fix = "UsageError", "there is not enough memory for this", "ask for less"
        code = EXIT_USAGE
    else:
        traceback.print_exception(error, file=sys.stderr)
        kind, code = "InternalError", 1
        message = f"an error that should not be: {type(error).__name__}: {first_line(error)}"
        fix = "what the server says on stderr belongs in a bug report"
    return {"schema": "stride.error/1", "kind": kind, "message": message, "fix": fix, "exit_code": code}
