"""Find the files of a corpus: names, globs, folders of tables, datasets of the hub, stdin."""

from __future__ import annotations

import errno
import glob
import os
import shlex
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stride_cli import output
from stride_cli.corpus.documents import bad
from stride_cli.corpus.hub_files import fetch_files, find_folder
from stride_cli.corpus.ranges import Share
from stride_cli.errors import CorpusError
from stride_cli.hub import is_hub_address

Kind = Literal["jsonl", "text", "parquet", "arrow"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    ".arrow": "arrow",
}
_PACKED_SUFFIXES = {".gz", ".zst"}
# formats that hold many records or no text; reading one as a single plain-text document is never meant
_REFUSED_SUFFIXES = {
    ".csv", ".tsv", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".feather", ".npy", ".npz",
    ".pkl", ".pt", ".bin", ".safetensors", ".gguf", ".pdf", ".docx", ".xlsx", ".db", ".sqlite",
}  # fmt: skip
# undoes a suffix, or a magic number, that is not read here
UNPACK = {".bz2": "bzip2 -dc", ".xz": "xz -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "LZ4": "lz4 -dc"}
SKIPS_TOLD = 10


@dataclass(frozen=True, slots=True)
class Source:
    """One input of a corpus.

    Attributes:
        name: As the user gave it.
        path: None for stdin.
        share: What is read of it; None: all.
    """

    name: str
    path: Path | None
    kind: Kind
    share: Share | None = None


class ReadLog:
    """Counts what a read leaves out, and how far it has come.

    Args:
        on_bad: "error" raises the first bad record; "skip" counts it, and tells about the first ten.
        tell: Takes what is said about skipped records; default: stderr.

    Attributes:
        skipped: Records left out so far.
        bytes_total: Bytes of all sources on disk; None where one has no size (stdin, a pipe).
    """

    def __init__(self, on_bad: str = "error", tell: Callable[[str], None] = output.note) -> None:
        self.on_bad = on_bad
        self.skipped = 0
        self.bytes_total: int | None = None
        self._tell = tell
        self._bytes_before = 0
        self._position: Callable[[], int] | None = None
        self._share: Share | None = None

    def reject(self, error: CorpusError) -> None:
        """Raise the error, or count it as a skipped record."""
        if self.on_bad == "error":
            raise error
        self.skipped += 1
        if self.skipped <= SKIPS_TOLD:
            self._tell(f"skipped {error.message}")

    def finish(self) -> None:
        """Tell how many records were left out in all."""
        if self.skipped:
            self._tell(f"skipped {self.skipped} bad record{'s' if self.skipped > 1 else ''} in all")

    @property
    def bytes_done(self) -> int:
        """Bytes read so far, before decompression."""
        position = self._position() if self._position else 0
        if self._share is not None:
            position = min(max(position, self._share.low), self._share.high) - self._share.low
        return self._bytes_before + position

    def enter(self, source: Source, position: Callable[[], int] | None) -> None:
        """Begin a source; `position` returns its bytes read so far."""
        self._position, self._share = position, source.share

    def leave(self) -> None:
        """End the source."""
        self._bytes_before = self.bytes_done
        self._position = self._share = None


def find_sources(sources: Sequence[str]) -> list[Source]:
    """List the inputs that file names, globs, folders of tables, hub addresses and `-` stand for, in order.

    The matches of a glob are sorted by name.

    Raises:
        CorpusError: Nothing given, no such file, a glob without a match, a directory, a format that is not
            read, stdin named twice, or a dataset of the hub that cannot be fetched (`hub_files.fetch_files`).
    """
    if not sources:
        raise CorpusError("no corpus given", fix="name a file, a glob, or '-' for stdin")
    found: list[Source] = []
    for given in sources:
        if given == "-":
            if any(source.path is None for source in found):
                raise CorpusError("'-' (stdin) is given twice; it can be read once", fix="give '-' once")
            found.append(Source("<stdin>", None, "jsonl"))
        elif is_hub_address(given):
            found += [Source(name, path, _kind(path, True)) for name, path in fetch_files(given)]
        elif (files := find_folder(given)) is not None:
            found += [_source(str(path)) for path in files]
        elif _state_of(given) is None and glob.has_magic(given):
            found += [_source(name) for name in _matches(given)]
        else:
            found.append(_source(given))
    return found


def total_bytes(sources: Sequence[Source]) -> int | None:
    """Sum the bytes of all sources on disk; None when one of them is a stream."""
    total = 0
    for source in sources:
        state = None if source.path is None else _state_of(str(source.path))
        if state is None or not stat.S_ISREG(state.st_mode):
            return None
        total += state.st_size
    return total


def _source(name: str) -> Source:
    state = _state_of(name)
    if state is None:
        raise _absent(name)
    if stat.S_ISDIR(state.st_mode):
        fix = (
            f"name the files in it: '{name.rstrip('/')}/*.jsonl' (a folder of tables, or one that datasets "
            "saved, can be given as it is)"
        )
        raise bad(name, "a file of documents", "a directory", fix)
    return Source(name, Path(name), _kind(Path(name), stat.S_ISREG(state.st_mode)))


def _state_of(given: str) -> os.stat_result | None:
    """Return what the operating system knows of a path; None where there is nothing."""
    try:
        return Path(given).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and glob.has_magic(given):
            return None
        raise unreadable(given, error) from None


def _matches(pattern: str) -> list[str]:
    """List the files that a pattern matches, sorted by name."""
    names: list[str] = []
    with suppress(ValueError, OSError):
        # not Path.glob: the names must stay as given, for they become ids of text files
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207
        names = sorted(name for name in found if Path(name).is_file())
    if not names:
        raise CorpusError(
            f"{pattern}: the pattern matches no file",
            fix=f"list what is there: ls {Path(pattern).parent}; in quotes, '**' goes into sub-directories",
        )
    return names


def _absent(given: str) -> CorpusError:
    if "\0" not in given and Path(given).is_symlink():
        found = f"a symbolic link to nothing: {Path(given).readlink()}"
        return bad(given, "a file", found, f"check the link: ls -l {shlex.quote(given)}")
    shown = given.replace("\0", "\\0")
    return CorpusError(
        f"{shown}: no such file", fix=f"check the name: ls {Path(shown).parent}; '-' reads from stdin"
    )


def unreadable(name: str, error: OSError, doing: str = "opened") -> CorpusError:
    """Make the error for a source that the operating system refuses."""
    fix = "check what stdin is connected to" if name == "<stdin>" else f"check it: ls -l {shlex.quote(name)}"
    return CorpusError(f"{name}: cannot be {doing}: {error.strerror or error}", fix=fix)


def _kind(path: Path, regular: bool) -> Kind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _REFUSED_SUFFIXES:
        fix = "convert it to JSON Lines: one object a line with 'id' and 'text'"
        if last in UNPACK:
            fix = piped(UNPACK[last], str(path))
        wanted = "JSON Lines (.jsonl, .gz, .zst), Parquet or plain text"
        raise bad(str(path), wanted, f"'{last}'", fix)
    # a named pipe or /dev/fd/63 of `<(…)` has no suffix and holds records, as stdin does
    return _KINDS.get(last, "text" if regular else "jsonl")


def piped(command: str, name: str) -> str:
    """Say how to unpack a source on the way in."""
    shown = "FILE" if name == "<stdin>" else shlex.quote(name)
    return f"unpack it on the way in: {command} {shown} | stride index build - --model MODEL"
