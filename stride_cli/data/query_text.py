"""Check a prompt, a response or a span before it is tokenised; light to import."""

from __future__ import annotations

from stride_cli.errors import QueryError


def check_text(text: str, what: str) -> None:
    """QueryError where a text holds a NUL, half of a surrogate pair, or bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        if "\udc80" <= found <= "\udcff":  # how Python hands on a byte that it cannot decode
            byte = ord(found) - 0xDC00
            raise QueryError(
                f"{what} is not UTF-8 (found the byte 0x{byte:02x})",
                fix="convert it: iconv -f latin1 -t utf-8",
            ) from None
        raise QueryError(
            f"{what} has half of a surrogate pair ({found!a})",
            fix="write both halves, or the character itself",
        ) from None
    if "\0" in text:
        raise QueryError(f"{what} contains a NUL character", fix="remove it")
