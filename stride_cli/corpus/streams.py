"""Where the bytes of a corpus come from: files, globs, stdin; compressed or not, read in bounded pieces."""

from __future__ import annotations

import errno
import glob
import gzip
import io
import os
import shlex
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from stride_cli import output
from stride_cli.corpus.hub_files import fetch_files, find_folder
from stride_cli.corpus.ranges import Share
from stride_cli.errors import CorpusError, require_extra
from stride_cli.hub import is_hub_address

Kind = Literal["jsonl", "text", "parquet", "arrow"]

_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".jsonlines", ".json"}
_PARQUET_SUFFIXES = {".parquet", ".pq"}
_ARROW_SUFFIXES = {".arrow"}
_PACKED_SUFFIXES = {".gz", ".zst"}
# formats that hold many records or no text; reading one as a single plain-text document is never meant
_REFUSED_SUFFIXES = {
    ".csv", ".tsv", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".feather", ".npy", ".npz",
    ".pkl", ".pt", ".bin", ".safetensors", ".gguf", ".pdf", ".docx", ".xlsx", ".db", ".sqlite",
}  # fmt: skip
# what undoes a suffix or a magic number that is not read here
_UNPACK = {".bz2": "bzip2 -dc", ".xz": "xz -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "LZ4": "lz4 -dc"}
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_HEAD = 10  # bytes by which a format is known
# what a source may begin with that is no UTF-8 text; the longer first
_FOREIGN = (
    (b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
    (b"BZh91AY&SY", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18", "LZ4"),
    (b"PAR1\x15", "Parquet"), (b"ARROW1\0\0", "Arrow"), (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"SQLite for", "a SQLite database"),
)  # fmt: skip
# Small, because a zstd block of 4 bytes can stand for 128 KiB: a piece expands to 16 MiB at most.
_ZSTD_PIECE = 512
# A compressed source that gives more than UNWATCHED bytes may give at most so many for each byte read.
# Measured, gzip -9 and zstd -19: prose 3 : 1, code 5 to 6, log lines and templates 7 to 12, lines padded with
# blanks 50 to 80, one document under 3,000 ids 145 and 1,050; one byte over and over 1,030 and 32,000.
MOST_EXPANSION = 1000
UNWATCHED = 64 << 20
# of which no document is meant to consist; a line beyond it is not even passed over
_ENDLESS_LINE = 1 << 30
SKIPS_TOLD = 10
_PASSED_BYTES = 1 << 20  # at once, of what another range reads


class DamagedStream(Exception):
    """A source that cannot be read to its end, whatever --on-bad says; the reader adds the file and line.

    Parameters
    ----------
    message, fix : as of a `CorpusError`

    Attributes
    ----------
    line : int      where it is; 1 until the reader of lines knows better
    """

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.line = 1


def _broken(what: str) -> DamagedStream:
    return DamagedStream(
        f"expected a whole archive, found that {what}",
        fix="copy or download the file again; a compressed file can be checked with gzip -t or zstd -t",
    )


def refuse_expansion(taken: int, given: int, otherwise: str) -> None:
    """DamagedStream where `given` bytes came of `taken`, and that is more than text expands to.

    `otherwise`: what can be done with a file that is meant to be so.
    """
    if given > UNWATCHED and given > MOST_EXPANSION * taken:
        raise DamagedStream(
            f"expected text, which expands a few times over, found {taken:,} bytes that expand to {given:,} "
            f"and more: over {MOST_EXPANSION:,} times",
            fix=f"check where the file comes from; one that is meant to be so {otherwise}",
        )


def _no_archive(kind: str) -> DamagedStream:
    return DamagedStream(
        f"expected {kind} data, as the name says, found bytes that are none: damaged, or named wrongly",
        fix="give the file the suffix of what it holds, or download it again",
    )


@dataclass(frozen=True, slots=True)
class Source:
    """One input of a corpus: `name` as the user gave it, `path` None for stdin."""

    name: str
    path: Path | None
    kind: Kind


class ReadLog:
    """What a read has left out, and how far it has come.

    Parameters
    ----------
    on_bad : "error" | "skip"
        "error" raises the first bad record; "skip" counts it and tells about the first ten.
    tell : callable
        Where the skipped records are told; stderr by default.

    Attributes
    ----------
    skipped : int
        Records left out so far.
    bytes_total : int | None
        Bytes of all sources on disk, before decompression; None when one of them has no size (stdin, a pipe).
    """

    def __init__(self, on_bad: str = "error", tell: Callable[[str], None] = output.note) -> None:
        if on_bad not in ("error", "skip"):
            raise ValueError(f"on_bad is {on_bad!r}, expected 'error' or 'skip'")
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

    def take(self, share: Share | None) -> None:
        """Of the next source no more than a share is to be read (None: all of it)."""
        self._share = share

    def enter(self, position: Callable[[], int] | None) -> None:
        """A source is being read; `position` gives its bytes read so far."""
        self._position = position

    def leave(self) -> None:
        """The source is read."""
        self._bytes_before = self.bytes_done
        self._position = None


def find_sources(sources: Sequence[str]) -> list[Source]:
    """The inputs that file names, globs, folders of tables, datasets of the hub and `-` stand for, in order;
    the matches of a glob sorted by name.

    Raises
    ------
    CorpusError
        Nothing given, no such file, a glob without a match, a directory, a format that is not read, or
        stdin named twice; a dataset of the hub that cannot be fetched (`hub_files.fetch_files`).
    """
    if not sources:
        raise CorpusError("no corpus given", fix="name a file, a glob, or '-' for stdin")
    found: list[Source] = []
    for given in sources:
        if given == "-":
            if any(source.path is None for source in found):
                raise CorpusError("'-' (stdin) is given twice; it can be read once", fix="give '-' once")
            found.append(Source("<stdin>", None, "jsonl"))
            continue
        if is_hub_address(given):
            found += [Source(name, path, _kind(path, True)) for name, path in fetch_files(given)]
            continue
        files = find_folder(given)
        if files is not None:
            found += [_source(str(path), _required(str(path))) for path in files]
            continue
        state = _state_of(given)
        if state is not None:
            if stat.S_ISDIR(state.st_mode):
                raise CorpusError(
                    f"{given}: expected a file of documents, found a directory",
                    fix=f"name the files in it: '{given.rstrip('/')}/*.jsonl' (a folder of Parquet or Arrow "
                    "files, or that datasets saved, can be given as it is)",
                )
            found.append(_source(given, state))
        elif glob.has_magic(given):
            names = _matches(given)
            if not names:
                raise CorpusError(
                    f"{given}: the pattern matches no file",
                    fix=f"list what is there: ls {Path(given).parent}; in quotes, '**' goes into "
                    "sub-directories",
                )
            found.extend(_source(name, state) for name in names if (state := _state_of(name)) is not None)
        else:
            raise _absent(given)
    return found


def total_bytes(sources: Sequence[Source]) -> int | None:
    """Bytes of all sources on disk; None when one of them is a stream."""
    total = 0
    for source in sources:
        state = None if source.path is None else _state_of(str(source.path))
        if state is None or not stat.S_ISREG(state.st_mode):
            return None
        total += state.st_size
    return total


def _required(name: str) -> os.stat_result:
    """`_state_of` a file that a folder says it has."""
    state = _state_of(name)
    if state is None:
        raise _absent(name)
    return state


def _state_of(given: str) -> os.stat_result | None:
    """What the operating system says of a path; None where there is nothing."""
    try:
        return Path(given).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and glob.has_magic(given):
            return None
        raise unreadable(given, error) from None


def _matches(pattern: str) -> list[str]:
    """The files that a pattern matches, sorted by name."""
    try:
        # glob.glob and not Path.glob: the names must stay as given, for they become ids of text files
        names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    except (ValueError, OSError):
        return []
    return [name for name in names if (state := _state_of(name)) is not None and stat.S_ISREG(state.st_mode)]


def _absent(given: str) -> CorpusError:
    shown = given.replace("\0", "\\0")
    if "\0" not in given and Path(given).is_symlink():
        return CorpusError(
            f"{given}: expected a file, found a symbolic link to nothing: {Path(given).readlink()}",
            fix=f"check the link: ls -l {shlex.quote(given)}",
        )
    return CorpusError(
        f"{shown}: no such file", fix=f"check the name: ls {Path(shown).parent}; '-' reads from stdin"
    )


def unreadable(name: str, error: OSError, doing: str = "opened") -> CorpusError:
    """The error for a source that the operating system refuses."""
    where = (
        "check what stdin is connected to" if name == "<stdin>" else f"check it: ls -l {shlex.quote(name)}"
    )
    return CorpusError(f"{name}: cannot be {doing}: {error.strerror or error}", fix=where)


def _source(name: str, state: os.stat_result) -> Source:
    return Source(name, Path(name), _kind(Path(name), stat.S_ISREG(state.st_mode)))


def _kind(path: Path, regular: bool) -> Kind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _JSONL_SUFFIXES:
        return "jsonl"
    if last in _PARQUET_SUFFIXES:
        return "parquet"
    if last in _ARROW_SUFFIXES:
        return "arrow"
    if last in _REFUSED_SUFFIXES:
        unpack = _UNPACK.get(last)
        raise CorpusError(
            f"{path}: expected JSON Lines (.jsonl, .gz, .zst), Parquet or plain text, found '{last}'",
            fix=_piped(unpack, str(path))
            if unpack
            else "convert it to JSON Lines: one object a line with 'id' and 'text'",
        )
    # a named pipe or /dev/fd/63 of `<(…)` has no suffix and holds records, as stdin does
    return "text" if regular else "jsonl"


def _piped(command: str, name: str) -> str:
    shown = "FILE" if name == "<stdin>" else shlex.quote(name)
    return f"unpack it on the way in: {command} {shown} | stride index build - --model MODEL"


def refuse_foreign(head: bytes, name: str) -> None:
    """CorpusError where a source begins as UTF-16, an archive or a table does; `head`: its first bytes."""
    kind = next((kind for magic, kind in _FOREIGN if head.startswith(magic)), None)
    if kind is None and len(head) >= 4:
        # ASCII in UTF-16, without a mark
        nul = [byte == 0 for byte in head[:4]]
        if nul == [False, True, False, True]:
            kind = "UTF-16LE"
        elif nul == [True, False, True, False]:
            kind = "UTF-16BE"
    if kind is None:
        return
    shown = "FILE" if name == "<stdin>" else shlex.quote(name)
    if kind.startswith("UTF"):
        raise CorpusError(
            f"{name}:1: expected UTF-8, found {kind}",
            fix=f"convert it: iconv -f {kind} -t UTF-8 {shown} > CONVERTED",
        )
    fix = "convert it to JSON Lines: one object a line with 'id' and 'text'"
    if kind in _UNPACK:
        fix = _piped(_UNPACK[kind], name)
    elif kind in ("Parquet", "Arrow"):
        fix = f"give it as a file whose name ends in .{kind.lower()}"
    raise CorpusError(f"{name}:1: expected JSON Lines or plain text, found {kind}", fix=fix)


@contextmanager
def open_stream(source: Source, log: ReadLog) -> Iterator[BinaryIO]:
    """The decompressed bytes of a source; gzip and zstd are known by their first bytes or the suffix.

    Raises
    ------
    CorpusError
        The file cannot be opened (permission); at the end: it has changed since it was opened.
    MissingExtraError
        The source is zstd and `zstandard` is not installed.
    DamagedStream
        The compressed data are none; while reading: they end early, do not decode, or expand beyond
        `MOST_EXPANSION`.
    """
    if source.path is None:
        if sys.stdin is None:
            raise CorpusError("<stdin>: cannot be read: it is closed", fix="name a file, or pipe one in")
        log.enter(None)
        # left open: it is not ours to close
        yield _opened(source.name, cast(BinaryIO, sys.stdin.buffer), "")
        return
    try:
        raw = source.path.open("rb")
    except OSError as error:
        raise unreadable(source.name, error) from None
    with raw:
        before = version_of(raw)
        log.enter(raw.tell if raw.seekable() else None)
        try:
            yield _opened(source.name, raw, source.path.suffix.lower())
            refuse_change(source.name, before, version_of(raw))
        finally:
            log.leave()


def version_of(raw: BinaryIO) -> tuple[int, int]:
    """Return (bytes, time of change) of an open file; (0, 0) of a stream."""
    state = os.fstat(raw.fileno())
    return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else (0, 0)


def refuse_change(name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    """CorpusError where a file is not what it was when it was opened: (bytes, time of change) each."""
    if before != after:
        sizes = "" if before[0] == after[0] else f": {before[0]:,} bytes before, {after[0]:,} after"
        raise CorpusError(
            f"{name}: expected a file that stays as it is while it is read, found that it changed{sizes}",
            fix="wait until it is written, or give a copy of it",
        )


def _opened(name: str, raw: BinaryIO, suffix: str) -> BinaryIO:
    try:
        head, raw = _peeked(raw)
    except OSError as error:
        raise unreadable(name, error, "read") from None
    if suffix == ".gz" or head.startswith(_GZIP_MAGIC):
        if head and not head.startswith(_GZIP_MAGIC):
            raise _no_archive("gzip")
        return cast(BinaryIO, io.BufferedReader(_GzipStream(raw), 1 << 17))
    if suffix == ".zst" or head.startswith(_ZSTD_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), 1 << 17))
    return raw


def _peeked(stream: BinaryIO) -> tuple[bytes, BinaryIO]:
    """A stream's first bytes, and the stream with these in front."""
    head = stream.peek(_HEAD)[:_HEAD] if hasattr(stream, "peek") else b""
    if len(head) < _HEAD and hasattr(stream, "peek"):
        # the end, or a pipe whose first bytes come one by one
        head = stream.read(_HEAD)
        stream = cast(BinaryIO, io.BufferedReader(_Joined(head, stream), 1 << 17))
    return head, stream


class _Joined(io.RawIOBase):
    """Bytes, and then a stream."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        if not self._head:
            return self._rest.readinto1(buffer)  # type: ignore[attr-defined]
        size = min(len(buffer), len(self._head))
        buffer[:size] = self._head[:size]
        self._head = self._head[size:]
        return size


class _Packed(io.RawIOBase):
    """Compressed data, whose expansion is watched."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._taken = self._given = 0

    def readable(self) -> bool:
        return True

    def read_packed(self, size: int) -> bytes:
        """The next compressed bytes, counted."""
        data = self._raw.read(size)
        self._taken += len(data)
        return data

    def give(self, size: int) -> int:
        """Count what goes out; DamagedStream where that is too much for what came in."""
        self._given += size
        refuse_expansion(
            self._taken,
            self._given,
            "can be piped in, unpacked: zcat FILE (or zstd -dc FILE) | stride index build - --model MODEL",
        )
        return size


class _GzipStream(_Packed):
    """A gzip stream whose damage has one name."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw)
        self._file = gzip.GzipFile(fileobj=cast(BinaryIO, _Reading(self.read_packed)), mode="rb")

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        try:
            return self.give(self._file.readinto(buffer))
        except EOFError:
            raise _broken("the gzip data is truncated") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise _broken(f"the gzip data is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class _Reading:
    """The part of a file that `gzip.GzipFile` uses."""

    read: Callable[[int], bytes]


class _ZstdStream(_Packed):
    """A zstd stream of one or more frames; unlike zstandard's reader it notices a frame that is cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise require_extra("zstandard", "zstd") from None
        super().__init__(raw)
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self._output:
            if not self._input:
                self._input = self.read_packed(_ZSTD_PIECE)
            if not self._input:
                if self._frame is not None:
                    raise _broken("the zstd data is truncated")
                return 0
            if self._frame is None:
                self._frame = self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise self._refused(str(error)) from None
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return self.give(size)

    def _refused(self, reason: str) -> DamagedStream:
        if "too much memory" in reason:
            return DamagedStream(
                "expected a zstd file that unpacks with a window of at most 128 MiB, found a larger one",
                fix="unpack it on the way in: zstd -dc --long=31 FILE | stride index build - --model MODEL",
            )
        if "Unknown frame" in reason and not self._given:
            return _no_archive("zstd")
        return _broken(f"the zstd data is damaged: {reason}")


def decompressed_bytes(source: Source) -> int:
    """How many bytes a file gives; one that is compressed is read to its end.

    Raises
    ------
    DamagedStream, CorpusError, MissingExtraError      as `open_stream`
    """
    lines = length = 0
    try:
        with open_stream(source, ReadLog()) as stream:
            if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
                return os.fstat(stream.fileno()).st_size
            while piece := stream.read(_PASSED_BYTES):
                length += len(piece)
                lines += piece.count(b"\n")
    except DamagedStream as error:
        error.line = lines + 1
        raise
    return length


def read_lines(
    stream: BinaryIO, limit: int, first: int = 0, stop: int | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers (from 1); None for a line of more than `limit` bytes, never held whole.

    Those that begin at byte `first` or later, and before byte `stop`.

    Raises
    ------
    DamagedStream       the operating system refuses to read on; a line has no end within 1 GiB
    """
    number = place = 0
    try:
        if first > 0:
            number, place = _pass_to(stream, first)
        while (stop is None or place < stop) and (line := stream.readline(limit + 1)):
            number += 1
            place += len(line)
            if len(line) > limit and not line.endswith(b"\n"):
                del line
                yield number, None  # who reads may want no more of it
                number -= 1  # where what happens now happens
                place += _pass_over(stream, limit)
                number += 1
            else:
                yield number, line
    except DamagedStream as error:
        error.line = number + 1
        raise
    except OSError as error:
        refused = DamagedStream(
            f"expected more to read, found that the operating system refuses: {error.strerror or error}",
            fix="check the disk or the connection that it is on, or read a copy",
        )
        refused.line = number + 1
        raise refused from None


def _pass_to(stream: BinaryIO, first: int) -> tuple[int, int]:
    """Read over the lines that begin before byte `first`: how many these are, and where they end."""
    lines = place = 0
    while place < first - 1 and (piece := stream.read(min(_PASSED_BYTES, first - 1 - place))):
        lines += piece.count(b"\n")
        place += len(piece)
    while piece := stream.readline(_PASSED_BYTES):  # the rest of the line that has the byte before `first`
        place += len(piece)
        if piece.endswith(b"\n"):
            lines += 1
            break
    return lines, place


def _pass_over(stream: BinaryIO, passed: int) -> int:
    """The rest of a line of which `passed` bytes are read: how many bytes more there were."""
    before = passed
    while (piece := stream.readline(1 << 16)) and not piece.endswith(b"\n"):
        passed += len(piece)
        if passed > _ENDLESS_LINE:
            raise DamagedStream(
                f"expected lines, found one that goes on beyond {_ENDLESS_LINE:,} bytes",
                fix="give JSON Lines, one object a line; lines that end in a carriage return alone become "
                "some by: tr '\\r' '\\n' < FILE",
            )
    return passed + len(piece) - before
