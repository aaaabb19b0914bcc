"""Recall@k, MRR and AUPRC of known causes: against scikit-learn without ties, all orders with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from stride_cli.research.evaluation.cause_measures import Places, measure_all, measure_names

# three levels among at most six documents: many ties
TIED = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 2), min_size=size, max_size=size),
        st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1),
    )
)


@given(TIED)
def test_ties_count_as_the_mean_over_their_orders(found: tuple[list[int], set[int]]) -> None:
    scores, causes = np.array(found[0], float), sorted(found[1])
    ks = range(1, len(scores) + 1)
    measured = measure_all(Places.of(scores, causes), ks)
    wanted: dict[str, list[float]] = {name: [] for name in measure_names(ks)}
    for order in itertools.permutations(range(len(scores))):
        if (np.diff(scores[list(order)]) > 0).any():
            continue
        right = np.isin(order, causes)
        for k in ks:
            wanted[f"recall@{k}"].append(right[:k].sum() / len(causes))
        wanted["mrr"].append(1 / (1 + right.argmax()))
        precision = np.cumsum(right) / np.arange(1, len(right) + 1)
        wanted["auprc"].append(precision[right].mean())
    assert measured == pytest.approx({name: np.mean(values) for name, values in wanted.items()})


@given(st.permutations(range(12)), st.sets(st.integers(0, 11), min_size=1, max_size=11))
def test_without_ties_auprc_is_scikit_learns(scores: list[int], causes: set[int]) -> None:
    labels = np.isin(np.arange(12), sorted(causes))
    found = Places.of(np.array(scores, float), sorted(causes)).average_precision()
    assert found == pytest.approx(average_precision_score(labels, scores))
