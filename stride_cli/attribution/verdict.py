"""What may be concluded from an answer: clear, weak, or the model is guessing.

An answer is held against those to prompts about which the corpus says nothing (`null_prompts`). Two things
are compared: how sure the model is of its response (its loss), and how strong the strongest document is (its
influence as a multiple of that loss). Where the model is not surer than after all but 5 % of null prompts, it
is *guessing*; where it is, and the strongest document is beyond all but 5 % of theirs, the answer is *clear*,
else *weak*. So at most 5 % of prompts like these are called clear (split conformal prediction: Vovk,
Gammerman and Shafer, 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from stride_cli.schema.answer_records import JudgedRecord

Word = Literal["clear", "weak", "guessing"]
BEYOND = 0.05  # share of null prompts that may be as sure, and as strong
FEWEST = round(1 / BEYOND)  # null prompts below which nothing can be beyond all but so few
LENGTHS = (1, 4, 16)  # scored tokens: of a short response the model is sure by chance more often


@dataclass(frozen=True)
class Verdict:
    """What may be concluded from an answer.

    Attributes
    ----------
    word : "clear", "weak" or "guessing"
    line : float          influence above which a document is stronger than any of all but 5 % of null prompts
    surer : float         share of null prompts of whose response the model is as sure
    stronger : float      share of null prompts with a document as strong as this answer's strongest
    nulls : int           how many null prompts were asked
    """

    word: Word
    line: float
    surer: float
    stronger: float
    nulls: int

    def to_record(self) -> JudgedRecord:
        return {
            "line": self.line,
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
        # an answer is one of count + 1 that could be exchanged, were it to a null prompt
        allowed = int(BEYOND * (count + 1))  # of which so many, itself among them, may be as sure, or strong
        line = float(np.sort(strengths)[-allowed] * loss)
        surer = 1 + int((losses <= loss).sum())
        stronger = 1 + int((strengths * loss >= influence).sum())
        word: Word = "guessing" if surer > allowed else "clear" if influence > line else "weak"
        return Verdict(word, line, surer / (count + 1), stronger / (count + 1), count)
