"""What may be concluded from an answer: clear, weak, or the model is guessing.

An answer is held against those to prompts about which the corpus says nothing (`null_prompts`). Two things
are compared: how sure the model is of its response (its loss), and how strong the strongest document is (its
influence as a multiple of that loss). An answer is *clear* where both are beyond what all but a few null
prompts reach, *weak* where only the first is, and else the model is *guessing*. The two limits are one level
of both, the largest at which at most 5 % of null prompts would be called clear; so would at most 5 % of others
like them (split conformal prediction: Vovk, Gammerman and Shafer, 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from stride_cli.schema.answer_records import JudgedRecord

Word = Literal["clear", "weak", "guessing"]
FALSE_CLEAR = 0.05  # share of null prompts that are called clear, at most
FEWEST = round(1 / FALSE_CLEAR)  # null prompts below which none can be called clear at that level
LENGTHS = (1, 4, 16)  # scored tokens: of a short response the model is sure by chance more often


@dataclass(frozen=True)
class Verdict:
    """What may be concluded from an answer.

    Attributes
    ----------
    word : "clear", "weak" or "guessing"
    line : float          influence above which a document is stronger than any of all but a few null prompts
    beyond : float        … that few: share of null prompts with a document as strong, relative to their loss
    surer : float         share of null prompts of whose response the model is as sure
    stronger : float      share of null prompts with a document as strong as this answer's strongest
    nulls : int           how many null prompts were asked
    """

    word: Word
    line: float
    beyond: float
    surer: float
    stronger: float
    nulls: int

    def to_record(self) -> JudgedRecord:
        return {
            "line": self.line,
            "beyond": self.beyond,
            "surer": self.surer,
            "stronger": self.stronger,
            "nulls": self.nulls,
        }


@dataclass(frozen=True)
class NullAnswers:
    """What m null prompts' answers came to.

    Attributes
    ----------
    scored : (L,) int64            tokens that their responses were cut to, ascending
    losses : (L, m) float64        mean nats per scored token; NaN where a response is shorter
    strengths : (L, m) float64     influence of the strongest document / loss, ≥ 0; NaN likewise
    """

    scored: np.ndarray
    losses: np.ndarray
    strengths: np.ndarray

    def judge(self, loss: float, influence: float, scored: int) -> Verdict | None:
        """The verdict on an answer.

        Parameters
        ----------
        loss : float           of the response, mean nats per scored token
        influence : float      of the strongest document, of all that support
        scored : int           scored tokens; null prompts' responses are taken at the same length, or the
                               next shorter one there is

        Returns
        -------
        Verdict; None where too few null prompts were asked
        """
        row = max(0, int(np.searchsorted(self.scored, scored, side="right")) - 1)
        known = np.isfinite(self.losses[row])
        losses, strengths = self.losses[row][known], self.strengths[row][known]
        count = len(losses)
        if count < FEWEST:
            return None
        # an answer takes part in its own comparison, so that it is one of count + 1 that could be exchanged
        surer = 1 + int((losses <= loss).sum())
        stronger = 1 + int((strengths * loss >= influence).sum())
        level = _level(losses, strengths)
        descending = np.sort(strengths)[::-1]
        line = float(descending[level - 1] * loss) if level else np.inf
        sure = surer <= level
        word: Word = "guessing" if not sure else "clear" if influence > line else "weak"
        share = count + 1
        return Verdict(word, line, level / share, surer / share, stronger / share, count)


def _level(losses: np.ndarray, strengths: np.ndarray) -> int:
    """How many of count + 1 may be as sure, and as strong, for an answer to be beyond them; 0: never."""
    surer = (losses[None, :] <= losses[:, None]).sum(axis=1)
    stronger = (strengths[None, :] >= strengths[:, None]).sum(axis=1)
    both = np.sort(np.maximum(surer, stronger))
    allowed = int(FALSE_CLEAR * (len(losses) + 1)) - 1
    return int(both[allowed]) - 1
