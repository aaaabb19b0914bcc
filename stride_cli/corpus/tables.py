"""Documents of Parquet and Arrow files, read by pyarrow in batches of rows.

In a small file one text can stand for a million rows. So texts of small row groups stay dictionary-encoded
until their row is read: a batch takes no more than its different texts, and a row that is too long is
refused before its texts are copied. Large row groups are read as they are, for pyarrow keeps the different
texts of a dictionary-encoded row group until its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stride_cli.corpus.documents import Document, DocumentParser, bad, check_count, not_utf8, too_long
from stride_cli.corpus.sources import ReadLog, Source
from stride_cli.corpus.streams import DamagedStream, open_file, refuse_expansion
from stride_cli.errors import CorpusError, first_line, required

_ROWS = 256  # at most, of a batch
_BATCH_BYTES = 64 << 20  # about, of a batch
_VALUE_BYTES = 32  # counted for a row or a message besides its texts, as JSON would take
_ARROW_FILE = b"ARROW1\0\0"  # start of the file format; `datasets` writes the stream format
_OTHERWISE = "can be piped in as JSON Lines"
# (names, first, stop) → (number of the first row, batch) of the batches with some of rows first … stop-1
_Batches = Callable[[Sequence[str], int, int], Iterator[tuple[int, Any]]]


def read_table(source: Source, parser: DocumentParser, log: ReadLog) -> Iterator[Document]:
    """Yield the documents of a Parquet or Arrow file, or of its share of the rows; a row counts as a line.

    Raises:
        CorpusError: The file is damaged, changes meanwhile, or expands to far more than it has; a row is no
            document, unless the log skips these.
        MissingExtraError: pyarrow is not installed.
    """
    required("pyarrow.parquet", "parquet")
    assert source.path is not None  # stdin is never a table
    if not source.path.is_file():
        fix = "copy it to a file: tables are read from their end"
        raise bad(source.name, f"a {source.kind.capitalize()} file", "a pipe or a device", fix)
    size, n_rows, row, given = source.path.stat().st_size, 1, 0, 0
    with open_file(source, source.path, log, lambda: size * row // max(1, n_rows)):
        # 1. columns that are fields of documents, and the rows of this share
        with _damage(source, 1):
            opened = (_open_parquet if source.kind == "parquet" else _open_arrow)(source.path)
            columns, n_rows, batches = opened
            wanted = dict.fromkeys([*parser.columns, *parser.fields.names()])
            names = [name for name in wanted if name in columns]
            for name in names:
                if (count := columns.count(name)) > 1:
                    raise bad(source.name, f"one column '{name}'", f"{count}", "rename the others")
        first, stop = (0, n_rows) if source.share is None else source.share.of(n_rows)
        # 2. each row as a line of JSON would have it, up to the bytes of a document
        for row, scalars in _rows(batches(names, first, stop), names, first, stop, source):
            values = _Row(f"{source.name}:{row}", parser)
            try:
                with _damage(source, row):
                    record = {name: values.take(scalar, name) for name, scalar in scalars.items()}
                document = parser.document(record, source.name, row, columns)
            except CorpusError as error:
                log.reject(error)
            else:
                yield document
            # 3. all rows together within what text expands to
            given += values.taken + _VALUE_BYTES
            with _damage(source, row):
                refuse_expansion(size, given, _OTHERWISE)


def _rows(
    batches: Iterator[tuple[int, Any]], names: list[str], first: int, stop: int, source: Source
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows first … stop-1, each with its number from 1, as pyarrow's scalars by name."""
    row = first
    while True:
        with _damage(source, row + 1):
            start, batch = next(batches, (0, None))
        if batch is None:
            return
        for index in range(max(first - start, 0), min(stop - start, batch.num_rows)):
            row = start + index + 1
            yield row, {name: batch.column(name)[index] for name in names}


@contextmanager
def _damage(source: Source, row: int) -> Iterator[None]:
    """Turn whatever pyarrow raises of a damaged file into a CorpusError that names the row."""
    where = f"{source.name}:{row}"
    try:
        yield
    except CorpusError:
        raise
    except DamagedStream as error:
        error.line = row
        raise error.at(source.name) from None
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from None
    except Exception as error:  # ArrowInvalid, and ValueError, KeyError, OverflowError … of names and types
        fix = "write the file again; a copy or download may have been cut off"
        kind = f"a readable {source.kind.capitalize()} file"
        raise bad(where, kind, f"that it is damaged: {first_line(error)}", fix) from None


def _open_parquet(path: Path) -> tuple[list[str], int, _Batches]:
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    leaves = (metadata.schema.column(number) for number in range(metadata.num_columns))
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    plain, coded = (
        parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, read_dictionary=columns)
        for columns in (None, texts)
    )

    def batches(names: Sequence[str], first: int, stop: int) -> Iterator[tuple[int, Any]]:
        expanded = ended = 0
        for number in range(metadata.num_row_groups):
            # not of the group's columns: asked for one of a damaged file, pyarrow 26 ends the process
            group = metadata.row_group(number)
            row, ended = ended, ended + group.num_rows
            if ended <= first or row >= stop:
                continue
            size = group.total_byte_size
            expanded += size
            refuse_expansion(path.stat().st_size, expanded, _OTHERWISE)
            rows = max(1, min(_ROWS, _BATCH_BYTES * group.num_rows // max(1, size)))
            options = {"batch_size": rows, "row_groups": [number], "columns": names, "use_threads": False}
            read = partial(parquet.ParquetFile.iter_batches, **options)
            yield from _numbered(read, [coded, plain] if size <= _BATCH_BYTES else [plain], row)

    return plain.schema_arrow.names, metadata.num_rows, batches


def _numbered(read: Callable[[Any], Iterator[Any]], files: list[Any], row: int) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first row, batch) of a row group that begins at a row.

    Files are tried in order: pyarrow 26 reads some encodings (DELTA_BYTE_ARRAY) into no dictionary, and a
    writer may change to one in the middle of a row group.
    """
    done = 0
    for file in files:
        seen = 0
        try:
            for batch in read(file):
                new = batch.slice(max(0, done - seen))
                seen += batch.num_rows
                if new.num_rows:
                    yield row + done, new
                    done += new.num_rows
            return
        except OSError:
            if file is files[-1]:
                raise


def _open_arrow(path: Path) -> tuple[list[str], int, _Batches]:
    import pyarrow
    from pyarrow import ipc

    data = pyarrow.memory_map(str(path)).read_buffer()
    if data[: len(_ARROW_FILE)].to_pybytes() == _ARROW_FILE:
        data = data.slice(len(_ARROW_FILE))  # a stream follows

    def batches(names: Sequence[str], first: int, stop: int) -> Iterator[tuple[int, Any]]:
        row = expanded = 0
        for batch in ipc.open_stream(data):
            if row + batch.num_rows > first and row < stop:
                batch = batch.select(names)
                batch.validate(full=True)  # else offsets that lead nowhere end the process
                expanded += batch.nbytes
                refuse_expansion(data.size, expanded, _OTHERWISE)
                yield row, batch
            row += batch.num_rows

    stream = ipc.open_stream(data)
    return stream.schema.names, sum(batch.num_rows for batch in stream), batches


class _Row:
    """Takes the values of one row as Python objects, up to the bytes that a document may have."""

    def __init__(self, where: str, parser: DocumentParser) -> None:
        self._where, self._limit = where, parser.max_bytes
        self.taken = 0

    def take(self, scalar: Any, name: str) -> Any:
        """Convert a value as a line of JSON would have it."""
        if not scalar.is_valid:
            return None
        if hasattr(scalar.type, "extension_name"):  # JSON, as `datasets` writes what differs between rows
            text = self.take(scalar.value, name)
            return json.loads(text) if scalar.type.extension_name == "arrow.json" else text
        if hasattr(scalar, "keys"):
            self.taken += _VALUE_BYTES
            taken = ((key, self.take(scalar[key], name)) for key in scalar)
            # what other rows have is null here
            return {key: value for key, value in taken if value is not None}
        if hasattr(scalar, "values"):
            check_count(len(scalar.values), self._where, name)
            return [self.take(item, name) for item in scalar]
        value = scalar.as_py()
        if isinstance(value, str | bytes):
            self.taken += len(value.encode() if isinstance(value, str) else value)
        if self.taken > self._limit:
            raise too_long(self._where, self._limit, "row")
        return value
