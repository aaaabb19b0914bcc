"""Find the document that holds each benchmark item: word for word, in part, or in other words.

One pass over the folded corpus (`folding`) for all items together counts and keeps:

1. in how many documents each three-word sequence of the items stands; identical documents count once;
2. the documents that hold most of an item's sequences, weighted by rarity, df^-1/2. A sequence that many
   documents, or many items, have in common (an instruction, a template) says little.

The best documents are then compared with the item word by word, on their decoded tokens. An item is *present*
where one document holds most of it in runs of five words or more, with its numbers and its answer. It is
present *in other words* where a document holds a part of its sequences, with its numbers and its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from hashlib import blake2b
from heapq import nsmallest
from itertools import pairwise
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from scipy.sparse import csr_array

from stride_cli.audit.folding import Vocabulary, folded, places

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.audit.options import AuditOptions

ITEM, PROMPT, RESPONSE, PART, REWORDED = "item", "prompt", "response", "part", "other words"
_GRAM, _RUN = 3, 5  # words of a sequence, and of a run that counts as copied
_PART = 8  # words from which on a prompt or response alone is evidence
_PASSAGE, _OWN = 25, 16  # words of a text that are a part of it, and how many of its sequences are its own
_ASKED = 0.9  # share of a prompt that is held where it stands without its response
_ALL = 0.9  # share of a copy's numbers
# in other words: share of its numbers (where they are not few), else of its words; of its answer's words
_NUMBERS, _FEW, _MOST, _RARE = 0.75, 3, 0.6, 0.5
_COMMON = 10  # documents that hold every sequence of an item: a phrase, if it is short
_TOP, _LEAST = 8, 0.15  # documents compared with an item, and the share of its sequences that they hold
_WAYS: dict[str, Callable[[str], str]] = {  # in which the same words can be set
    "character forms": lambda text: normalize("NFKC", text),
    "markup": lambda text: re.sub(r"<[^<>]{1,120}>|[*_`#]", "", text),
    "punctuation": lambda text: re.sub(r"[^\w\s<>*`#]", "", text),
    "case": str.casefold,
    "white space": lambda text: "".join(text.split()),
}
_BLOCK = 4096  # documents read at a time


@dataclass(frozen=True)
class Copy:
    """What the corpus holds of an item.

    Attributes:
        found: ITEM, PROMPT or RESPONSE alone, a PART of a text, REWORDED; "" where it holds none of these.
        share: Of the item's three-word sequences by rarity, in runs of five words or more of one document.
        loose: The same in runs of any length.
        numbers: Of its numbers that stand there; 1 where it has none.
        longest: Words of the longest run.
        document: The document most like it; -1 for none.
        span: Of that document's decoded characters, from the first word in common to the last.
        within: Where the item's sequences begin and end that are copied; shares of its words.
        like: The documents as like it: those with four fifths of its share.
        common: It is a short phrase that stands in many documents: it would tell nothing.
    """

    found: str = ""
    share: float = 0.0
    loose: float = 0.0
    numbers: float = 0.0
    longest: int = 0
    document: int = -1
    span: tuple[int, int] = (0, 0)
    within: tuple[float, float] = (0.0, 1.0)
    like: tuple[int, ...] = ()
    common: bool = False


def find_copies(
    index: Index, tokenizer: Any, items: Sequence[Sequence[str]], options: AuditOptions
) -> list[Copy]:
    """Find what the corpus holds of each item.

    Args:
        items: Each its text, or its prompt and its response.

    Returns:
        One an item; of documents as like it, the first in the corpus.
    """
    vocabulary = Vocabulary([part for parts in items for part in parts])
    words = [[vocabulary.of(part) for part in parts] for parts in items]
    wholes = [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in words]
    grams, found = _Grams(wholes, vocabulary.size), []
    best = grams.likest(index, tokenizer, vocabulary)
    for number, (whole, parts) in enumerate(zip(wholes, words, strict=True)):
        cut = len(parts[0]) if len(parts) > 1 else 0
        sequences = grams.sequences[number]
        item = _Item(
            whole, cut, vocabulary.numbers[whole], grams.weights[sequences], grams.rarity(number), vocabulary
        )
        copies = [
            item.compared(document, document_text(index, tokenizer, document)[0], options)
            for document in best[number]
        ]
        ranked = sorted(copies, key=lambda it: (not it.found, it.found == REWORDED, -it.share - it.loose))
        copy = next(iter(ranked), Copy())
        if copy.found:
            least = 0.8 * (copy.share + copy.loose)
            like = tuple(each.document for each in copies if each.share + each.loose >= least)
            copy = replace(copy, like=like)
            if len(whole) < _PART and grams.frequency[sequences].min() > _COMMON:
                copy = replace(copy, found="", common=True)
        found.append(copy)
    return found


def document_text(index: Index, tokenizer: Any, document: int) -> tuple[str, list[tuple[int, int]]]:
    """Decode a document's tokens, with the place of each of them: (start, stop) characters."""
    from stride_cli.attribution.passages import token_spans

    tokens = [index.chunk_tokens(chunk) for chunk in index.document_chunks(document)]
    return token_spans(tokenizer, np.concatenate([np.zeros(0, np.int64), *tokens]))


def differences(item: str, passage: str) -> list[tuple[str, str]]:
    """List what an item and a passage put differently: (the item's words, the passage's words).

    Where their words agree: (how they are set, "").
    """
    ours, theirs = item.split(), passage.split()
    left, right = (["+".join(folded(word)) for word in each] for each in (ours, theirs))
    if folded(item) == folded(passage):
        # without what stands before the first word and behind the last
        item, passage = (text[places(text)[0][0] : places(text)[-1][1]] for text in (item, passage))
        return [(name, "") for name in _WAYS if _as_set(item, name) != _as_set(passage, name)]
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    return [
        (" ".join(ours[a:b]), " ".join(theirs[c:d]))
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def _as_set(text: str, left: str) -> str:
    """Take every way out of a text in which its words can be set, but for one."""
    for name, without in _WAYS.items():
        text = text if name == left else without(text)
    return text


class _Grams:
    """The sequences of three words of all items (of shorter ones, all their words), and their words."""

    def __init__(self, items: Sequence[np.ndarray], size: int) -> None:
        self.size, self.lengths = size, sorted({1, *(min(_GRAM, len(item)) for item in items)} - {0})
        keys = [_keys(item, min(_GRAM, len(item)), size) for item in items]
        keys += [_keys(item, 1, size) for item in items]
        self.keys, place = np.unique(np.concatenate([[0], *keys]), return_inverse=True)
        parts = [place[a:b] for a, b in pairwise(np.cumsum([1, *map(len, keys)]))]
        self.sequences, self.words = parts[: len(items)], parts[len(items) :]
        self.frequency, self.documents = np.zeros(len(self.keys), np.int64), 0

    def likest(self, index: Index, tokenizer: Any, vocabulary: Vocabulary) -> list[list[int]]:
        """Weigh sequences by rarity, and choose the documents that hold most of each item, best first."""
        owners = np.repeat(np.arange(len(self.sequences)), [len(each) for each in self.sequences])
        gram = np.concatenate([np.zeros(0, np.int64), *self.sequences])
        shape = len(self.sequences), len(self.keys)
        of_items = csr_array((np.ones(len(gram)), (owners, gram)), shape) > 0
        shared = of_items.sum(axis=0)  # by so many items
        best: list[list[tuple[float, int]]] = [[] for _ in self.sequences]
        seen: dict[bytes, int] = {}
        with TemporaryFile() as file:  # what stands where: too much for memory where the corpus is large
            # 1. in how many different documents each stands
            blocks: list[tuple[int, int, int]] = []
            for first, texts in _corpus(index, tokenizer):
                document, gram = self._held([vocabulary.of(text) for text in texts])
                digests = (blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts)
                new = np.array([seen.setdefault(each, n) == n for n, each in enumerate(digests, first)])
                self.frequency += np.bincount(gram[new[document]], minlength=len(self.keys))
                held = np.stack([document, gram])[:, shared[gram] > 0].astype(np.int32)
                held.tofile(file)
                blocks.append((first, len(texts), held.shape[1]))
            self.documents = len(seen)
            self.weights = 1 / np.sqrt(np.maximum(np.maximum(self.frequency, shared), 1))
            # 2. what each document holds of each item
            weighted = (of_items * self.weights).T.tocsr()
            least = _LEAST * weighted.sum(axis=0)
            file.seek(0)
            for first, count, size in blocks:
                document, gram = np.fromfile(file, np.int32, 2 * size).reshape(2, -1)
                share = (csr_array((np.ones(size), (document, gram)), (count, shape[1])) @ weighted).tocoo()
                for at in np.flatnonzero(share.data >= least[share.col]).tolist():
                    own, found = int(share.col[at]), (-float(share.data[at]), first + int(share.row[at]))
                    best[own] = nsmallest(_TOP, [*best[own], found])
        return [[document for _, document in each] for each in best]

    def _held(self, words: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Find the distinct sequences and words of each text: (text, number in `keys`), each pair once."""
        apart = np.full(1, -1)  # no sequence reaches from one text into the next
        ids = np.concatenate([apart, *(part for own in words for part in (own, apart))])
        owner = np.repeat(np.arange(len(words)), [len(own) + 1 for own in words])
        owner = np.concatenate([np.zeros(1, np.int64), owner])
        codes = []
        for n in self.lengths:
            keys = _keys(ids, n, self.size)
            place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
            hit = (self.keys[place] == keys) & (keys > 0)
            codes.append(owner[: len(keys)][hit] * len(self.keys) + place[hit])
        held = np.unique(np.concatenate(codes))
        return held // len(self.keys), held % len(self.keys)

    def rarity(self, item: int) -> np.ndarray:
        """Compute log(documents / documents with it) of each word of an item, above 0."""
        return np.log((self.documents + 1) / (self.frequency[self.words[item]] + 0.5)).clip(0.01)


@dataclass(frozen=True)
class _Item:
    """An item's words (L,), the first of its response (0: a text), which are numbers, and what they weigh."""

    words: np.ndarray
    cut: int
    numbers: np.ndarray
    weights: np.ndarray
    rarity: np.ndarray
    vocabulary: Vocabulary

    def compared(self, document: int, text: str, options: AuditOptions) -> Copy:
        """Compare with one document's text."""
        there, length = self.vocabulary.of(text), len(self.words)
        n, size = min(_GRAM, length), self.vocabulary.size
        if not length or len(there) < n:
            return Copy()
        # where it is densest: a document may be long, and hold the item again
        shared = np.isin(_keys(there, n, size), _keys(self.words, n, size)).cumsum()
        behind = np.minimum(np.arange(len(shared)) + length, len(shared) - 1)
        first = max(0, int((shared[behind] - shared).argmax()) - length)
        forward, total = _runs(self.words, there[first : first + 4 * length])
        columns = np.flatnonzero(total.max(axis=0) >= n)
        if not len(columns):
            return Copy()
        whole = forward[n - 1 :] >= n
        loose = np.any(whole, axis=1)
        copied = np.any(whole & (total[n - 1 :] >= min(_RUN, length)), axis=1)
        held = np.any(total > 0, axis=1)
        spans, rows = places(text), np.flatnonzero(copied if copied.any() else loose)
        return Copy(
            self._found(copied, loose, held, total, options),
            self._share(copied),
            self._share(loose),
            self._numbers(held),
            int(total.max()),
            document,
            (spans[first + int(columns[0])][0], spans[first + int(columns[-1])][1]),
            (float(rows[0]) / length, float(rows[-1] + n) / length),
        )

    def _found(
        self,
        copied: np.ndarray,
        loose: np.ndarray,
        held: np.ndarray,
        total: np.ndarray,
        options: AuditOptions,
    ) -> str:
        """Judge by copied and loose sequences, words that are held, and runs (L, columns)."""
        length, cut = len(self.words), self.cut
        prompt, response = slice(0, cut), slice(cut, length)

        def whole(part: slice, least: float) -> bool:
            return self._share(copied, part) >= least and self._numbers(held, part) >= _ALL

        answered = self._known(held, response) >= _RARE
        short = cut > 0 and length - cut < _RUN
        if short:
            # an answer of a few words is anywhere: it counts where it follows the prompt
            asked = np.flatnonzero(total[:cut].max(axis=0) >= min(_GRAM, cut))
            behind = int(asked[-1]) + 1 if len(asked) else total.shape[1]
            follows = total[cut:, behind : behind + 2 * (length - cut) + 16]
            answered = bool((follows.max(axis=1, initial=0) > 0).all())
            complete = answered
        else:
            complete = whole(response, options.present)
        if complete and (not cut or whole(prompt, options.present)):
            return ITEM
        if cut and length - cut >= _PART and complete:
            return RESPONSE
        if cut >= _PART and whole(prompt, _ASKED):
            return PROMPT
        # a run long enough, of sequences that few other documents and items have
        begin, _ = np.unravel_index(int(total.argmax()), total.shape)
        own = self.weights[begin : begin + int(total.max()) + 1 - min(_GRAM, length)] ** 2
        if not cut and total.max() >= _PASSAGE and own.sum() >= _OWN:
            return PART
        # in other words: some of its sequences, its numbers, and some of its answer's sequences
        enough = self._share(loose) >= options.near and answered
        if not enough or (cut and not short and self._share(loose, response) < options.near):
            return ""
        if len(np.unique(self.words[self.numbers])) >= _FEW:
            return REWORDED if self._numbers(held) >= _NUMBERS else ""
        return REWORDED if self._known(held) >= _MOST else ""

    def _share(self, held: np.ndarray, part: slice = slice(None)) -> float:
        """Return the weighted share of the sequences within some words that are held."""
        first, last, _ = part.indices(len(self.words))
        stop = max(first + 1, last - min(_GRAM, len(self.words)) + 1)
        weights = self.weights[first:stop]
        return min(1.0, float(weights @ held[first:stop] / weights.sum())) if len(weights) else 0.0

    def _numbers(self, held: np.ndarray, part: slice = slice(None)) -> float:
        """Return the share of the distinct numbers among some words that are held."""
        flags = self.numbers[part]
        if not flags.any():
            return 1.0
        _, at = np.unique(self.words[part][flags], return_index=True)
        return float(held[part][flags][at].mean())

    def _known(self, held: np.ndarray, part: slice = slice(None)) -> float:
        """Return the share of some words that are held, by rarity."""
        rarity = self.rarity[part]
        return float(held[part] @ rarity / rarity.sum())


def _runs(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Measure the runs of equal words: their length up to each pair of places, and in all; (L, D) int32."""
    forward = (ours[:, None] == theirs[None, :]).astype(np.int32)
    for row in range(1, len(ours)):
        forward[row, 1:] += forward[row - 1, :-1] * forward[row, 1:]
    total = forward.copy()
    for row in range(len(ours) - 2, -1, -1):
        goes_on = (total[row, :-1] > 0) & (total[row + 1, 1:] > 0)
        total[row, :-1] = np.where(goes_on, total[row + 1, 1:], total[row, :-1])
    return forward, total


def _corpus(index: Index, tokenizer: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the texts of the corpus's documents, `_BLOCK` at a time: first document, texts."""
    offsets = np.zeros(0)
    if stored := index.has("corpus/text_bytes"):
        data, offsets = index.array("corpus/text_bytes"), np.asarray(index.array("corpus/text_offsets"))
    for first in range(0, index.n_documents, _BLOCK):
        last = min(index.n_documents, first + _BLOCK)
        if stored:
            held = [int(offset) for offset in offsets[first : last + 1]]
            block = np.asarray(data[held[0] : held[-1]]).tobytes()
            cuts = pairwise(offset - held[0] for offset in held)
            yield first, [block[a:b].decode("utf-8", "replace") for a, b in cuts]
        else:
            tokens = [[index.chunk_tokens(c) for c in index.document_chunks(d)] for d in range(first, last)]
            joined = [np.concatenate([np.zeros(0, np.int64), *each]) for each in tokens]
            yield first, tokenizer.batch_decode(joined, skip_special_tokens=True)


def _keys(words: np.ndarray, n: int, size: int) -> np.ndarray:
    """Write every sequence of n of `size` words as one number, (L − n + 1,) int64; 0 with an unknown word.

    None where there are fewer words, or n is 0.
    """
    count = len(words) - n + 1 if n else 0
    found, known = np.zeros(max(0, count), np.int64), np.ones(max(0, count), bool)
    for place in range(n if count > 0 else 0):
        part = words[place : place + count]
        found = found * (size + 1) + part + 1
        known &= part >= 0
    return np.where(known, found, 0)
