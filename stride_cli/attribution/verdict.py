"""Verdicts on answers: clear, weak, or the model is guessing.

An answer is held against those to prompts about which the corpus says nothing (`nulls`). Two things are
compared: how sure the model is of its response (its loss), and how strong the strongest document is (its
influence as a multiple of that loss). Where the model is no surer than after all but a few of the null
prompts, it is *guessing*. Else the answer is *clear* where the strongest document is beyond all but as few of
theirs, and otherwise *weak*. As few are a tenth, or less: at most 5 % of the null prompts would be called
clear themselves, and so of prompts like them (split conformal prediction: Vovk, Gammerman and Shafer, 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from stride_cli.schema.derivation import key

if TYPE_CHECKING:
    from stride_cli.attribution.nats import Nats

Word = Literal["clear", "weak", "guessing"]
FALSE_CLEAR = 0.05  # share of null prompts that are called clear, at most
# share of null prompts that may be as sure, and as strong. With .05, .08, .1, .15 and .22 are clear: of the
# demo's 50 facts 44, 46, 46, 46 and 47, of two hundred unrelated prompts 4, 6, 8, 10 and 14
_BEYOND = 0.1
FEWEST = round(1 / FALSE_CLEAR)  # null prompts below which there is no such level
LENGTHS = (1, 4, 16)  # scored tokens: of a short response the model is sure by chance more often


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer, and the p-values that it goes by.

    Attributes
    ----------
    word : "clear", "weak" or "guessing"
    """

    word: Word
    line: float | None = key(
        "influence above which a document is stronger than any of all but a few unrelated prompts, relative "
        "to the loss; null where options make influences something else than unrelated prompts' were"
    )
    beyond: float = key("that few, as a share of them: at most .1")
    surer: float = key(
        "p-value: (1 + unrelated prompts of whose response the model is as sure) / (1 + all of them), which "
        "is never 0"
    )
    stronger: float = key(
        "p-value, likewise, of those with a document as strong, relative to the loss, as the strongest here"
    )
    nulls: int = key("unrelated prompts that were asked")


@dataclass(frozen=True)
class NullAnswers:
    """Losses and strengths of the answers to m null prompts.

    Attributes
    ----------
    scored : (L,) int64            tokens that their responses were cut to, ascending
    losses : (L, m) float64        mean nats per scored token; NaN where a response is shorter
    strengths : (L, m) float64     influence of the strongest document / loss, ≥ 0; NaN likewise
    read : (L, m) float64 or None  the same where the likeliest chunks have been read; None where none are
    scale : Nats or None           what influences are in nats; None: relative
    """

    scored: np.ndarray
    losses: np.ndarray
    strengths: np.ndarray
    read: np.ndarray | None = None
    scale: Nats | None = None

    @property
    def median_loss(self) -> float:
        """Nats per scored token, at the greatest length that any response has; NaN where none has a token."""
        known = self.losses[np.isfinite(self.losses).any(axis=1)]
        return float(np.nanmedian(known[-1])) if len(known) else float("nan")

    def judge(self, loss: float, influence: float, scored: int, *, read: bool = False) -> Verdict | None:
        """The verdict on an answer.

        Parameters
        ----------
        loss : float           of the response, mean nats per scored token
        influence : float      of the strongest document, of all that support
        scored : int           scored tokens; null prompts' responses are taken at the same length, or the
                               next shorter one of which there are enough
        read : bool            whether the likeliest chunks have been read for it

        Returns
        -------
        Verdict; None where too few null prompts were asked, or none in this way
        """
        of_all = self.read if read else self.strengths
        if of_all is None:
            return None
        row = max(0, int(np.searchsorted(self.scored, scored, side="right")) - 1)
        while row and np.isfinite(self.losses[row]).sum() < FEWEST:  # few responses may be so long
            row -= 1
        known = np.isfinite(self.losses[row])
        losses, strengths = self.losses[row][known], of_all[row][known]
        count = len(losses)
        if count < FEWEST:
            return None
        surer = 1 + int((losses <= loss).sum())
        stronger = 1 + int((strengths * loss >= influence).sum())
        allowed = _allowed(losses, strengths)
        line = float(np.sort(strengths)[-allowed] * loss) if allowed else np.inf
        word: Word = "guessing" if surer > allowed else "clear" if influence > line else "weak"
        share = count + 1  # an answer to a null prompt could be exchanged with any of them: it is one more
        return Verdict(word, line, allowed / share, surer / share, stronger / share, count)


def _allowed(losses: np.ndarray, strengths: np.ndarray) -> int:
    """Count how many of count + 1 answers may be as sure, and how many as strong, as a clear one."""
    surer = (losses[None, :] <= losses[:, None]).sum(axis=1)
    stronger = (strengths[None, :] >= strengths[:, None]).sum(axis=1)
    both = np.sort(np.maximum(surer, stronger))
    # below the next of them, so many null prompts are clear
    clear = int(FALSE_CLEAR * (len(losses) + 1)) - 1
    return min(int(_BEYOND * (len(losses) + 1)), int(both[clear]) - 1)
