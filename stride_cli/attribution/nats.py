"""Influences in nats: scales fitted on models that were trained again without a part of the corpus.

Of a fine-tuned model,

    loss of x after training without S  −  loss of x after training with everything  ≈  a Σ_{i ∈ S} w_i

w are influences, whose size grows with the design; a makes them a forecast of what happens when documents
are taken out. It is found by least squares through the origin over random tenths S of the documents and
responses that are chunks of the corpus themselves, some of them in S: a response's own document is the one
whose absence shows most. Influences are against the average chunk, whose own influence by the same readout
has a twentieth of the effect that its size says (2,000 instructions): nothing is added for it.

What a model learnt by heart from scratch it says without loss as long as enough is left that says it, and
without that no better than chance: its loss stays, then rises, and ends at a ceiling c, whatever the
influences come to. What it depends on is the share f of all influence that is taken out,

    c (1 − 2^−(f / h)²),      f = Σ_{i ∈ S} w_i / Σ_i |w_i|,

which is half of c at f = h. Responses to fit it by are parts of chunks, of 4 to 16 tokens as answers have
them: of whole chunks all that are taken out are at the ceiling, and what is on the way there is not seen.
Where a model trained from scratch has learnt nothing by heart, the straight line fits better, and is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from stride_cli.schema.derivation import key, told

_SURE = 3.0  # standard errors that the slope is above zero, for influences to be told in nats
_HALVES = np.geomspace(0.02, 2.0, 200)  # shares that are tried for what half of the ceiling is reached at


@dataclass(frozen=True)
class Nats:
    """The scale from influences to nats: a straight line, or a climb up to a ceiling.

    `slope` is a, `ceiling` c and `half` h of the head of this module.
    """

    @told(
        '"linear": rises are in proportion to influences, and add up; "ceiling": they go by the share f of '
        "all influence that is taken out, ceiling · (1 − 2^−(f / half)²), so that the shares of documents "
        "add up and their nats do not"
    )
    def link(self) -> str:
        return "linear" if self.additive else "ceiling"

    slope: float | None = key("nats per scored token for a relative influence of 1; null: not linear")
    ceiling: float | None = key("nats per scored token that a loss rises by at most; null: linear")
    half: float | None = key("share without which a loss rises by half of the ceiling; null: linear")
    error: float = key(
        "standard error of the slope, or of the ceiling, over responses; seeds of training are not in it"
    )
    correlation: float = key("of predicted and measured rises of the loss")
    models: int = key("that were trained again, each without a tenth of the documents")
    pairs: int = key("rises of a response's loss that it was found by")

    @property
    def additive(self) -> bool:
        """True where forecasts of documents add up to that of all of them."""
        return self.slope is not None

    @property
    def _size(self) -> float:
        found = self.ceiling if self.slope is None else self.slope
        assert found is not None
        return found

    @property
    def sure(self) -> bool:
        """True where influences can be told in nats."""
        return self._size > _SURE * self.error

    def rise(self, influence: Any, total: Any, loss: Any) -> Any:
        """Forecast the rise of a response's loss without some chunks, nats per scored token.

        Parameters
        ----------
        influence : float or ndarray      of them together
        total : likewise                  Σ |w_i| over all chunks
        loss : likewise                   of the response; below a ceiling no more than that is taken away
        """
        if self.slope is not None:
            return self.slope * influence
        share = np.divide(influence, total, where=np.asarray(total) > 0, out=np.zeros(np.shape(influence)))
        found = np.maximum(self._size * _climb(share, self.half), -np.asarray(loss))
        return float(found) if np.ndim(found) == 0 else found


class CalibrationRecord(TypedDict):
    schema: Literal["stride.calibration/1"]
    index: Annotated[str, "path of the index"]
    nulls: Annotated[int, "unrelated prompts that were asked"]
    median_loss: Annotated[
        float, "the model's loss on its own responses to them, median, nats per scored token"
    ]
    scale: NotRequired[Annotated[Nats | None, "what influences are in nats; null: not measured"]]
    sure: NotRequired[Annotated[bool, "whether that is sure enough for answers to tell nats"]]
    seconds: Annotated[float, "seconds"]


def scale_of(record: Mapping[str, Any]) -> Nats:
    """Read a scale as its record has it; an older index has none of "link", "ceiling" and "half".

    Raises
    ------
    KeyError, TypeError      it is none
    """
    shared = {name: record[name] for name in ("slope", "error", "correlation", "models", "pairs")}
    return Nats(ceiling=record.get("ceiling"), half=record.get("half"), **shared)


def _climb(share: Any, half: Any) -> Any:
    """±(1 − 2^−(f / h)²)."""
    return np.sign(share) * -np.expm1(-np.log(2) * np.square(share / half))


def fit_line(predicted: np.ndarray, measured: np.ndarray) -> Nats:
    """Fit a line by least squares through the origin; the error by leaving out one response at a time.

    Parameters
    ----------
    predicted, measured : (models, Q) float64      Σ_{i ∈ S} w_i, and rises of the loss
    """
    products, squares = (predicted * measured).sum(axis=0), np.square(predicted).sum(axis=0)
    if not squares.sum() > 0:
        return Nats(0.0, None, None, np.inf, 0.0, len(predicted), predicted.size)
    slope = float(products.sum() / squares.sum())
    rest = np.maximum(squares.sum() - squares, np.finfo(float).tiny)
    error, correlation = _jackknife((products.sum() - products) / rest), _correlation(predicted, measured)
    return Nats(slope, None, None, error, correlation, len(predicted), predicted.size)


def fit_ceiling(shares: np.ndarray, measured: np.ndarray) -> Nats:
    """Fit a climb by least squares; the error by leaving out one response at a time.

    Parameters
    ----------
    shares, measured : (models, Q) float64      Σ_{i ∈ S} w_i / Σ_i |w_i|, and rises of the loss
    """
    climbs = _climb(shares[None], _HALVES[:, None, None])  # (H, models, Q)
    products, squares = (climbs * measured).sum(axis=1), np.square(climbs).sum(axis=1)  # (H, Q)
    if not shares.any():
        return Nats(None, 0.0, float(_HALVES[-1]), np.inf, 0.0, len(shares), shares.size)
    # with h given the best c is a quotient, and what it explains of the squares is products² / squares
    whole, without = products.sum(axis=1), products.sum(axis=1)[:, None] - products
    below, rest = squares.sum(axis=1), squares.sum(axis=1)[:, None] - squares
    tiny = np.finfo(float).tiny
    best = int(np.argmax(np.maximum(whole, 0.0) ** 2 / below))
    each = np.argmax(np.maximum(without, 0.0) ** 2 / np.maximum(rest, tiny), axis=0)
    one = np.arange(len(each))
    ceilings = without[each, one] / np.maximum(rest[each, one], tiny)
    ceiling, half = float(whole[best] / below[best]), float(_HALVES[best])
    error, correlation = _jackknife(ceilings), _correlation(climbs[best], measured)
    return Nats(None, ceiling, half, error, correlation, len(shares), shares.size)


def _jackknife(without: np.ndarray) -> float:
    """The standard error of what comes to this without each response."""
    return float(np.sqrt((len(without) - 1) / len(without) * np.square(without - without.mean()).sum()))


def _correlation(predicted: np.ndarray, measured: np.ndarray) -> float:
    constant = not predicted.std() * measured.std() > 0
    return 0.0 if constant else float(np.corrcoef(predicted.ravel(), measured.ravel())[0, 1])


def choose_scale(sums: np.ndarray, totals: np.ndarray, measured: np.ndarray, *, heart: bool) -> Nats:
    """Choose the scale that rises go by.

    Parameters
    ----------
    sums, measured : (models, Q) float64      Σ_{i ∈ S} w_i, and rises of the loss
    totals : (Q,) float64                     Σ_i |w_i|
    heart : whether the model may have learnt by heart: there may be a ceiling
    """
    linear = fit_line(sums, measured)
    if not heart:
        return linear
    ceiling = fit_ceiling(sums / np.maximum(totals, np.finfo(float).tiny), measured)
    # both are least squares through the origin: the one that leaves less
    return min(
        (ceiling, linear), key=lambda scale: np.square(measured - scale.rise(sums, totals, np.inf)).sum()
    )
