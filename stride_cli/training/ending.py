"""Judge a trained model: how it continues texts, and whether it can do more than recite its corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stride_cli.models.loading import load_model
from stride_cli.training.runs import Trained

_BEGINNING, _CONTINUATION = 8, 24  # tokens
# The share of a corpus's pairs of neighbouring tokens that stand in one chunk only: there, nothing but this
# chunk can have taught the model what follows, and away from its words the model has nothing to go by. Of
# the demo's encyclopaedia .98, .88, .68, .47, .24, .38, .35 with its first 2, 5, 10, 20, 60, 100 and 400
# documents (vocabularies grow from 100 on). Trained on 5, a model goes on from its documents' beginnings word
# for word, and from any other prompt with syllables ("The capital of France is" → "the wind and thin bows and
# was and was and wh"); trained on 60 or 400, with words and facts.
_RECITES = 0.5
# Of the unigram entropy, which a model reaches that knows how frequent tokens are, and nothing else. Trained
# with the defaults on 5, 60 and 400 of these documents, models end at .002, .009 and .08 of it.
_LEARNT = 0.5
_MOST_TOKENS = 1 << 22  # of larger corpora pairs are not counted: no model recites them


@dataclass(frozen=True)
class Ending:
    """Continuations of a trained model, with the figures to judge it by.

    Attributes
    ----------
    continuations : list of (beginning, continuation)      greedy, of beginnings of the corpus's chunks
    alone : float        share of the corpus's pairs of neighbouring tokens that stand in one chunk only
    loss : float         of the model on its corpus, nats per scored token
    entropy : float      of the corpus's tokens, nats: what a model reaches that knows how frequent they are
    """

    continuations: list[tuple[str, str]]
    alone: float
    loss: float
    entropy: float

    def warning(self) -> str | None:
        """Warn that the model has not learnt its corpus, or can only recite it; None where all is well."""
        if self.loss > _LEARNT * self.entropy:
            return (
                f"it has not learnt its corpus yet: its loss there is {self.loss:.2f} nats a token, of "
                f"{self.entropy:.2f} for guessing by frequency; train it longer (--epochs)"
            )
        if self.alone > _RECITES:
            return (
                "the corpus is too small to learn to speak from: of its pairs of neighbouring tokens "
                f"{self.alone:.0%} stand in one passage only, so that the model can repeat it and little "
                "else; ask it by beginnings as they stand there, give more documents, or fine-tune a model "
                "that speaks (stride model finetune)"
            )
        return None


def look_at(trained: Trained) -> Ending:
    """Load a trained model, let it continue three beginnings, and measure its corpus."""
    chunks = [np.asarray(chunk.tokens, np.int64) for chunk in trained.chunks]
    counts = np.unique(np.concatenate(chunks), return_counts=True)[1]
    shares = counts / counts.sum()
    return Ending(
        continuations=_go_on(str(trained.path), chunks),
        alone=0.0 if counts.sum() > _MOST_TOKENS else pairs_alone(chunks),
        loss=trained.loss,
        entropy=float(-(shares * np.log(shares)).sum()),
    )


def pairs_alone(chunks: Sequence[np.ndarray]) -> float:
    """Compute the share of token pairs that stand in one chunk only; 1 where there is no pair."""
    size = 1 + max(int(chunk.max(initial=0)) for chunk in chunks)
    pairs = np.concatenate([chunk[:-1] * size + chunk[1:] for chunk in chunks])
    owners = np.repeat(np.arange(len(chunks)), [max(0, len(chunk) - 1) for chunk in chunks])
    if not len(pairs):
        return 1.0
    order = np.lexsort((owners, pairs))
    pairs, owners = pairs[order], owners[order]
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]]))
    ends = np.append(starts[1:], len(pairs))
    alone = owners[starts] == owners[ends - 1]  # owners of a pair are in order
    return float((ends - starts)[alone].sum() / len(pairs))


def _beginning(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Take the first few tokens, half of them at most, up to the end of a word where one ends soon."""
    count = min(_BEGINNING, max(1, len(tokens) // 2))
    ends = (
        place
        for place in range(count, min(2 * count, len(tokens)))
        if not str(tokenizer.decode([tokens[place]]))[:1].isalnum()
    )
    return tokens[: next(ends, count)]


def _go_on(path: str, chunks: Sequence[np.ndarray]) -> list[tuple[str, str]]:
    model: Any = load_model(path)
    found = []
    for number in sorted({0, len(chunks) // 2, len(chunks) - 1}):
        given = _beginning(model.tokenizer, chunks[number].tolist())
        said = model.generate(given, _CONTINUATION) if len(given) < model.context_length else []
        found.append(tuple(model.tokenizer.decode(ids, skip_special_tokens=True) for ids in (given, said)))
    return found
