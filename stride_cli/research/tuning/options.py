"""Options of a sweep of settings; light to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stride_cli.errors import UsageError
from stride_cli.options import option
from stride_cli.training.options import EngineOptions

FEWEST_RESPONSES = 8  # correlations over fewer say nothing


@dataclass(frozen=True)
class TuneOptions(EngineOptions):
    """Settings that are swept, and what judges them.

    Attributes
    ----------
    grid : dimension → values           None: three or four values of space, layer, damping and rank
    start : dimension → value           where the sweep begins; missing: the default
    criterion : str                     "continued": the model trained further on random halves; "retrained":
                                        trained anew on them, by its recipe; "truth": the index's own truth
    queries : Path, optional            default: chunks of the corpus, kept out of halves and operators; of a
                                        classifier, its held-out rows where it has some
    held_out : int, optional            how many chunks
    responses : int                     R, random halves
    epochs, lr : of the further training ("continued" only); None for what suits the model
    trials : int, optional              at most so many fits
    engine, workers : see `stride_cli.training.retraining.retrain`
    """

    grid: Mapping[str, Sequence[Any]] | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    trials: int | None = option(None, "At most so many fits.", low=1)
    criterion: str = option(
        "continued",
        "continued, retrained, or truth: that of stride evaluate truth.",
        choices=("continued", "retrained", "truth"),
        listed=True,
    )
    queries: Path | None = option(None, "File of queries like those you will ask; default: held-out chunks.")
    held_out: int | None = option(None, "So many chunks are the queries. [48, or an eighth]", low=1)
    responses: int = option(
        24, "Random halves of the corpus whose effect is measured.", low=FEWEST_RESPONSES, high=10_000
    )
    epochs: float | None = option(
        None, "Passes over each half. [2; classifiers: 10]", above=0, high=10**6, example=5
    )
    lr: float | None = option(
        None, "Of these passes. [3 % of a typical weight]", above=0, high=1e6, example=1e-3
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion != "continued" and (self.epochs is not None or self.lr is not None):
            raise UsageError(
                f"--epochs and --lr are of further training, and the criterion is {self.criterion}",
                fix="leave them out: the recipe stored with the model has its own",
            )
