"""Several prompts as one answer: what supports any of them is added up, what opposes one is no evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.answer import Refused
from stride_cli.attribution.asking import Asked, Asking, Found
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.queries import Query
    from stride_cli.recovery.problem import Solution


def added_up(solutions: Sequence[Solution]) -> Solution:
    """Mean over prompts of what is above zero of every chunk's weight; all else is of the last.

    Its residual is (K,) zeros: no single recovery's, so that no document is backfilled by it.
    """
    chunks, places = np.unique(np.concatenate([each.indices for each in solutions]), return_inverse=True)
    supports = np.maximum(np.concatenate([each.values for each in solutions]), 0.0)
    weights = np.bincount(places, supports, minlength=len(chunks)) / len(solutions)
    left = weights > 0.0
    last = solutions[-1]
    return replace(last, indices=chunks[left], values=weights[left], residual=np.zeros_like(last.residual))


def each_alone(asking: Asking, queries: Sequence[Query], together: int) -> list[Found]:
    """What is found for each of several prompts, `together` of them at a time; or the first one's error.

    Raises
    ------
    QueryError, NumericalError
    """
    found: list[Found] = []
    for start in range(0, len(queries), together):
        with progress("asking the model"):
            asked = asking.measured([{"prompt": query} for query in queries[start : start + together]])
        for each in [*asked, *asking.found([own for own in asked if isinstance(own, Asked)])]:
            if isinstance(each, Refused):
                raise each.error
            if isinstance(each, Found):
                found.append(each)
    return found


def as_one(one: Query, found: Sequence[Found]) -> Found:
    """What several prompts, each asked alone, come to together.

    Parameters
    ----------
    one : Query      of `stride_cli.data.queries.pooled`
    found : of each of its prompts

    Returns
    -------
    Found      responses and loss are the prompts' means; the solution, whose certificate the answer shows, is
               that of the prompt whose certificate is weakest; recall, of one recovery, is none
    """
    measured = [each.asked.measured for each in found]
    agreements = [each.agreement for each in measured if each.agreement is not None]
    together = replace(
        measured[0],
        responses=np.mean([each.responses for each in measured], axis=0),
        losses=np.mean([each.losses for each in measured], axis=0),
        agreement=min(agreements, default=None),
    )
    seconds = {stage: sum(each.asked.seconds[stage] for each in found) for stage in found[0].asked.seconds}
    weakest = max((each.attribution for each in found), key=lambda each: each.solution.relative_gap)
    attribution = replace(
        weakest,
        influences=added_up([each.attribution.influences for each in found]),
        read=np.unique(np.concatenate([each.attribution.read for each in found])),
        recall=None,
    )
    return Found(Asked(one, one.batch(), together, seconds), attribution)
