"""Text from documents and models, made safe to show."""

from __future__ import annotations

import re

# control characters, which can steer a terminal and do not belong in HTML; halves of characters; what is none
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """The text with what is no character, or would steer a terminal, replaced by U+FFFD."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def power_of_ten(power: int) -> str:
    """``10⁻³``, in characters that do not break over a line."""
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"
