"""Options of `stride evaluate truth`; light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stride_cli.errors import UsageError
from stride_cli.options import option
from stride_cli.training.options import RetrainOptions


@dataclass(frozen=True)
class TruthOptions(RetrainOptions):
    """Random subsets of the chunks on which `stride evaluate truth` retrains models; beside those of
    retraining:

    Attributes
    ----------
    n_subsets, n_seeds : R (of this α) and S
    alpha : share of the chunks, in steps of 0.001
    own_seed : from the model's own initial weights and in its own order, S = 1: what this very model would
        have been, not what is true of its training on average
    keep : directory that gets the retrained weights, and whose weights are used
    overwrite : replace a truth of other queries or another recipe
    """

    n_subsets: int = option(100, "Random subsets of this α, in all.", flag="--subsets", low=1, high=10**6)
    alpha: float = option(0.3, "Share of the chunks in a subset.", low=0.001, high=0.999)
    n_seeds: int = option(1, "Models trained on each subset.", flag="--seeds", low=1, high=1_000)
    own_seed: bool = option(
        False,
        "Retrain from the model's own initial weights, in its own order: what this very model would have "
        "been.",
    )
    keep: Path | None = option(None, "Keep the retrained weights here.", metavar="DIR")
    overwrite: bool = option(False, "Replace a truth of other queries or another recipe.")

    def __post_init__(self) -> None:
        super().__post_init__()
        per_mille(self.alpha)
        if self.n_seeds > 1 and self.command is not None and "{seed}" not in self.command:
            raise UsageError(
                f"--seeds is {self.n_seeds}, and --command has no {{seed}}",
                fix="add for example --seed {seed}",
            )
        if self.n_seeds > 1 and self.own_seed:
            raise UsageError(
                f"--own-seed is one seed, --seeds asks for {self.n_seeds}", fix="drop --seeds, or --own-seed"
            )


def per_mille(alpha: float) -> int:
    """Convert α to thousandths; UsageError where it is no whole number between 1 and 999."""
    share = round(alpha * 1000)
    if not 1 <= share <= 999 or abs(share - alpha * 1000) > 1e-6:
        raise UsageError(
            f"--alpha is {alpha}, expected a share between 0.001 and 0.999 in steps of 0.001",
            fix="try --alpha 0.3",
        )
    return share
