"""Verdicts on answers: clear, contested, weak, or the model is guessing.

Two things are asked. Is the model surer of how its response begins than after prompts about which the
corpus says nothing? And have the `strongest` documents, all with half of the first's influence or more, what
the prompt is about (`decisive.CorpusWords.held`)? With both an answer is *clear*. A prompt in the corpus's
own form about something that it lacks fails by its words, however sure the model is; so does one that has
near copies, beside which others stand. Where the model is torn at a token between what two such documents
say, the answer is *contested* (`Session`). Where it is sure, else, it is *weak*; or the model is *guessing*.

As few null prompts as a tenth, or fewer, may be as sure: so few that at most 5 % of unrelated prompts and 5
% of near misses would be clear themselves, and so of prompts like them (split conformal prediction: Vovk,
Gammerman and Shafer, 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stride_cli.attribution.decisive import start_loss
from stride_cli.recovery.ranking import document_influences
from stride_cli.schema.derivation import key

if TYPE_CHECKING:
    from stride_cli.attribution.nats import Nats
    from stride_cli.recovery.problem import Solution

Word = Literal["clear", "contested", "weak", "guessing"]
FALSE_CLEAR = 0.05  # share of null prompts of each kind that are called clear, at most
_BEYOND = 0.1  # share of unrelated prompts that may be as sure, and have as strong a document
FEWEST = round(1 / FALSE_CLEAR)  # null prompts below which there is no such level
_FELLOW = 0.5  # of the strongest document's influence: from there on others stand beside it


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer, and the p-values that it goes by.

    Attributes
    ----------
    word : "clear", "contested", "weak" or "guessing"
    """

    word: Word
    line: float | None = key(
        "influence above which a document stands out: a larger share of all influence than the strongest of "
        "all but a few unrelated prompts; or half of the strongest, if this has what the prompt is about; "
        "null where options make influences something else than unrelated prompts' were"
    )
    beyond: float = key("that few, as a share of them: at most .1")
    surer: float = key(
        "p-value: (1 + unrelated prompts of whose response the model is as sure, as it begins) / (1 + all of "
        "them), which is never 0"
    )
    stronger: float = key("p-value, likewise, of those whose strongest document has as large a share")
    nulls: int = key("unrelated prompts that were asked")
    near: int = key(
        "near misses that were asked: beginnings of the corpus with other words in them", default=0
    )
    held: bool = key(
        "whether all of the strongest documents have the prompt's rarest words, and most others by rarity",
        default=False,
    )
    against: str | None = key(
        "contested: the document that opposes the token at which the model is torn", default=None
    )


@dataclass(frozen=True)
class NullAnswers:
    """Losses and strengths of the answers to m null prompts.

    Attributes
    ----------
    losses : (m, T) float64     of the first tokens of each response, nats; NaN from its end on
    shares : (m,) float64       share of all influence that the strongest document has, 0 … 1
    held : (m,) bool            whether the `strongest` documents have what the prompt is about
    near : (m,) bool            near misses; the others are unrelated
    scale : Nats or None        what influences are in nats; None: relative
    """

    losses: np.ndarray
    shares: np.ndarray
    held: np.ndarray
    near: np.ndarray
    scale: Nats | None = None

    @property
    def median_loss(self) -> float:
        """Nats per scored token of responses to unrelated prompts; NaN where there is none."""
        losses = self.losses[~self.near]
        return float(np.nanmedian(np.nanmean(losses, axis=1))) if len(losses) else float("nan")

    def judge(self, losses: np.ndarray, share: float, held: bool) -> Verdict | None:
        """The verdict on an answer; `line` is a share of all influence.

        Parameters
        ----------
        losses : (S,) float64   of the response's scored tokens, nats; null prompts' are cut to as many
        share : float           of all influence, that the strongest document has
        held : bool             whether the `strongest` documents have what the prompt is about

        Returns
        -------
        Verdict; None where too few null prompts were asked
        """
        # 1. Losses of as many first tokens; responses that end before are left out where enough are left
        length = min(len(losses), self.losses.shape[1])
        kinds = [kind for kind in (self.near, ~self.near) if kind.sum() >= FEWEST]
        while length > 1 and any(np.isfinite(self.losses[kind, length - 1]).sum() < FEWEST for kind in kinds):
            length -= 1
        known = np.isfinite(self.losses[:, length - 1])
        starts, near = start_loss(self.losses[known, :length]), self.near[known]
        unrelated, shares = starts[~near], self.shares[known][~near]
        count = len(unrelated)
        if count < FEWEST:
            return None
        # 2. How many may be as sure: so few that hardly any of either kind is clear
        surer = 1 + int((unrelated <= float(start_loss(losses[:length]))).sum())
        stronger = 1 + int((shares >= share).sum())
        ranks = 1 + (unrelated[None, :] <= starts[:, None]).sum(axis=1) - ~near  # each among all the others
        allowed = int(_BEYOND * (count + 1))
        if 0 < self.near.sum() < FEWEST - 1:  # too few to say of one that it is clear
            allowed = 0
        for kind in (near, ~near):
            clear = np.sort(ranks[kind & self.held[known]])
            most = max(0, int(FALSE_CLEAR * (kind.sum() + 1)) - 1)
            if len(clear) > most:
                allowed = min(allowed, int(clear[most]) - 1)
        # 3. The line, which is lower beside a document that has what is asked for
        line = float(np.sort(shares)[-max(1, int(_BEYOND * (count + 1)))])
        if held:
            line = min(line, _FELLOW * share)
        word: Word = "guessing" if surer > int(_BEYOND * (count + 1)) else "weak"
        if held and surer <= allowed:
            word = "clear"
        total = count + 1  # an answer to a null prompt could be exchanged with any of them: it is one more
        return Verdict(
            word, line, allowed / total, surer / total, stronger / total, count, int(near.sum()), held
        )


def strongest(solution: Solution, chunk_document: Any) -> tuple[np.ndarray, float]:
    """Find the document of most influence and those that stand beside it, (m,) int64, and its share."""
    documents, influences, rounding = document_influences(solution, chunk_document)
    most = float(influences.max(initial=0.0))
    if most <= rounding:
        return documents[:0], 0.0
    return documents[influences >= _FELLOW * most], most / solution.total
