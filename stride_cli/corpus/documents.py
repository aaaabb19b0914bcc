"""Make documents of the records of a corpus: checked, each with an id of its own."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import sqlite3
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from index_format.durable import storage
from stride_cli.characters import one_line, shortened
from stride_cli.errors import CorpusError
from stride_cli.options import option

# the place of ids that an index has already; that of a line is (number of its source) << 40 | line
_KNOWN = 1
_OPENING = (
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    "PRAGMA cache_size = -4096",  # kB
    "BEGIN",  # never committed: what the cache cannot hold goes to the file, and all of it with the read
    "CREATE TABLE seen (digest BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID",
)


class SeenIds:
    """Ids by 16-byte digest, with where each was first seen.

    They are in a SQLite table, some 40 bytes each: some 100,000 in memory, more in a file without a name.

    Args:
        known: Ids taken from the start.
        directory: Where that file is made; default: the system's temporary directory.

    Raises:
        StorageFull: There is no space for the file.
        OSError: It cannot be made in that directory.
    """

    def __init__(self, known: Iterable[str] = (), directory: Path | None = None) -> None:
        self._names: list[str] = ["the index that is appended to"]
        self._number: dict[str, int] = {}
        self._directory = Path(tempfile.gettempdir()) if directory is None else directory
        for name in known:
            self._place(name, _KNOWN)

    def take(self, name: str, source: str, line: int) -> str | None:
        """Take an id; return None where it was free, else where it was first seen."""
        number = self._number.setdefault(source, len(self._names))
        if number == len(self._names):
            self._names.append(source)
        first = self._place(name, number << 40 | line)
        if first is None:
            return None
        source_name = self._names[first >> 40]
        return source_name if first == _KNOWN else f"{source_name}:{first & (1 << 40) - 1}"

    def _place(self, name: str, place: int) -> int | None:
        """Enter an id; return None where it was new, else the place that it was entered with."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        try:
            if self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, place)).rowcount:
                return None
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            with storage(self._directory, len(digest)):
                raise OSError(code, f"{os.strerror(code)}: {error}", str(self._directory)) from error
        (found,) = self._table.execute("SELECT place FROM seen WHERE digest = ?", (digest,)).fetchone()
        return int(found)

    @cached_property
    def _table(self) -> sqlite3.Connection:
        with storage(self._directory, 0), tempfile.NamedTemporaryFile(dir=self._directory) as file:
            # one thread may open what another reads
            table = sqlite3.connect(file.name, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, table.close)
            for statement in _OPENING:
                table.execute(statement)
        return table


FIX_OR_SKIP = "correct the line, or leave such lines out with --on-bad skip"
# start of the chain of document digests, which is a corpus' fingerprint
EMPTY_CORPUS = hashlib.sha256(b"STRIDE corpus, version 1").hexdigest()
_MERGED_CORPUS = b"STRIDE corpus, merged, version 1"
MOST_ID_BYTES = 1 << 20  # ids are held by readers of an index, and written with each hit
MOST_TITLE = 200  # characters that are kept of one
# of one conversation: chat templates take time that grows with the square of their number
MOST_MESSAGES = 10_000
_MORE = ("tools", "chat_template_kwargs", "trained_on")  # fields that are read and have no other name
_ALIASES = {
    **dict.fromkeys(("completion", "answer", "output", "target", "chosen"), "response"),
    **dict.fromkeys(("question", "instruction", "input", "query"), "prompt"),
    **dict.fromkeys(("content", "document", "body"), "text"),
    **dict.fromkeys(("conversation", "conversations", "turns"), "messages"),
}
_NAME_IDS = "name the field of the ids with --field id=NAME, or number the documents with --number-ids"


class Repeated(dict[str, Any]):
    """A JSON object that has some of its names more than once, of which the last counts: `names`."""

    names: frozenset[str]

    @classmethod
    def or_dict(cls, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Make an object of names and values: a plain dict where no name is repeated."""
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

    Attributes:
        messages: Each ``{"role": str, "content": str, …}``, whole, as the chat template gets it.
        template: What else the template gets: ``{"tools": […], …}``.
        tokens: Token ids, and first and stop of what is scored, as a trainer had them.
        title: What people call it; empty: no more than its id.
        source, line: Where it was read; line from 1: the row of a table, 1 for a text file.
    """

    id: str
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    template: dict[str, Any] | None = None
    tokens: tuple[list[int], list[list[int]]] | None = None
    title: str = ""
    source: str = ""
    line: int = 0

    @property
    def plain_text(self) -> str:
        """Join prompt and response, or the messages, by line breaks, as people read them."""
        return self.text if self.text is not None else "\n".join(map(content_text, self.turns))

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages of a conversation, or of a prompt with its response; none of a text."""
        pair = (("user", self.prompt), ("assistant", self.response))
        told = [{"role": role, "content": content} for role, content in pair if content is not None]
        return told if self.messages is None else list(self.messages)

    def digest(self, previous: bytes = b"") -> bytes:
        """Return SHA-256 over `previous` and this document's id and content (not where it was read).

        Chained over a corpus it is the corpus' fingerprint: equal for equal documents in equal order, however
        they were split into files, and extended by what is appended.
        """
        if self.text is not None:
            parts = ["text", self.id, self.text]
        elif self.messages is not None:
            parts = ["messages", self.id]
            for message in self.messages:
                parts += [message["role"], content_text(message)]
        else:
            parts = ["prompt", self.id, self.prompt or "", self.response or ""]
        plain = all(message.keys() == {"role", "content"} for message in self.messages or ())
        if not plain or self.template or self.tokens:
            parts.append(json.dumps([self.messages, self.template, self.tokens], sort_keys=True))
        data = [part.encode() for part in parts]
        # lengths first: no two different documents give the same bytes
        lengths = ",".join(str(len(part)) for part in data).encode()
        return hashlib.sha256(b"\n".join([previous, lengths, *data])).digest()


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or that of its parts; empty where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content or ""


def chained(digest: str, documents: Iterable[Document]) -> str:
    """Chain documents to a fingerprint (hex); `EMPTY_CORPUS` is that of none."""
    chain = bytes.fromhex(digest)
    for document in documents:
        chain = document.digest(chain)
    return chain.hex()


def merged_digest(parts: Sequence[str]) -> str:
    """Return the fingerprint of a corpus of which only its parts' are known, not all its documents (hex)."""
    return hashlib.sha256(b"\n".join([_MERGED_CORPUS, *(part.encode() for part in parts)])).hexdigest()


@dataclass(frozen=True, slots=True)
class Fields:
    """The names that a corpus gives its fields; an empty name switches a field off."""

    id: str = option("id", flag="--field id=")
    text: str = option("text", flag="--field text=")
    prompt: str = option("prompt", flag="--field prompt=")
    response: str = option("response", flag="--field response=")
    messages: str = option("messages", flag="--field messages=")
    title: str = option("title", flag="--field title=")

    def names(self) -> list[str]:
        """List the names in use."""
        return [name for name in asdict(self).values() if name]


class DocumentParser:
    """Turns records into documents and checks them.

    Args:
        first_number: The next document's number, where documents are numbered and ids are not read.
        seen: Ids that are taken.
        unread: Counts fields that are none of a document's, each with the lacking one that may be meant.
    """

    def __init__(
        self,
        fields: Fields,
        max_bytes: int,
        number_ids: bool,
        first_number: int,
        seen: SeenIds,
        unread: Counter[tuple[str, str]],
    ) -> None:
        self.fields = fields
        self.unread = unread
        # of a field in an object, the object's
        self.columns = list(dict.fromkeys([name.split(".")[0] for name in fields.names()] + [*_MORE]))
        self._names = tuple(fields.names())
        self._known = {*self.columns, *self._names}
        self.max_bytes = max_bytes
        self._number: int | None = first_number if number_ids else None
        self._ids = seen

    def document(
        self, record: Mapping[str, Any], source: str, line: int, available: Sequence[str] | None = None
    ) -> Document:
        """Make a document of a record; CorpusError where it is none.

        Args:
            available: All fields of the source, for errors; default: the record's.
        """
        where = f"{source}:{line}"
        numbered = self._number is not None
        if isinstance(record, Repeated):
            used = [name for name in self.fields.names() if not (numbered and name == self.fields.id)]
            _once(record, used, where, "the line")
        name = "" if numbered else self._read_id(record, where, available or record)
        content = self._read_content(record, where, available or record)
        for key in available or record:
            if key not in self._known:
                meant = meant_by(key, self._names)
                self.unread[key, meant if meant and meant not in record else ""] += 1
        name, title = self._claim(name, source, line), _field(record, self.fields.title)
        if isinstance(title, str) and title != name:
            content["title"] = shortened(one_line(" ".join(title.split())), MOST_TITLE)
        return Document(id=name, source=source, line=line, **content)

    def text_file(self, text: str, source: str) -> Document:
        """Make a document of a text file, whose name is its id."""
        if self._number is None:
            _string(source, f"{source}:1", "the file's name, which is its id")
        _filled(text, f"{source}:1", "the file")
        return Document(id=self._claim(source, source, 1), text=text, source=source, line=1)

    def _claim(self, name: str, source: str, line: int) -> str:
        if self._number is not None:
            name = str(self._number)
        first = self._ids.take(name, source, line)
        if first is not None:
            found = f"id '{_clip(name, 60)}' again, first at {first}"
            fix = "give each its own, number them (--number-ids), or keep the first of each (--on-bad skip)"
            raise bad(f"{source}:{line}", "ids that differ", found, fix)
        if self._number is not None:
            self._number += 1
        return name

    def _read_id(self, record: Mapping[str, Any], where: str, available: Iterable[str]) -> str:
        field = self.fields.id
        value = _field(record, field)
        if value is None or value == "":
            found = "an empty one" if value == "" else f"the fields {listed(available)}"
            raise bad(where, f"an id in the field '{field}'", found, _NAME_IDS)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise bad(where, f"'{field}' to be a string or an integer", type_name(value))
        _string(value, where, f"the field '{field}'")
        if (size := len(value.encode())) > MOST_ID_BYTES:
            wanted = f"an id of at most {MOST_ID_BYTES:,} bytes in the field '{field}'"
            raise bad(where, wanted, f"{size:,}", _NAME_IDS)
        return value

    def _read_content(
        self, record: Mapping[str, Any], where: str, available: Iterable[str]
    ) -> dict[str, Any]:
        names = self.fields
        fields = (names.text, names.prompt, names.response, names.messages)
        text, prompt, response, messages = (_field(record, name) for name in fields)
        forms = [
            (f"'{names.text}'", text is not None),
            (f"'{names.prompt}' and '{names.response}'", prompt is not None and response is not None),
            (f"'{names.messages}'", messages is not None),
        ]
        given = [form for form, there in forms if there]
        if len(given) > 1:
            fix = "switch a field off with an empty name: --field text= (or messages=)"
            raise bad(where, "one form of content", " and also ".join(given), fix)
        if not given:
            for name in fields:
                if name in record and record[name] is None:
                    raise bad(where, "text", f"null in the field '{name}'")
            fix = "name the field of the text with --field text=NAME (or prompt=, response=, messages=)"
            raise bad(where, ", or ".join(form for form, _ in forms), f"the fields {listed(available)}", fix)
        tokens = _trained_on(record.get("trained_on"), where)
        if text is not None:
            return tokens | {"text": _filled(text, where, f"the field '{names.text}'")}
        if messages is not None:
            checked = check_messages(messages, where, names.messages)
            return tokens | {"messages": checked, "template": _template_options(record, where)}
        return tokens | {
            "prompt": _string(prompt, where, f"the field '{names.prompt}'"),
            "response": _filled(response, where, f"the field '{names.response}'"),
        }


def _field(record: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record, or of an object in it ("meta.text")."""
    if name in record or "." not in name:
        return record.get(name)
    top, _, rest = name.partition(".")
    inner = record.get(top)
    return _field(inner, rest) if isinstance(inner, Mapping) else None


@lru_cache(maxsize=1024)
def meant_by(key: str, names: tuple[str, ...]) -> str | None:
    """Return the name that an unknown key was perhaps meant to be."""
    if (other := _ALIASES.get(key.lower())) in names:
        return other
    return next(iter(difflib.get_close_matches(key.lower(), names, 1, 0.7)), None)


def _trained_on(found: Any, where: str) -> dict[str, Any]:
    """Read the tokens that a trainer had, as `StrideCallback` writes them."""
    if found is None:
        return {}
    ids, spans = (found.get(name) if isinstance(found, dict) else None for name in ("input_ids", "scored"))
    whole = isinstance(ids, list) and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in ids)
    if not whole or not isinstance(spans, list) or not all(_is_span(span, len(ids or ())) for span in spans):
        raise bad(where, "'trained_on' to have token ids and what of them is scored", type_name(found))
    return {"tokens": (ids, spans)}


def _is_span(found: Any, length: int) -> bool:
    pair = isinstance(found, list) and len(found) == 2 and all(isinstance(each, int) for each in found)
    return pair and 0 <= found[0] <= found[1] <= length


def _template_options(record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Read what a chat template gets beside the messages; as TRL, tools are a list, or its JSON."""
    tools, options = record.get("tools") or [], record.get("chat_template_kwargs") or {}
    with suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise bad(where, "'tools' to be a list of objects", type_name(tools))
    if not isinstance(options, Mapping):
        raise bad(where, "'chat_template_kwargs' to be an object", type_name(options))
    return {**({"tools": tools} if tools else {}), **options} or None


def check_messages(messages: Any, where: str, field: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of a conversation, whole but for nulls; CorpusError where they are none."""
    if not isinstance(messages, list):
        raise bad(where, f"the field '{field}' to be a list of {{role, content}}", type_name(messages))
    check_count(len(messages), where, field)
    checked = []
    for number, message in enumerate(messages, 1):
        what = f"message {number} of '{field}'"
        if not isinstance(message, Mapping):
            raise bad(where, f"{what} to be an object {{role, content}}", type_name(message))
        if isinstance(message, Repeated):
            _once(message, message.names, where, what)
        _filled(message.get("role"), where, f"'role' of {what}")
        # tables have null where JSON has no field, and templates would print it
        whole = {key: value for key, value in message.items() if value is not None}
        content = whole.get("content")
        parts = content if isinstance(content, list) else []
        if not (parts and all(isinstance(part, Mapping) for part in parts)) and (
            content is not None or not whole.get("tool_calls")
        ):
            _string(content, where, f"'content' of {what}")
        _string(content_text(whole), where, f"'content' of {what}")
        for name in ("train", "loss", "weight"):
            if whole.get(name, 0) not in (0, 1):
                raise bad(where, f"'{name}' of {what} to be 0 or 1, or true or false", repr(whole[name])[:40])
        checked.append(whole)
    if not any(content_text(message).strip() or message.get("tool_calls") for message in checked):
        raise _empty(where, f"the field '{field}'")
    return tuple(checked)


def _once(record: Repeated, names: Iterable[str], where: str, what: str) -> None:
    repeated = [name for name in names if name in record.names]
    if repeated:
        raise bad(where, "each field once", f"{listed(repeated)} more than once in {what}")


def _string(value: Any, where: str, what: str) -> str:
    """Return a text that can be stored; CorpusError for another type, a NUL or half a character."""
    if not isinstance(value, str):
        raise bad(where, f"{what} to be a string", type_name(value))
    if "\0" in value:
        raise bad(where, "text", f"a NUL character in {what}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair ({value[error.start]!a}) in {what}"
        raise bad(where, "text that is valid Unicode", half) from None
    return value


def _filled(value: Any, where: str, what: str) -> str:
    text = _string(value, where, what)
    if not text or text.isspace():
        raise _empty(where, what)
    return text


def bad(where: str, expected: str, found: str, fix: str = FIX_OR_SKIP) -> CorpusError:
    """Make the error for a place of a corpus ("FILE:LINE")."""
    return CorpusError(f"{where}: expected {expected}, found {found}", fix=fix)


def not_utf8(where: str, error: UnicodeDecodeError) -> CorpusError:
    """Make the error for bytes that are not UTF-8, naming the first."""
    fix = "convert it (iconv -f latin1 -t utf-8), or leave such lines out with --on-bad skip"
    return bad(where, "UTF-8", f"the byte 0x{error.object[error.start]:02x}", fix)


def too_long(where: str, limit: int, unit: str) -> CorpusError:
    """Make the error for a line, file or row of more bytes than a document may have."""
    fix = "split the document, raise --max-document-bytes, or leave it out with --on-bad skip"
    return bad(where, f"a {unit} of at most {limit:,} bytes", "a longer one", fix)


def check_count(found: int, where: str, field: str) -> None:
    """Refuse a conversation of more than `MOST_MESSAGES`."""
    if found > MOST_MESSAGES:
        fix = "split the conversation, or leave such lines out with --on-bad skip"
        raise bad(where, f"at most {MOST_MESSAGES:,} messages in '{field}'", f"{found:,}", fix)


def _empty(where: str, what: str) -> CorpusError:
    fix = "remove the line, or leave such lines out with --on-bad skip"
    return bad(where, "a document with text", f"{what} empty", fix)


# bool before int, which it is one of
_TYPES: tuple[tuple[Any, str], ...] = (
    (type(None), "nothing (null)"), (bool, "true or false"), (int | float, "a number"), (str, "a string"),
    (list, "a list"), (dict, "an object"), (bytes, "raw bytes"),
)  # fmt: skip


def type_name(value: Any) -> str:
    """Name the type of a JSON value."""
    if isinstance(value, float) and value != value:
        return "the number NaN"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), type(value).__name__)


def listed(names: Iterable[str]) -> str:
    """List the first eight names, each quoted and shortened."""
    shown = [f"'{_clip(str(name), 30)}'" for name in names]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "") if shown else "(none)"


def _clip(text: str, width: int) -> str:
    shown = text if len(text) <= width else text[: width - 1] + "…"
    # names of a corpus must not steer the terminal
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
