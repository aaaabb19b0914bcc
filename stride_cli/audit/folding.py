"""Fold texts to words that survive how a text is set: case, white space, quotes, punctuation, markup, forms.

A word is a run of letters and digits in compatibility form (NFKD, case folded, accents dropped); each
ideograph, kana, or letter of a script without spaces is one. Apostrophes, soft hyphens and zero-width
characters join, and so do a comma and a full stop between digits; tags and entities of markup part. A number
in English words is the number in digits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import normalize

import numpy as np

from stride_cli.characters import UNSPACED

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SPELT = {word: str(number) for number, word in enumerate(_ONES.split())}
_SPELT |= {
    tens + ones: str(10 * (2 + number) + int(_SPELT.get(ones, 0)))
    for number, tens in enumerate(_TENS.split())
    for ones in ("", *_ONES.split()[1:10])
}
# scripts without spaces; what stands within a word
_ALONE = UNSPACED[1:-1]
_JOINS = "＇｀'’‘ʼ`´′\u00ad\u0300-\u036f\u200b-\u200d\u2060\ufeff"
_WORD = re.compile(
    rf"(?i:\b(?:{_TENS.replace(' ', '|')})[-\u2010\u2011 ](?:{'|'.join(_ONES.split()[1:10])})\b)|[{_ALONE}]"
    rf"|[^\W_{_ALONE}](?:[^\W_{_ALONE}]|[{_JOINS}]|(?<=\d)[.,．，](?=\d))*"
)
_MARKUP = re.compile(r"<[a-zA-Z/][^<>\n]{0,126}>|&#?\w{1,8};")
_CASES = ("upper", "lower", "title")
_WIDE = {code: code + 0xFEE0 for code in range(ord("!"), ord("~") + 1)}
_MOST = 1 << 20  # spellings that are remembered


def fold(word: str) -> str:
    """Return the form in which spellings of a word agree."""
    plain = "".join(each for each in normalize("NFKD", word.casefold()).casefold() if each.isalnum())
    return _SPELT.get(plain, plain) or word


def folded(text: str) -> list[str]:
    """List the folded words of a text."""
    return [fold(word) for word in _WORD.findall(_bare(text))]


def places(text: str) -> list[tuple[int, int]]:
    """List where the words of a text stand: (start, stop) characters."""
    return [found.span() for found in _WORD.finditer(_bare(text))]


def _bare(text: str) -> str:
    """Blank out tags and entities; every other character stays where it is."""
    return _MARKUP.sub(lambda mark: " " * len(mark[0]), text) if "<" in text or "&" in text else text


@dataclass(frozen=True)
class Setting:
    """How a text sets its words: in one `case` ("": as sentences), in `wide` forms, with `space` between."""

    case: str = ""
    wide: bool = False
    space: str = " "

    @classmethod
    def of(cls, text: str) -> Setting:
        words = [word for word in re.findall(r"[^\W\d_]+", normalize("NFKC", text)) if len(word) > 1]
        cases = {case: sum(getattr(word, f"is{case}")() for word in words) for case in _CASES}
        case = next((case for case, count in cases.items() if count > 0.9 * len(words)), "")
        wide = 2 * sum("！" <= each <= "～" for each in text) > len("".join(text.split()))
        ((space, _),) = Counter(re.findall(r"\s", text) or " ").most_common(1)
        return cls(case, wide, space)

    @property
    def name(self) -> str:
        """Say how, in words."""
        case, wide = self.case and f"{self.case} case", "full width" * self.wide
        space = f"{self.space!r} for spaces" * (self.space != " ")
        return ", ".join(filter(None, (case, wide, space))) or "sentence case"

    def put(self, text: str) -> str:
        """Set another text so."""
        text = getattr(text, self.case)() if self.case else text
        text = text.translate(_WIDE) if self.wide else text
        return text.replace(" ", self.space)


class Vocabulary(dict[str, int]):
    """Numbers the words of some texts; every spelling that is looked up has its word's number, or −1.

    Attributes:
        size: Words.
        numbers: (size,) bool, the words that are numbers.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        words = sorted({word for text in texts for word in folded(text)})
        self._words = {word: number for number, word in enumerate(words)}
        self.size = len(words)
        self.numbers = np.array([word[0].isdigit() for word in words], bool)

    def __missing__(self, spelling: str) -> int:
        if len(self) > _MOST:
            self.clear()
        number = self[spelling] = self._words.get(fold(spelling), -1)
        return number

    def of(self, text: str) -> np.ndarray:
        """Return the words of a text by number, (L,) int64."""
        return np.array([self[word] for word in _WORD.findall(_bare(text))], np.int64)
