"""How queries are measured and recovered unless told otherwise, by how the operators were fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from index_format.reader import Index

# λ / λ_max: operators in closed form answer nearly without noise, trained ones do not
DEFAULT_LAMBDA_RATIO = {"closed": 0.03, "sgd": 0.2}
PAPER_LAMBDA_RATIO = 0.8
_CLASSIFIER_LAMBDA_RATIO = 0.01


def recovery_defaults(index: Index, fit: str, recipe: str | None) -> dict[str, Any]:
    """How queries are measured and recovered unless told otherwise: lambda_ratio, intercept, measure."""
    from stride_cli.classifiers.kind import is_classifier_index

    paper = recipe == "paper"
    usual = DEFAULT_LAMBDA_RATIO[fit]
    if is_classifier_index(index) and fit == "closed":
        usual = _CLASSIFIER_LAMBDA_RATIO
    return {
        "lambda_ratio": PAPER_LAMBDA_RATIO if paper else usual,
        "intercept": not paper,
        "measure": "linear" if fit == "closed" else "exact",
    }
