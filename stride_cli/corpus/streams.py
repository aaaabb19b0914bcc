"""Where the bytes of a corpus come from: files, globs, stdin; compressed or not, read in bounded pieces."""

from __future__ import annotations

import glob
import gzip
import io
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from stride_cli import output
from stride_cli.errors import CorpusError, require_extra

Kind = Literal["jsonl", "text", "parquet"]

_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".jsonlines", ".json"}
_PARQUET_SUFFIXES = {".parquet", ".pq"}
_PACKED_SUFFIXES = {".gz", ".zst"}
# formats that hold many records or no text; reading one as a single plain-text document is never meant
_REFUSED_SUFFIXES = {
    ".csv", ".tsv", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".arrow", ".feather", ".npy", ".npz",
    ".pkl", ".pt", ".bin", ".safetensors", ".gguf", ".pdf", ".docx", ".xlsx", ".db", ".sqlite",
}  # fmt: skip
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Small, because a zstd block of a few bytes can stand for 128 KiB: what one piece expands to stays bounded.
_ZSTD_PIECE = 2048
SKIPS_TOLD = 10


class DamagedStream(Exception):
    """A compressed stream that ends early or does not decode; the reader adds the file and line."""


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
        return self._bytes_before + (self._position() if self._position else 0)

    def enter(self, position: Callable[[], int] | None) -> None:
        """A source is being read; `position` gives its bytes read so far."""
        self._position = position

    def leave(self) -> None:
        """The source is read."""
        self._bytes_before = self.bytes_done
        self._position = None


def find_sources(sources: Sequence[str]) -> list[Source]:
    """The inputs that file names, globs and `-` stand for, in order; the matches of a glob sorted by name.

    Raises
    ------
    CorpusError
        Nothing given, no such file, a glob without a match, a directory, a format that is not read, or
        stdin named twice.
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
        path = Path(given)
        if path.exists():
            if path.is_dir():
                raise CorpusError(
                    f"{given}: expected a file of documents, found a directory",
                    fix=f"name the files in it: '{given.rstrip('/')}/*.jsonl'",
                )
            found.append(Source(given, path, _kind(path)))
        elif glob.has_magic(given):
            # glob.glob and not Path.glob: the names must stay as given, for they become ids of text files
            names = sorted(name for name in glob.glob(given, recursive=True) if Path(name).is_file())  # noqa: PTH207
            if not names:
                raise CorpusError(
                    f"{given}: the pattern matches no file",
                    fix=f"list what is there: ls {path.parent}; in quotes, '**' goes into sub-directories",
                )
            found.extend(Source(name, Path(name), _kind(Path(name))) for name in names)
        else:
            raise CorpusError(
                f"{given}: no such file", fix=f"check the name: ls {path.parent}; '-' reads from stdin"
            )
    return found


def total_bytes(sources: Sequence[Source]) -> int | None:
    """Bytes of all sources on disk; None when one of them is a stream."""
    total = 0
    for source in sources:
        if source.path is None or not source.path.is_file():
            return None
        total += source.path.stat().st_size
    return total


def _kind(path: Path) -> Kind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _JSONL_SUFFIXES:
        return "jsonl"
    if last in _PARQUET_SUFFIXES:
        return "parquet"
    if last in _REFUSED_SUFFIXES:
        raise CorpusError(
            f"{path}: expected JSON Lines (.jsonl, .gz, .zst), Parquet or plain text, found '{last}'",
            fix="convert it to JSON Lines: one object a line with 'id' and 'text'",
        )
    # a named pipe or /dev/fd/63 of `<(…)` has no suffix and holds records, as stdin does
    return "text" if stat.S_ISREG(path.stat().st_mode) else "jsonl"


@contextmanager
def open_stream(source: Source, log: ReadLog) -> Iterator[BinaryIO]:
    """The decompressed bytes of a source; gzip and zstd are known by their first bytes or the suffix.

    Raises
    ------
    CorpusError
        The file cannot be opened (permission).
    MissingExtraError
        The source is zstd and `zstandard` is not installed.
    DamagedStream
        While reading: the compressed data ends early or does not decode.
    """
    if source.path is None:
        stdin = sys.stdin.buffer
        log.enter(None)
        # left open: it is not ours to close
        yield _decompressed(cast(BinaryIO, stdin), "")
        return
    try:
        raw = source.path.open("rb")
    except OSError as error:
        raise CorpusError(
            f"{source.name}: cannot be opened: {error.strerror}", fix=f"check it: ls -l {source.name}"
        ) from None
    with raw:
        log.enter(raw.tell if raw.seekable() else None)
        try:
            yield _decompressed(raw, source.path.suffix.lower())
        finally:
            log.leave()


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    head = raw.peek(4)[:4] if hasattr(raw, "peek") else b""
    if suffix == ".gz" or head.startswith(_GZIP_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_GzipStream(raw), 1 << 17))
    if suffix == ".zst" or head == _ZSTD_MAGIC:
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), 1 << 17))
    return raw


class _GzipStream(io.RawIOBase):
    """A gzip stream whose damage has one name."""

    def __init__(self, raw: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=raw, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        try:
            return self._file.readinto(buffer)
        except EOFError:
            raise DamagedStream("the gzip data is truncated") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise DamagedStream(f"the gzip data is damaged: {error}") from None


class _ZstdStream(io.RawIOBase):
    """A zstd stream of one or more frames; unlike zstandard's reader it notices a frame that is cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise require_extra("zstandard", "zstd") from None
        self._raw = raw
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self._output:
            if not self._input:
                self._input = self._raw.read(_ZSTD_PIECE)
            if not self._input:
                if self._frame is not None:
                    raise DamagedStream("the zstd data is truncated")
                return 0
            if self._frame is None:
                self._frame = self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise DamagedStream(f"the zstd data is damaged: {error}") from None
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def read_lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers (from 1); None for a line of more than `limit` bytes, never held whole."""
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        if len(line) > limit and not line.endswith(b"\n"):
            del line
            while (piece := stream.readline(1 << 16)) and not piece.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line
