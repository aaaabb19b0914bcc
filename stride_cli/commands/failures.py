"""Errors as users read them: one line of what is wrong, one of what to do, and an exit code."""

from __future__ import annotations

import errno
import os

from index_format.errors import IndexFormatError
from stride_cli import errors
from stride_cli.characters import printable

Known = errors.StrideError | IndexFormatError

_REMEDIES = {
    errno.EACCES: "check its permissions, or give another place",
    errno.EPERM: "check its permissions, or give another place",
    errno.EROFS: "give a place that can be written to",
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the name: a part of it that should be a directory is a file",
    errno.EISDIR: "give a file in it",
    errno.EEXIST: "give another name, or move away what is there",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space, and run the same command again",
    errno.EDQUOT: "free some space, and run the same command again",
    errno.EMFILE: "allow more open files (ulimit -n 4096)",
    errno.EBADF: "open what is read and written: < FILE, > FILE",
}
# torch and NumPy say in words alone that they cannot count so far
_TOO_LARGE = ("calculation overflowed", "without overflow", "array is too big", "Maximum allowed")


def as_known(error: Exception) -> Known | None:
    """Translate an error into one that a user can act on; None for a defect of this program."""
    if isinstance(error, Known):
        return error
    first = errors.first_line(error)
    if errors.out_of_memory(error):
        return errors.UsageError(
            f"there is not enough memory for this: {first}",
            fix="ask for less (smaller numbers, fewer at once; a large model with --stream), or use a "
            "machine with more memory",
        )
    if isinstance(error, OverflowError) or (
        isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in _TOO_LARGE)
    ):
        return errors.UsageError(f"a number is too large: {first}", fix="give smaller numbers")
    if isinstance(error, UnicodeEncodeError):
        return errors.UsageError(
            f"a name or a text has a character that cannot be written: {error.object[error.start]!a}",
            fix="give files and directories names in UTF-8",
        )
    if isinstance(error, EOFError):
        return errors.UsageError(
            f"a file ends before what it should hold: {first}",
            fix="copy it again; of an index: stride index verify; of Python's own (a full disk cuts them "
            "short): remove the directories __pycache__",
        )
    if isinstance(error, RecursionError):
        return errors.UsageError(
            "what was read is nested too deeply", fix="write it with fewer levels of brackets"
        )
    if isinstance(error, OSError):
        where = f" '{os.fsdecode(error.filename)}'" if isinstance(error.filename, str | bytes) else ""
        return errors.StorageError(
            f"the system refused{where}: {error.strerror or error}", fix=_remedy(error)
        )
    return None


def _remedy(error: OSError) -> str:
    # `tempfile` says that it found no directory also where all disks are full
    if error.filename is None and "temporary directory" in str(error):
        return "free some space there, or name another directory: TMPDIR=DIR"
    return _REMEDIES.get(error.errno or 0, "see where with stride --debug")


def render_error(error: Known) -> str:
    """Write ``error: …`` and ``  fix: …``; no text from elsewhere can look like either."""
    text = f"error: {_marked(error.message)}\n"
    return text + (f"  fix: {_marked(error.fix)}\n" if error.fix else "")


def _marked(text: str) -> str:
    """Mark the lines after a message's first as its own."""
    first, *others = printable(text).split("\n")
    return "\n".join([first, *(line if line.startswith("  | ") else f"  | {line}" for line in others)])
