"""Rows of tables of Arrow's, as lines of JSON would have them, and no more bytes of them than a document may
have; for every file whose columns pyarrow reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stride_cli.corpus.documents import (
    MOST_MESSAGES,
    Document,
    DocumentParser,
    Foreign,
    not_utf8,
    too_long,
    too_many_messages,
)
from stride_cli.corpus.streams import DamagedStream, ReadLog, refuse_expansion
from stride_cli.errors import CorpusError, first_line

_OBJECT_BYTES = 8 << 20  # of a column of a batch that becomes Python objects at once
VALUE_BYTES = 32  # what a row or a message takes beside its texts, about as much as in JSON


def damaged(where: str, error: Exception, kind: str = "Parquet") -> CorpusError:
    """The error for a file that cannot be read on."""
    return CorpusError(
        f"{where}: expected a readable {kind} file, found: {first_line(error)}",
        fix="write the file again; a copy or download may have been cut off",
    )


def message_type(kind: Any) -> Any:
    """The type of a message in a column of lists of {role, content}; None where the column is another."""
    from pyarrow import types

    if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_struct(kind.value_type):
        return None
    element = kind.value_type
    for name in ("role", "content"):
        number = element.get_field_index(name)  # -1: absent, or there twice
        if number < 0 or types.is_nested(element.field(number).type):
            return None
        if types.is_fixed_size_binary(plain_type(element.field(number).type)):
            return None
    return element


def plain_type(kind: Any) -> Any:
    """A type without what is around it: an extension's name, a dictionary."""
    while True:
        inner = getattr(kind, "storage_type", None) or getattr(kind, "value_type", None)
        if inner is None:
            return kind
        kind = inner


class Column:
    """A column of a batch: as Python objects at once where these are small, which is faster.

    Attributes
    ----------
    name : str
    array : pyarrow.Array
    objects : list, optional        a value a row
    are_messages : bool
    """

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.array = array
        element = message_type(array.type)
        self.are_messages = element is not None
        kinds = (
            [array.type] if element is None else [element.field(n).type for n in range(element.num_fields)]
        )
        self.objects: list[Any] | None = None
        if all(is_simple(kind) for kind in kinds) and array.nbytes <= _OBJECT_BYTES:
            # where one is no UTF-8 its row is found one by one
            with suppress(UnicodeDecodeError):
                self.objects = array.to_pylist()


def is_simple(kind: Any) -> bool:
    """Whether values of a type are Python's: not a date, nor one that is held once for many rows."""
    from pyarrow import types

    tests = (
        types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_null,
        types.is_integer, types.is_floating, types.is_boolean,
    )  # fmt: skip
    return any(test(kind) for test in tests)


class RowReader:
    """Makes documents of the rows of a file, batch after batch, within what it may expand to.

    Parameters
    ----------
    name : str            what the file is called
    stored : int          its bytes
    kind : str            its format, in errors
    otherwise : str       what can be done with a file that expands to too much

    Attributes
    ----------
    row : int             rows that were looked at
    """

    def __init__(
        self, name: str, stored: int, parser: DocumentParser, log: ReadLog, *, kind: str, otherwise: str
    ) -> None:
        self._name, self._stored, self._parser, self._log = name, stored, parser, log
        self._kind, self._otherwise = kind, otherwise
        self._given = self.row = 0

    def documents(
        self, columns: list[Column], n_rows: int, foreign: dict[str, Foreign], names: list[str]
    ) -> Iterator[Document]:
        """The documents of a batch; a row that is none goes to the log.

        Parameters
        ----------
        columns : those read
        foreign : wanted ones of which no document can be made, and what stands for a value
        names : all columns of the file

        Raises
        ------
        CorpusError     the rows so far hold far more than the file does
        """
        for index in range(n_rows):
            self.row += 1
            values = Row(self._parser.max_bytes, f"{self._name}:{self.row}", self._kind)
            try:
                record = foreign | values.all_of(columns, index)
                document = self._parser.document(record, self._name, self.row, names)
            except CorpusError as error:
                self._log.reject(error)
            else:
                yield document
            self._given += values.taken + VALUE_BYTES
            try:
                refuse_expansion(self._stored, self._given, self._otherwise)
            except DamagedStream as error:
                raise CorpusError(f"{self._name}:{self.row}: {error.message}", fix=error.fix) from None


class Row:
    """Takes the values of a row, and no more bytes than a document may have."""

    def __init__(self, limit: int, where: str, kind: str = "Parquet") -> None:
        self._limit = limit
        self._where = where
        self._kind = kind
        self.taken = 0

    def all_of(self, columns: list[Column], index: int) -> dict[str, Any]:
        """A row of a batch, as a line of JSON would have it."""
        try:
            return {column.name: self._of(column, index) for column in columns}
        except CorpusError:
            raise
        except Exception as error:  # an index beyond its dictionary, say
            raise damaged(self._where, error, self._kind) from None

    def _of(self, column: Column, index: int) -> Any:
        if column.objects is None:
            one = column.array[index]
            return self._messages(one, column.name) if column.are_messages else self._value(one)
        value = column.objects[index]
        if not column.are_messages:
            return self._object(value)
        if value is not None:
            if len(value) > MOST_MESSAGES:
                raise too_many_messages(self._where, column.name, len(value))
            for message in value:
                self._take(VALUE_BYTES)
                for content in (message or {}).values():
                    self._object(content)
        return value

    def _object(self, value: Any) -> Any:
        if isinstance(value, str):
            self._take(len(value) if value.isascii() else len(value.encode()))
        elif isinstance(value, bytes):
            self._take(len(value))
        return value

    def _value(self, scalar: Any) -> Any:
        """A text, a number, bytes or None; a date and the like as what it is."""
        import pyarrow

        while isinstance(scalar, pyarrow.DictionaryScalar | pyarrow.ExtensionScalar):
            scalar = scalar.value
        if scalar is None or not scalar.is_valid:
            return None
        if hasattr(scalar, "as_buffer"):
            self._take(scalar.as_buffer().size)
        elif not is_simple(scalar.type):
            return Foreign(str(scalar.type))
        try:
            return scalar.as_py()
        except UnicodeDecodeError as error:
            raise not_utf8(self._where, error) from None

    def _messages(self, scalar: Any, name: str) -> list[dict[str, Any]] | None:
        if not scalar.is_valid:
            return None
        items = scalar.values
        if len(items) > MOST_MESSAGES:
            raise too_many_messages(self._where, name, len(items))
        roles, contents = (items.field(items.type.get_field_index(key)) for key in ("role", "content"))
        found = []
        for number in range(len(items)):
            self._take(VALUE_BYTES)
            found.append({"role": self._value(roles[number]), "content": self._value(contents[number])})
        return found

    def _take(self, size: int) -> None:
        self.taken += size
        if self.taken > self._limit:
            raise too_long(self._where, self._limit, "row")
