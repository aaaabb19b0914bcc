"""What a document is, and how a record of a corpus becomes one: checked, with an id of its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stride_cli.corpus.ids import SeenIds
from stride_cli.errors import CorpusError
from stride_cli.options import option

FIX_OR_SKIP = "correct the line, or leave such lines out with --on-bad skip"
# What the chain of document digests, which is a corpus' fingerprint, starts from
EMPTY_CORPUS = hashlib.sha256(b"STRIDE corpus, version 1").digest()
_MERGED_CORPUS = b"STRIDE corpus, merged, version 1"
MOST_ID_BYTES = 1 << 20  # ids are held by readers of an index, and written with each hit
# of one conversation: chat templates take time that grows with the square of their number
MOST_MESSAGES = 10_000


class Repeated(dict[str, Any]):
    """A JSON object that has some of its names more than once, of which the last counts: `names`."""

    names: frozenset[str]

    @classmethod
    def or_dict(cls, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The object of these names and values: a plain dict where no name is repeated."""
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated = cls(made)
        times = Counter(name for name, _ in pairs)
        repeated.names = frozenset(name for name, count in times.items() if count > 1)
        return repeated


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, a prompt with its response, or a conversation; the other fields are None.

    `messages` are `{"role": str, "content": str}`. `source` and `line` (from 1; the row of a Parquet file,
    1 for a text file) say where it was read.
    """

    id: str
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    source: str = ""
    line: int = 0

    @property
    def plain_text(self) -> str:
        """What a reader sees: the text; prompt and response, or the messages, on lines of their own."""
        if self.text is not None:
            return self.text
        if self.messages is not None:
            return "\n".join(message["content"] for message in self.messages)
        return f"{self.prompt}\n{self.response}"

    def digest(self, previous: bytes = b"") -> bytes:
        """SHA-256 over `previous` and this document's id and content (not where it was read).

        Chained over a corpus it is the corpus' fingerprint: equal for equal documents in equal order, however
        they were split into files, and extended by what is appended.
        """
        if self.text is not None:
            parts = ["text", self.id, self.text]
        elif self.messages is not None:
            parts = ["messages", self.id]
            for message in self.messages:
                parts += [message["role"], message["content"]]
        else:
            parts = ["prompt", self.id, self.prompt or "", self.response or ""]
        data = [part.encode() for part in parts]
        # lengths first: no two different documents give the same bytes
        lengths = ",".join(str(len(part)) for part in data).encode()
        return hashlib.sha256(b"\n".join([previous, lengths, *data])).digest()


def merged_digest(parts: Sequence[str]) -> bytes:
    """The fingerprint of a corpus of which only its parts' are known (hex), and not the documents as they
    were read."""
    return hashlib.sha256(b"\n".join([_MERGED_CORPUS, *(part.encode() for part in parts)])).digest()


@dataclass(frozen=True, slots=True)
class Fields:
    """The names that a corpus gives its fields; an empty name switches a field off."""

    id: str = option("id", flag="--field id=")
    text: str = option("text", flag="--field text=")
    prompt: str = option("prompt", flag="--field prompt=")
    response: str = option("response", flag="--field response=")
    messages: str = option("messages", flag="--field messages=")

    def names(self) -> list[str]:
        """The names in use."""
        return [name for name in (self.id, self.text, self.prompt, self.response, self.messages) if name]


class DocumentParser:
    """Turns records into documents and checks them."""

    def __init__(
        self,
        fields: Fields,
        max_bytes: int,
        number_ids: bool,
        first_number: int,
        seen: SeenIds,
    ) -> None:
        if max_bytes < 1:
            raise CorpusError(
                f"--max-document-bytes is {max_bytes}, expected at least 1", fix="leave it out for 16 MiB"
            )
        self.fields = fields
        self.max_bytes = max_bytes
        self._number: int | None = first_number if number_ids else None
        self._ids = seen

    def document(
        self, record: Mapping[str, Any], source: str, line: int, available: Sequence[str] | None = None
    ) -> Document:
        where = f"{source}:{line}"
        if isinstance(record, Repeated):
            used = [n for n in self.fields.names() if not (n == self.fields.id and self._number is not None)]
            _once(record, used, where, "the line")
        name = "" if self._number is not None else self._read_id(record, where, available)
        content = self._read_content(record, where, available)
        return Document(id=self._claim(name, source, line), source=source, line=line, **content)

    def text_file(self, text: str, source: str) -> Document:
        if self._number is None:
            _check_text(source, f"{source}:1", "the file's name, which is its id")
        _check_text(text, f"{source}:1", "the file")
        _filled(text, f"{source}:1", "the file")
        return Document(id=self._claim(source, source, 1), text=text, source=source, line=1)

    def _claim(self, name: str, source: str, line: int) -> str:
        if self._number is not None:
            name = str(self._number)
        first = self._ids.take(name, source, line)
        if first is not None:
            raise CorpusError(
                f"{source}:{line}: expected ids that differ, found id {_short(name)} again, first at {first}",
                fix="give each document its own id, number them with --number-ids, or keep the first of each "
                "with --on-bad skip",
            )
        if self._number is not None:
            self._number += 1
        return name

    def _read_id(self, record: Mapping[str, Any], where: str, available: Sequence[str] | None) -> str:
        field = self.fields.id
        value = record.get(field)
        if value is None or value == "":
            found = "an empty one" if value == "" else f"the fields {_listed(available or record)}"
            raise CorpusError(
                f"{where}: expected an id in the field '{field}', found {found}",
                fix="name the field that holds the ids with --field id=NAME, or number the documents with "
                "--number-ids",
            )
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                return str(value)
            except ValueError:  # over 4300 digits, which only a parser without that limit gives
                value = float("inf")
        if not isinstance(value, str):
            raise _wrong_type(where, f"'{field}'", "a string or an integer", value)
        _check_text(value, where, f"the field '{field}'")
        # four bytes a character at most
        if len(value) * 4 > MOST_ID_BYTES and len(value.encode()) > MOST_ID_BYTES:
            raise CorpusError(
                f"{where}: expected an id of at most {MOST_ID_BYTES:,} bytes in the field '{field}', found "
                f"{len(value.encode()):,}",
                fix="name the field that holds the ids with --field id=NAME, or number the documents with "
                "--number-ids",
            )
        return value

    def _read_content(
        self, record: Mapping[str, Any], where: str, available: Sequence[str] | None
    ) -> dict[str, Any]:
        names = self.fields
        text = record.get(names.text) if names.text else None
        prompt = record.get(names.prompt) if names.prompt else None
        response = record.get(names.response) if names.response else None
        messages = record.get(names.messages) if names.messages else None
        forms = [
            form
            for form, there in (
                (f"'{names.text}'", text is not None),
                (f"'{names.prompt}' and '{names.response}'", prompt is not None and response is not None),
                (f"'{names.messages}'", messages is not None),
            )
            if there
        ]
        if len(forms) > 1:
            raise CorpusError(
                f"{where}: expected one form of content, found {' and also '.join(forms)}",
                fix="switch a field off with an empty name: --field text= (or messages=)",
            )
        if not forms:
            named = (names.text, names.prompt, names.response, names.messages)
            if nothing := [name for name in named if name and name in record and record[name] is None]:
                raise CorpusError(
                    f"{where}: expected text, found null in the field '{nothing[0]}'", fix=FIX_OR_SKIP
                )
            raise CorpusError(
                f"{where}: expected '{names.text}', or '{names.prompt}' and '{names.response}', or "
                f"'{names.messages}', found the fields {_listed(available or record)}",
                fix="name the field that holds the text with --field text=NAME (or prompt=, response=, "
                "messages=)",
            )
        if text is not None:
            return {
                "text": _filled(
                    _string(text, where, f"the field '{names.text}'"), where, f"the field '{names.text}'"
                )
            }
        if messages is not None:
            return {"messages": _check_messages(messages, where, names.messages)}
        what = f"the field '{names.response}'"
        return {
            "prompt": _string(prompt, where, f"the field '{names.prompt}'"),
            "response": _filled(_string(response, where, what), where, what),
        }


def _check_messages(messages: Any, where: str, field: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list):
        raise _wrong_type(where, f"the field '{field}'", "a list of {role, content}", messages)
    if len(messages) > MOST_MESSAGES:
        raise too_many_messages(where, field, len(messages))
    checked = []
    for number, message in enumerate(messages, 1):
        what = f"message {number} of '{field}'"
        if not isinstance(message, Mapping):
            raise _wrong_type(where, what, "an object {role, content}", message)
        if isinstance(message, Repeated):
            _once(message, ("role", "content"), where, what)
        role = _string(message.get("role"), where, f"'role' of {what}")
        content = _string(message.get("content"), where, f"'content' of {what}")
        checked.append({"role": _filled(role, where, f"'role' of {what}"), "content": content})
    if not any(message["content"].strip() for message in checked):
        raise _empty(where, f"the field '{field}'")
    return tuple(checked)


def _once(record: Repeated, names: Iterable[str], where: str, what: str) -> None:
    repeated = [name for name in names if name in record.names]
    if repeated:
        raise CorpusError(
            f"{where}: expected each field once, found {_listed(repeated)} more than once in {what}",
            fix=FIX_OR_SKIP,
        )


def _string(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(where, what, "a string", value)
    _check_text(value, where, what)
    return value


def _check_text(text: str, where: str, what: str) -> None:
    if "\0" in text:
        raise nul_found(where, what)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{where}: expected text that is valid Unicode, found half of a surrogate pair "
                f"({text[error.start]!a}) in {what}",
                fix=FIX_OR_SKIP,
            ) from None


def _filled(text: str, where: str, what: str) -> str:
    if not text or text.isspace():
        raise _empty(where, what)
    return text


def nul_found(where: str, what: str) -> CorpusError:
    """The error for a NUL character."""
    return CorpusError(f"{where}: expected text, found a NUL character in {what}", fix=FIX_OR_SKIP)


def not_utf8(where: str, error: UnicodeDecodeError) -> CorpusError:
    """The error for bytes that are not UTF-8, naming the first."""
    return CorpusError(
        f"{where}: expected UTF-8, found the byte 0x{error.object[error.start]:02x}",
        fix="convert it (iconv -f latin1 -t utf-8), or leave such lines out with --on-bad skip",
    )


def too_long(where: str, limit: int, unit: str) -> CorpusError:
    """The error for a line, file or row of more bytes than a document may have."""
    return CorpusError(
        f"{where}: expected a {unit} of at most {limit:,} bytes, found a longer one",
        fix="split the document, raise --max-document-bytes, or leave it out with --on-bad skip",
    )


def too_many_messages(where: str, field: str, found: int) -> CorpusError:
    """The error for a conversation of more than `MOST_MESSAGES`."""
    return CorpusError(
        f"{where}: expected at most {MOST_MESSAGES:,} messages in '{field}', found {found:,}",
        fix="split the conversation, or leave such lines out with --on-bad skip",
    )


def _empty(where: str, what: str) -> CorpusError:
    return CorpusError(
        f"{where}: expected a document with text, found {what} empty",
        fix="remove the line, or leave such lines out with --on-bad skip",
    )


def _wrong_type(where: str, what: str, expected: str, found: Any) -> CorpusError:
    return CorpusError(
        f"{where}: expected {what} to be {expected}, found {type_name(found)}", fix=FIX_OR_SKIP
    )


def type_name(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, float) and value != value:
        return "the number NaN"
    if isinstance(value, int | float):
        return "a number"
    for kind, name in ((str, "a string"), (list, "a list"), (dict, "an object"), (bytes, "raw bytes")):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def _listed(names: Iterable[str]) -> str:
    shown = [f"'{_clip(str(name), 30)}'" for name in names]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "") if shown else "(none)"


def _short(name: str) -> str:
    return f"'{_clip(name, 60)}'"


def _clip(text: str, width: int) -> str:
    shown = text if len(text) <= width else text[: width - 1] + "…"
    # what a corpus calls a thing must not steer the terminal
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
