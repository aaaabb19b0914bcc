"""Every way in which an index on disk can be wrong, by name."""

from __future__ import annotations

RESTORE = "restore the index from a copy, or build it again"


class IndexFormatError(Exception):
    """An index that cannot be used: one line of what is wrong and one line of what to do.

    Parameters
    ----------
    message : str
        Names the index, the expected and the found.
    fix : str, optional
        What to do next, often a command.
    """

    exit_code = 3

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class IndexNotFound(IndexFormatError, FileNotFoundError):
    """Nothing is at the path, or what is there is no index."""

    exit_code = 2


class IndexReadOnly(IndexFormatError, PermissionError):
    """The index is a URL or a zip file: it can be read, and nothing can be written to it or beside it."""

    exit_code = 2


class IndexUnreachable(IndexFormatError, ConnectionError):
    """A remote index cannot be read: no network, no such server, no permission, or it stopped answering."""

    exit_code = 2


class ExtraMissing(IndexFormatError, ImportError):
    """Reading from there needs a package that is not installed; names the extra."""

    exit_code = 2


class IndexExists(IndexFormatError, FileExistsError):
    """An index is already at the path."""

    exit_code = 2


class IndexBusy(IndexFormatError, BlockingIOError):
    """Another process is building at the path."""

    exit_code = 2


class IndexIncomplete(IndexFormatError):
    """A build at the path has not finished; it can be resumed."""


class IndexDamaged(IndexFormatError, ValueError):
    """A file is missing, has another length, or other content than the manifest records."""


class IndexVersionError(IndexFormatError, ValueError):
    """The index has a format version that this release does not read."""


class IndexMismatch(IndexFormatError, ValueError):
    """The index was built from another model, tokenizer or corpus than the one given."""


class StageMissing(IndexFormatError, KeyError):
    """A stage has not been run yet (no operators, no retrained subsets)."""

    exit_code = 2

    def __str__(self) -> str:  # KeyError would show the repr
        return self.message


class StorageFull(IndexFormatError, OSError):
    """The disk, or the quota, is full; what is committed so far can be resumed."""

    exit_code = 2
