"""Options of a sweep of settings; light to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stride_cli.options import option
from stride_cli.training.options import EngineOptions

LAMBDAS = (0.003, 0.01, 0.03, 0.1, 0.3)
FEWEST_RESPONSES = 8  # correlations over fewer say nothing


@dataclass(frozen=True)
class TuneOptions(EngineOptions):
    """Settings that are swept, and what judges them.

    Attributes
    ----------
    grid : dimension → values           None: three or four values of space, layer, damping and rank
    start : dimension → value           where the sweep begins; missing: the default
    lambdas : λ / λ_max                 tried in every trial
    criterion : str                     "retrained": models trained anew on random halves, by the recipe;
                                        "truth": the index's own truth
    queries : Path, optional            default: chunks of the corpus, kept out of halves and operators; of a
                                        classifier, its held-out rows where it has some
    held_out : int, optional            how many chunks
    responses : int                     R, random halves
    trials : int, optional              at most so many fits
    engine, workers : see `stride_cli.training.retraining.retrain`
    """

    grid: Mapping[str, Sequence[Any]] | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    lambdas: Sequence[float] = LAMBDAS
    trials: int | None = option(None, "At most so many fits.", low=1)
    criterion: str = option(
        "retrained",
        "retrained, or truth: that of stride evaluate truth.",
        choices=("retrained", "truth"),
        listed=True,
    )
    queries: Path | None = option(None, "File of queries like those you will ask; default: held-out chunks.")
    held_out: int | None = option(None, "So many chunks are the queries. [48, or an eighth]", low=1)
    responses: int = option(
        24, "Random halves of the corpus whose effect is measured.", low=FEWEST_RESPONSES, high=10_000
    )
