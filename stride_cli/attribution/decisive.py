"""Weigh the tokens of a response by how much this prompt decides them, and find the prompt's rare words.

What a model says after any prompt of a form has no source of its own, and what it says in passing is about
something else. A token counts by

    .8^t  p log(p / q)⁺ / (1.001 − p)

with t its place among tokens that do not repeat the prompt's words, which do not count, p its probability,
and q the mean of its probabilities after the same prompt with its rare words exchanged for others of the
corpus. The division makes log-odds of the loss, as TRAK has them (Park et al., 2023): what a model knows by
heart has next to no loss, nor a gradient of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.passages import rarity, token_spans
from stride_cli.characters import WORD, words
from stride_cli.data.batches import little_padding, pad_batch, token_losses
from stride_cli.data.queries import prompt_tokens
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM

FADING = 0.8  # of a token's weight is the next one's
_SURE = 1e-3  # of probability that a token known by heart is taken to lack
_LEAST, _EXCHANGES = 1e-6, 4  # weight of a token that counts next to nothing; prompts with other words
CONTESTED = 0.2  # of the influence on a torn token that supports, from which on a document opposes it
_START, _TORN = 8, (0.2, 1.6)  # first tokens; nats of one between two things that might be said
_LOOKED_AT = 1024  # documents whose words are counted
_RARE, _RARE_DOCUMENTS = 0.1, 5  # share of documents that a rare word is in, or so many of a small corpus
_NAMED = 2  # rarest words of a prompt, which its source has
_COVERED = 0.7  # of a prompt's words, by rarity, that its source has


@dataclass(frozen=True)
class CorpusWords:
    """Words of a corpus's documents, of 1,024 that are drawn where there are more.

    Attributes
    ----------
    documents : of sets of words, case folded
    """

    workspace: Workspace
    documents: Sequence[frozenset[str]]

    @classmethod
    def of(cls, workspace: Workspace) -> CorpusWords:
        count = workspace.index.n_documents
        drawn = stream(workspace.seed, "words").permutation(count)[:_LOOKED_AT]
        return cls(workspace, [words_of(workspace, int(document)) for document in np.sort(drawn)])

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(word for document in self.documents for word in document)

    @cached_property
    def _rare(self) -> list[str]:
        return sorted(word for word in self.counts if self.rare(word) and len(word) > 3 and word.isalpha())

    def rare(self, word: str) -> bool:
        return self.counts[word.casefold()] <= max(_RARE_DOCUMENTS, _RARE * len(self.documents))

    def named(self, prompt: str) -> list[str]:
        """List the prompt's two rarest words, the rarest first; words that are not rare are left out."""
        rare = {word for word in folded(prompt) if self.rare(word)}
        return sorted(rare, key=lambda word: (self.counts[word], -len(word), word))[:_NAMED]

    def held(self, prompt: str, document: Iterable[str]) -> bool:
        """True where a document has what the prompt is about: its rarest words, and .7 of all by rarity."""
        wanted, own, named = set(folded(prompt)), frozenset(document), self.named(prompt)
        weights = {word: rarity(self.counts[word], len(self.documents)) for word in wanted}
        most = sum(weights[word] for word in wanted & own) >= _COVERED * sum(weights.values())
        return bool(named) and own.issuperset(named) and most

    def held_by(self, documents: Sequence[int] | np.ndarray, prompt: str) -> bool:
        """True where there are such documents, by their numbers, and all of them `held` what it is about."""
        of_each = (words_of(self.workspace, int(document)) for document in documents)
        return len(documents) > 0 and all(self.held(prompt, own) for own in of_each)

    def rare_places(self, prompt: str) -> list[re.Match[str]]:
        """Find the rare words of a prompt."""
        found = WORD.finditer(prompt)
        return [match for match in found if any(self.rare(word) for word in folded(match.group()))]

    def exchanged(self, prompt: str, random: np.random.Generator) -> str:
        """Exchange the rare words of a prompt for others of the corpus, in its case; all, where none is."""
        places = self.rare_places(prompt) or list(WORD.finditer(prompt))
        new = [self.random_word(random) for _ in places]
        return put(prompt, places, new) if places else self.random_word(random)

    def random_word(self, random: np.random.Generator) -> str:
        return self._rare[int(random.integers(len(self._rare)))] if self._rare else "something"


def folded(text: str) -> list[str]:
    """List the words of a text, case folded."""
    return [word.casefold() for word in words(text)]


def put(text: str, places: Sequence[re.Match[str]], new: Sequence[str]) -> str:
    """Put new words in the places of others, with a capital where they had one."""
    parts, end = [], 0
    for place, word in zip(places, new, strict=True):
        parts += [text[end : place.start()], word[:1].upper() + word[1:] if place[0][:1].isupper() else word]
        end = place.end()
    return "".join([*parts, text[end:]])


def words_of(workspace: Workspace, document: int) -> frozenset[str]:
    """The words of a document, case folded, as its chunks have them."""
    chunks = workspace.index.document_chunks(document)
    ids = [workspace.chunks.chunk(int(row))[0] for row in chunks]
    decode = workspace.model.tokenizer.decode
    text = decode(np.concatenate(ids), skip_special_tokens=True) if ids else ""
    return frozenset(folded(str(text)))


def measured(model: CausalLM, corpus: CorpusWords, query: Query, *, weigh: bool) -> Query:
    """A query with the losses of its response; if asked for, tokens count by how much the prompt decides.

    A prompt that leaves no room for others, or whose text is not known, keeps its weights.
    """
    scored, rows = query.of_response, [query.ids]
    begin = int(np.argmax(scored > 0))
    if weigh and begin:
        random = stream(0, "exchanged words")
        for _ in range(_EXCHANGES):
            other = prompt_tokens(model, corpus.exchanged(query.prompt, random), query.form)
            rows.append(np.concatenate([np.asarray(other, np.int64), query.ids[begin:]]))
    if max(map(len, rows)) > model.context_length:
        rows = rows[:1]
    weights = [np.concatenate([np.zeros(len(row) - len(query.ids) + begin), scored[begin:]]) for row in rows]
    losses = np.empty((len(rows), int(np.count_nonzero(scored))))
    for group in little_padding([len(row) for row in rows], model.length_kinds):
        batch = pad_batch(np.arange(len(group)), [rows[at] for at in group], [weights[at] for at in group])
        losses[group] = token_losses(model, batch)[2].reshape(len(group), -1).cpu().numpy()
    own = losses[0]
    if len(rows) == 1:
        return replace(query, losses=own)
    probability, others = np.exp(-own), np.exp(-losses[1:]).mean(axis=0)
    decided = np.maximum(np.log(np.maximum(probability, 1e-30) / np.maximum(others, 1e-30)), 0.0)
    new = ~_copied(model, query)
    fading = FADING ** (np.cumsum(new) - new)
    counts = new * fading * probability * decided / (1 + _SURE - probability)
    if not counts.max() > 0:
        return replace(query, losses=own)
    chosen = np.zeros_like(query.weights)
    chosen[query.weights > 0] = np.maximum(counts / counts.max(), _LEAST)
    return replace(query, weights=chosen, losses=own)


def _copied(model: CausalLM, query: Query) -> np.ndarray:
    """Mark the scored tokens in words that the response says again after the prompt, or whose beginning it
    does: (S,) bool."""
    said, placed = set(folded(query.prompt)), np.flatnonzero(query.weights > 0)
    begun = tuple(word for word in said if len(word) > 3)
    text, spans = token_spans(model.tokenizer, query.ids[placed])
    found = ((match, folded(match[0])) for match in WORD.finditer(text))
    again = [match.span() for match, own in found if set(own) <= said or " ".join(own).startswith(begun)]
    inside = [any(begin < stop and start < end for start, stop in again) for begin, end in spans]
    return np.array(inside, bool)


def start_loss(losses: np.ndarray) -> np.ndarray:
    """Mean loss of tokens along the last axis, of which each counts .8 of the one before."""
    weights = FADING ** np.arange(losses.shape[-1])
    found: np.ndarray = losses @ weights / weights.sum()
    return found


def torn(corpus: CorpusWords, query: Query, others: Iterable[int]) -> Query | None:
    """Query the first token that the model is torn at, of its response's first.

    None: there is none; or no document of `others`, and at most one of the corpus, has what it is about.
    """
    assert query.losses is not None
    found = np.flatnonzero((query.losses[:_START] >= _TORN[0]) & (query.losses[:_START] <= _TORN[1]))[:1]
    if not len(found):
        return None
    known = (corpus.held(query.prompt, each) for each in corpus.documents)  # looked at last
    if not any(corpus.held_by([each], query.prompt) for each in others) and sum(known) < 2:
        return None
    weights = np.zeros_like(query.weights)
    weights[np.flatnonzero(query.of_response > 0)[found]] = 1.0
    return replace(query, weights=weights, losses=query.losses[found])
