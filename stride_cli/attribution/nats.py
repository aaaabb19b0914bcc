"""Influences in nats: scales fitted on models that were trained again without a part of the corpus.

Of a fine-tuned model,

    loss of x after training without S  −  loss of x after training with everything  ≈  a Σ_{i ∈ S} w_i

w are influences, whose size grows with the design; a makes them a forecast of what happens when documents
are taken out. It is found by least squares through the origin over random tenths S of the documents and
responses to what users ask of chunks, some of which are in S.

What a model learnt by heart from scratch it says without loss as long as enough is left that says it, and
without that no better than chance: its loss stays, then rises, and ends at a ceiling c, whatever the
influences come to. What it depends on is the share f of all influence that is taken out,

    c (1 − 2^−(f / h)²),      f = Σ_{i ∈ S} w_i / Σ_i |w_i|,

which is half of c at f = h. Where a model trained from scratch has learnt nothing by heart, the straight
line fits better, and is kept.

A climb's forecast has an interval that holds nine in ten single rises; a line's held too few, and has none.
Each part is left out under a seed of its own, and forecast by a scale fitted on the others. What forecasts
miss makes intervals (cross-conformal prediction: Vovk, Annals of Mathematics and Artificial Intelligence 74,
2015). They hold for responses like these, for parts of a tenth, and on average over seeds, as all pairs of a
seed share its luck; for single documents they are extrapolated, as forecasts are, and larger ones have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from stride_cli.schema.derivation import key, told

TENTH = 0.1  # of the documents, that models are trained without; nothing is known of larger parts
_SURE = 3.0  # standard errors that the slope is above zero, for influences to be told in nats
_HELD = 0.9  # of single rises, by the interval of their forecast
_FEWEST = 40  # rises that an end of an interval is found by, at least
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
        return "ceiling" if self.slope is None else "linear"

    slope: float | None = key("nats per scored token for a relative influence of 1; null: not linear")
    ceiling: float | None = key("nats per scored token that a loss rises by at most; null: linear")
    half: float | None = key("share without which a loss rises by half of the ceiling; null: linear")
    error: float = key("standard error of the slope, or of the ceiling, over responses; not of a forecast")
    correlation: float = key("of predicted and measured rises of the loss")
    models: int = key("that were trained again, each without a tenth of the documents")
    pairs: int = key("rises of a response's loss that it was found by")
    band: list[list[float]] | None = key(
        "rows of a forecast and the ends of the interval that holds nine in ten single rises; between rows, "
        "of (end − forecast) / (|forecast| + half the width of the narrowest); null: not known, or linear",
        default=None,
        optional=True,
    )

    @property
    def sure(self) -> bool:
        """True where influences can be told in nats."""
        return (self.slope or self.ceiling or 0.0) > _SURE * self.error

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
        found = np.maximum((self.ceiling or 0.0) * _climb(share, self.half), -np.asarray(loss))
        return float(found) if np.ndim(found) == 0 else found

    def interval(self, forecast: float) -> tuple[float, float] | tuple[None, None]:
        """The ends that hold nine in ten single rises of such a forecast; None where they are not known."""
        if self.band is None:
            return None, None
        at, *ends = np.array(self.band).T
        least = (ends[1] - ends[0]).min() / 2
        away = [np.interp(forecast, at, (end - at) / (np.abs(at) + least)) for end in ends]
        low, high = (forecast + float(each) * (abs(forecast) + least) for each in away)
        return low, high


class CalibrationRecord(TypedDict):
    schema: Literal["stride.calibration/1"]
    index: Annotated[str, "path of the index"]
    nulls: Annotated[int, "unrelated prompts that were asked"]
    median_loss: Annotated[float, "the model's median loss on its responses to them, nats per scored token"]
    scale: NotRequired[Annotated[Nats | None, "what influences are in nats; null: not measured"]]
    sure: NotRequired[Annotated[bool, "whether that is sure enough for answers to tell nats"]]
    seconds: Annotated[float, "seconds"]


def scale_of(record: Mapping[str, Any]) -> Nats:
    """Read a scale as its record has it; an older index lacks keys. KeyError, TypeError: it is none."""
    known: dict[str, Any] = {name: record.get(name) for name in ("ceiling", "half")}
    known |= {name: record[name] for name in ("slope", "error", "correlation", "models", "pairs")}
    return Nats(**known, band=record.get("band") if known["ceiling"] else None)


def _climb(share: Any, half: Any) -> Any:
    """±(1 − 2^−(f / h)²)."""
    return np.sign(share) * -np.expm1(-np.log(2) * np.square(share / half))


def fit_line(predicted: np.ndarray, measured: np.ndarray) -> Nats:
    """Fit a line through the origin to Σ_{i ∈ S} w_i and rises of the loss, (models, Q) float64 each."""
    _, slope, error, correlation = _least_squares(predicted[None], measured)
    return Nats(slope, None, None, error, correlation, len(predicted), predicted.size)


def fit_ceiling(shares: np.ndarray, measured: np.ndarray) -> Nats:
    """Fit a climb to Σ_{i ∈ S} w_i / Σ_i |w_i| and rises of the loss, (models, Q) float64 each."""
    climbs = _climb(shares[None], _HALVES[:, None, None])
    best, ceiling, error, correlation = _least_squares(climbs, measured)
    return Nats(None, ceiling, float(_HALVES[best]), error, correlation, len(shares), shares.size)


def _least_squares(shapes: np.ndarray, measured: np.ndarray) -> tuple[int, float, float, float]:
    """Find the best of some shapes of rises, (H, models, Q), the factor that fits it best, the standard error
    of that by leaving out one response at a time, and the correlation."""
    sums = np.stack([(shapes * measured).sum(axis=1), np.square(shapes).sum(axis=1)])  # (2, H, Q)
    whole = sums.sum(axis=2, keepdims=True)
    # of all responses, and of all but each: (H, 1 + Q)
    products, squares = np.concatenate([whole, whole - sums], axis=2)
    squares = np.maximum(squares, np.finfo(float).tiny)
    # of each shape the best factor is a quotient, and what it explains of the squares is products² / squares
    best = np.argmax(np.square(np.maximum(products, 0.0)) / squares, axis=0)
    factor, *without = np.take_along_axis(products / squares, best[None], axis=0)[0]
    error, shape = np.std(without) * np.sqrt(len(without) - 1), shapes[best[0]]
    varied = shape.std() * measured.std() > 0
    correlation = np.corrcoef(shape.ravel(), measured.ravel())[0, 1] if varied else 0.0
    return int(best[0]), float(factor), float(error), float(correlation)


def choose_scale(sums: np.ndarray, totals: np.ndarray, measured: np.ndarray, *, heart: bool) -> Nats:
    """Choose the scale that rises go by.

    Parameters
    ----------
    sums, measured : (models, Q) float64      Σ_{i ∈ S} w_i, and rises of the loss
    totals : (Q,) float64                     Σ_i |w_i|
    heart : whether the model may have learnt by heart: there may be a ceiling
    """
    found = _fit(sums, totals, measured, heart)
    if len(sums) < 2 or found.ceiling is None:
        return found
    # each part and its seed is forecast by what the others tell
    others = [np.delete(np.arange(len(sums)), part) for part in range(len(sums))]
    scales = [_fit(sums[rest], totals, measured[rest], heart) for rest in others]
    forecasts = [scale.rise(each, totals, np.inf) for scale, each in zip(scales, sums, strict=True)]
    return replace(found, band=fit_band(np.ravel(forecasts), measured.ravel()))


def fit_band(forecasts: np.ndarray, measured: np.ndarray) -> list[list[float]]:
    """Find the intervals that hold nine in ten single rises, as `Nats.band` has them, from rises, (n,)
    float64, and forecasts by scales that these had no part in."""
    order, stop, count, rows = np.argsort(forecasts), len(forecasts), _FEWEST, []
    missed, far = measured - forecasts, np.abs(forecasts)
    # what is missed where next to nothing is forecast, and in proportion
    sizes = far + np.quantile(np.abs(missed[far <= np.median(far)]), _HELD)
    missed = missed / np.maximum(sizes, np.finfo(float).tiny)
    # from the largest forecasts down, of which there are few: each group is twice as many as the one before
    while stop:
        start = stop - count if stop >= 2 * count else 0
        part = order[start:stop]
        few, middle = max(1, int((1 - _HELD) / 2 * (len(part) + 1))), int(part[len(part) // 2])
        ends = 0.0, *np.sort(missed[part])[[few - 1, -few]]
        rows.append([float(forecasts[middle] + end * sizes[middle]) for end in ends])
        stop, count = start, 2 * count
    return rows[::-1]


def _fit(sums: np.ndarray, totals: np.ndarray, measured: np.ndarray, heart: bool) -> Nats:
    scales = [fit_line(sums, measured)]
    if heart:
        scales.insert(0, fit_ceiling(sums / np.maximum(totals, np.finfo(float).tiny), measured))
    # both are least squares through the origin: the one that leaves less
    return min(scales, key=lambda scale: np.square(measured - scale.rise(sums, totals, np.inf)).sum())
