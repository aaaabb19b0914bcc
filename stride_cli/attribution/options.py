"""How influences are found."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.errors import UsageError


@dataclass(frozen=True)
class RecoveryOptions:
    """How influences are found; None means "as the operators' fit asks for".

    Attributes
    ----------
    lambda_ratio : λ / λ_max
    measure : "auto", "linear" or "exact"
    intercept, nonneg : of the Lasso
    shrink : make small influences smaller, where they are mostly noise (pre-training); False: weights of the
        Lasso as they are
    refine : read the influences of so many chunks, those that the recovery and shared pairs of tokens make
        most likely, from their own gradients
    batch_size : steered continuations at once (exact)

    Raises
    ------
    UsageError      a measurement that does not exist, λ outside (0, 1], or fewer than no chunks to read
    """

    lambda_ratio: float | None = None
    measure: str = "auto"
    intercept: bool | None = None
    nonneg: bool = False
    shrink: bool = True
    refine: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.measure not in ("auto", "linear", "exact"):
            raise UsageError(f"unknown measurement '{self.measure}'", fix="use auto, linear or exact")
        if self.lambda_ratio is not None and not 0 < self.lambda_ratio <= 1:
            raise UsageError(
                f"λ is {self.lambda_ratio} of λ_max (expected more than 0, at most 1)",
                fix="try --lambda-ratio 0.1",
            )
        if self.refine < 0:
            raise UsageError(f"refine is {self.refine} (expected 0 or more)", fix="try refine=200")
