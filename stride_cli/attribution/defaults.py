"""Defaults of measurement and recovery, by how the operators were fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stride_cli.recovery.shrinkage import Shrinkage

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel

# λ / λ_max: operators in closed form answer nearly without noise, trained ones do not
DEFAULT_LAMBDA_RATIO = {"closed": 0.03, "sgd": 0.2}
PAPER_LAMBDA_RATIO = 0.8
# where every chunk has an estimate: of .03, .01, .003 and .001 the best on 40 queries of a fine-tuning suite
# that no table reports (1,600 pairs; within .001 of .001, .001 to .002 above .01)
ESTIMATED_LAMBDA_RATIO = 0.003
# where hundreds of chunks take part in most answers: in fine-tuning LDS .755 instead of .747, and with three
# models .807 instead of .790 (queries and subsets of their own)
_SMALL_LAMBDA_RATIO = 0.01
# in pre-training: LDS .470 instead of .425 on WikiText's queries for tuning, where exponents of 1.1 to 1.6
# and factors of 0 to .5 do about as well; .576 instead of .549 on the Factbook, which had no part in the
# choice. In fine-tuning, influences that oppose are real, and nothing is gained
SHRINKAGE = Shrinkage(exponent=1.3, opposing=0.3)
# of 3, 5, 10, 30 on two suites of fine-tuning 5 and 10 are the best; both were looked at
_REDUNDANCY = 10.0

# what reading may cost: operations of some two seconds, on two cores or a GPU of today
_OPERATIONS = {"cpu": 1e11, "cuda": 5e13}
_FEWEST_READ, _MOST_READ = 10, 200
_A_PASS = 6  # operations for each token and parameter, forward and backward


def recovery_defaults(index: Index, model: AttributableModel, fit: str, recipe: str | None) -> dict[str, Any]:
    """Return the defaults of an index: lambda_ratio, the same and redundancy where chunks are estimated,
    intercept, measure, and shrinkage (None: weights stay the Lasso's)."""
    paper = recipe == "paper"
    usual = DEFAULT_LAMBDA_RATIO[fit]
    if fit == "closed" and not model.pretrained:
        usual = _SMALL_LAMBDA_RATIO
    return {
        "lambda_ratio": PAPER_LAMBDA_RATIO if paper else usual,
        "estimated_lambda_ratio": PAPER_LAMBDA_RATIO if paper else ESTIMATED_LAMBDA_RATIO,
        "intercept": not paper,
        "measure": "linear" if fit == "closed" else "exact",
        "shrinkage": SHRINKAGE if fit == "closed" and model.pretrained else None,
        "redundancy": 0.0 if model.classes else _REDUNDANCY,
    }


def default_reads(workspace: Workspace, models: int = 1) -> int:
    """Count the exact gradients of a query by default: as many as take a few seconds, at most 200.

    It depends on the models, the corpus and the kind of device, and on nothing that is measured: the same
    query has the same answer. 0 where that were fewer than 10.
    """
    model = workspace.model
    if model.classes:
        return 0
    tokens = workspace.chunks.mean_length
    cost = _A_PASS * model.n_parameters * max(1.0, tokens) * models
    count = int(_OPERATIONS.get(model.device.type, _OPERATIONS["cpu"]) / cost)
    return 0 if count < _FEWEST_READ else min(count, _MOST_READ)
