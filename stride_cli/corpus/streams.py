"""Bytes of a corpus, decompressed in bounded pieces, and their lines."""

from __future__ import annotations

import io
import itertools
import os
import shlex
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from stride_cli.corpus.documents import bad
from stride_cli.corpus.sources import CONVERT, UNPACK, ReadLog, Source, piped, unreadable
from stride_cli.errors import CorpusError, required

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_HEAD = 10  # bytes by which a format is known
# starts of sources that are no UTF-8 text; the longer first
_FOREIGN = (
    (b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
    (b"BZh91AY&SY", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18", "LZ4"),
    (b"PAR1\x15", "Parquet"), (b"ARROW1\0\0", "Arrow"), (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"SQLite for", "a SQLite database"),
)  # fmt: skip
_PIECE = 1 << 16
# Small, because a zstd block of 4 bytes can stand for 128 KiB: a piece expands to 16 MiB at most.
_ZSTD_PIECE = 512
# A compressed source that gives more than UNWATCHED bytes may give at most so many for each byte read.
# Measured, gzip -9 and zstd -19: prose 3 : 1, code 5 to 6, log lines and templates 7 to 12, lines padded with
# blanks 50 to 80, one document under 3,000 ids 145 and 1,050; one byte over and over 1,030 and 32,000.
MOST_EXPANSION = 1000
UNWATCHED = 64 << 20
_OTHERWISE = "can be piped in, unpacked: zcat FILE (or zstd -dc FILE) | stride index build - --model MODEL"
_ENDLESS_LINE = 1 << 30  # a longer line is not even passed over


class DamagedStream(Exception):
    """A source that cannot be read to its end, whatever --on-bad says.

    Attributes:
        expected, found, fix: As of `bad`.
        line: Where it is; 1 until the reader of lines knows better.
    """

    def __init__(self, expected: str, found: str, fix: str, line: int = 1) -> None:
        super().__init__(expected, found)
        self.expected, self.found, self.fix, self.line = expected, found, fix, line

    def at(self, name: str) -> CorpusError:
        """Make the error that names the file and the line."""
        return bad(f"{name}:{self.line}", self.expected, self.found, self.fix)


def refuse_expansion(taken: int, given: int, otherwise: str) -> None:
    """DamagedStream where `given` bytes came of `taken`, and that is more than text expands to.

    Args:
        otherwise: What can be done with a file that is meant to be so.
    """
    if given > UNWATCHED and given > MOST_EXPANSION * taken:
        found = f"{taken:,} bytes that expand to {given:,} and more: over {MOST_EXPANSION:,} times"
        fix = f"check where the file comes from; one that is meant to be so {otherwise}"
        raise DamagedStream("text, which expands a few times over", found, fix)


def refuse_foreign(head: bytes, name: str) -> None:
    """CorpusError where a source begins as UTF-16, an archive or a table does; `head`: its first bytes."""
    kind = next((kind for magic, kind in _FOREIGN if head.startswith(magic)), None)
    nul = [byte == 0 for byte in head[:4]]  # ASCII in UTF-16, without a mark
    if kind is None and nul in ([False, True] * 2, [True, False] * 2):
        kind = "UTF-16BE" if nul[0] else "UTF-16LE"
    if kind is None:
        return
    if kind.startswith("UTF"):
        shown = "FILE" if name == "<stdin>" else shlex.quote(name)
        raise bad(f"{name}:1", "UTF-8", kind, f"convert it: iconv -f {kind} -t UTF-8 {shown} > CONVERTED")
    fix = piped(UNPACK[kind], name) if kind in UNPACK else CONVERT
    if kind in ("Parquet", "Arrow"):
        fix = f"give it as a file whose name ends in .{kind.lower()}"
    raise bad(f"{name}:1", "JSON Lines or plain text", kind, fix)


@contextmanager
def open_stream(source: Source, log: ReadLog) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a source; gzip and zstd are known by their first bytes or the suffix.

    Raises:
        CorpusError: The file cannot be opened or read; the compressed data are none, end early, do not
            decode, or expand beyond `MOST_EXPANSION`; at the end: it has changed since it was opened.
        MissingExtraError: The source is zstd and `zstandard` is not installed.
    """
    try:
        if source.path is None:
            if sys.stdin is None:
                raise CorpusError("<stdin>: cannot be read: it is closed", fix="name a file, or pipe one in")
            log.enter(source, None)
            # left open: it is not ours to close
            yield _decompressed(cast(BinaryIO, sys.stdin.buffer), "")
        else:
            with open_file(source, source.path, log) as raw:
                yield _decompressed(raw, source.path.suffix.lower())
    except DamagedStream as error:
        raise error.at(source.name) from None
    except OSError as error:
        raise unreadable(source.name, error, "read") from None


@contextmanager
def open_file(
    source: Source, path: Path, log: ReadLog, position: Callable[[], int] | None = None
) -> Iterator[BinaryIO]:
    """Open the file of a source, which may not change while it is read.

    Args:
        position: Bytes read so far; default: those of the file.

    Raises:
        CorpusError: It cannot be opened; at the end: it has changed meanwhile.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise unreadable(source.name, error) from None
    with raw:
        before = os.fstat(raw.fileno())
        log.enter(source, raw.tell if position is None and raw.seekable() else position)
        try:
            yield raw
            after = os.fstat(raw.fileno())
        finally:
            log.leave()
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if changed and stat.S_ISREG(before.st_mode):
        sizes = f": {before.st_size:,} bytes before, {after.st_size:,} after"
        found = f"that it changed{sizes if before.st_size != after.st_size else ''}"
        fix = "wait until it is written, or give a copy of it"
        raise bad(source.name, "a file that stays as it is while it is read", found, fix)


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    head = raw.read(_HEAD)
    read = partial(getattr(raw, "read1", raw.read), _PIECE)
    if head.startswith(_GZIP_MAGIC) or (suffix == ".gz" and head):
        pieces = _unpacked(read, head, "gzip", partial(zlib.decompressobj, 31), _PIECE)
    elif suffix == ".zst" or head.startswith(_ZSTD_MAGIC):
        zstandard = required("zstandard", "zstd")
        read = partial(getattr(raw, "read1", raw.read), _ZSTD_PIECE)
        pieces = _unpacked(read, head, "zstd", zstandard.ZstdDecompressor().decompressobj)
    elif raw.seekable():
        raw.seek(0)
        return raw
    else:
        pieces = itertools.chain([head], iter(read, b""))
    return cast(BinaryIO, io.BufferedReader(_Pieces(pieces), 1 << 17))


class _Pieces(io.RawIOBase):
    """The bytes of an iterator, one piece after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        self._left = self._left or memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def _unpacked(
    read: Callable[[], bytes], head: bytes, kind: str, begin: Callable[[], Any], *most: int
) -> Iterator[bytes]:
    """Decompress data of one or more members (gzip) or frames (zstd), and refuse too many bytes.

    Args:
        begin: Makes the decompressor of a member. zstandard's own reader of files misses a frame that is cut
            off, so frames are taken one by one.
        most: Bytes that it returns at once, where it can be told.
    """
    taken = given = 0
    member = None
    for data in itertools.chain([head], iter(read, b"")):
        taken += len(data)
        while data:
            if member is None:
                data = data.lstrip(b"\0")  # some writers of gzip fill up with zeros
                if not data:
                    break
                member = begin()
            try:
                piece = member.decompress(data, *most)
            except Exception as error:  # zlib.error, ZstdError
                raise _refused(kind, str(error), given) from None
            given += len(piece)
            refuse_expansion(taken, given, _OTHERWISE)
            yield piece
            data = getattr(member, "unconsumed_tail", b"") or member.unused_data
            if member.eof:
                member = None
    if member is not None:
        raise _refused(kind, "truncated", given)


def _refused(kind: str, reason: str, given: int) -> DamagedStream:
    if "too much memory" in reason:
        fix = piped("zstd -dc --long=31", "<stdin>")
        return DamagedStream("a zstd file with a window of at most 128 MiB", "a larger one", fix)
    if not given and ("Unknown frame" in reason or "incorrect header" in reason):
        fix = "give the file the suffix of what it holds, or download it again"
        found = "bytes that are none: damaged, or named wrongly"
        return DamagedStream(f"{kind} data, as the name says", found, fix)
    fix = "copy or download the file again; a compressed file can be checked with gzip -t or zstd -t"
    return DamagedStream("a whole archive", f"that the {kind} data is damaged: {reason}", fix)


def decompressed_bytes(source: Source) -> int:
    """Count the bytes that a file gives; a compressed one is read to its end. Raises as `open_stream`."""
    with open_stream(source, ReadLog()) as stream:
        if not isinstance(getattr(stream, "raw", None), _Pieces):
            return os.fstat(stream.fileno()).st_size
        lines = length = 0
        try:
            while piece := stream.read(_PIECE):
                length += len(piece)
                lines += piece.count(b"\n")
        except DamagedStream as error:
            error.line = lines + 1
            raise
    return length


def read_lines(
    stream: BinaryIO, limit: int, first: int = 0, stop: int | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers (from 1); None for a line of more than `limit` bytes, never held whole.

    Args:
        first, stop: Only lines that begin at byte `first` or later, and before byte `stop`.

    Raises:
        DamagedStream: The operating system refuses to read on; a line has no end within 1 GiB.
    """
    number = place = 0
    try:
        while (stop is None or place < stop) and (line := stream.readline(limit + 1)):
            begin, place = place, place + len(line)
            long = len(line) > limit and not line.endswith(b"\n")
            if begin >= first:
                yield number + 1, None if long else line  # the reader may want no more of a long one
            del line
            if long:
                place += _pass_over(stream)
            number += 1
    except DamagedStream as error:
        error.line = number + 1
        raise
    except OSError as error:
        found = f"that the operating system refuses: {error.strerror or error}"
        fix = "check the disk or the connection that it is on, or read a copy"
        raise DamagedStream("more to read", found, fix, number + 1) from None


def _pass_over(stream: BinaryIO) -> int:
    """Read over the rest of a line; return its length."""
    passed = 0
    while piece := stream.readline(_PIECE):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
        if passed > _ENDLESS_LINE:
            fix = "give one object a line; carriage returns alone become line ends by: tr '\\r' '\\n' < FILE"
            raise DamagedStream("lines", f"one that goes on beyond {_ENDLESS_LINE:,} bytes", fix)
    return passed
