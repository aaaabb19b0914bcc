"""Text from documents, models, files and people, made safe to show on a terminal, in a page, in a table."""

from __future__ import annotations

import html
import re

from stride_cli.errors import QueryError

# marks that turn the order of what stands around them: an id could read as another
_TURNS = "\u202a-\u202e\u2066-\u2069"
# control characters, which can steer a terminal and do not belong in HTML; halves of characters; what is none
_STEERS = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNS}\ud800-\udfff\ufffe\uffff]")
# of these what a JSON writer leaves as it is; and what many a reader of lines takes for the end of one
_STEERS_IN_JSON = re.compile(rf"[\x7f-\x9f\u2028\u2029{_TURNS}\ud800-\udfff\ufffe\uffff]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: str) -> str:
    r"""The text, of several lines perhaps, with what is no character, or would steer a terminal, escaped.

    An escape character is shown as ``\x1b``, half of a surrogate pair as ``\ud800``, a byte of a file name
    that is not UTF-8 as ``\xff``.
    """
    return _STEERS.sub(_escaped, text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: str) -> str:
    r"""`printable` of a name, which is one line: a line's end in it is shown as ``\n``."""
    return _STEERS.sub(_escaped, text).replace("\n", "\\n").replace("\t", "\\t")


def printable_json(text: str) -> str:
    """JSON that says the same, with what `printable` escapes, or ends a line, written as JSON escapes it."""
    return _STEERS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def html_text(text: str) -> str:
    """`printable` as text of a page, or as an attribute's value in quotes."""
    return html.escape(printable(text))


def page_policy(script: str) -> str:
    """A Content-Security-Policy for a page of texts that may hold anything: besides their being escaped,
    nothing runs but the page's own script, and nothing is fetched."""
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def cell(value: str) -> str:
    """Text for a cell of a spreadsheet: what would be run as a formula gets an apostrophe before it."""
    return f"'{value}" if value.startswith(_FORMULA) else value


def shortened(name: str, length: int = 20) -> str:
    """The name, or as much of it as `length` characters hold."""
    return name if len(name) <= length else name[: length - 1] + "…"


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def check_text(text: str, what: str) -> None:
    """QueryError where a text holds a NUL, half of a surrogate pair, or bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        if "\udc80" <= found <= "\udcff":  # how Python hands on a byte that it cannot decode
            said = f"{what} is not UTF-8 (found the byte 0x{ord(found) - 0xDC00:02x})"
            raise QueryError(said, fix="convert it: iconv -f latin1 -t utf-8") from None
        said = f"{what} has half of a surrogate pair ({found!a})"
        raise QueryError(said, fix="write both halves, or the character itself") from None
    if "\0" in text:
        raise QueryError(f"{what} contains a NUL character", fix="remove it")


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads in JSON and the standard does not have."""
    raise ValueError(f"{constant} is no JSON number")


# letters of scripts that put no space between words: Thai to Tibetan, Myanmar, Khmer, kana, Han
UNSPACED = (
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
WORD = re.compile(rf"{UNSPACED}+|(?:(?!{UNSPACED})\w){{2,}}")


def words(text: str) -> list[str]:
    """List the words of two characters or more; where a script has no spaces, each two neighbours."""
    found: list[str] = []
    for word in WORD.findall(text):
        pairs = len(word) > 1 and re.match(UNSPACED, word)
        found += [word[at : at + 2] for at in range(len(word) - 1)] if pairs else [word]
    return found
