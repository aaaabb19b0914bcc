"""Groups of queries, and partial correlations against regression."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from stride_cli.research.evaluation.compare import query_groups
from stride_cli.research.evaluation.metrics import partial_spearman


def test_groups_are_the_first_part_of_the_names() -> None:
    found = query_groups(["same/a/1", "other/b", "same/c"])
    assert list(found) == ["same", "other"]
    assert found["same"].tolist() == [0, 2] and found["other"].tolist() == [1]
    assert query_groups(["a/1", "a/2"]) == {} and query_groups(["a/1", "b"]) == {} and query_groups([]) == {}
    assert query_groups([f"{i}/x" for i in range(40)]) == {}


@given(st.integers(0, 1000), st.integers(15, 40))
@settings(max_examples=50, deadline=None)
def test_partial_correlation_is_that_of_the_residuals(seed: int, n_subsets: int) -> None:
    """By definition: regress the ranks of both on the third's, correlate what is left."""
    random = np.random.default_rng(seed)
    p, m, g = random.standard_normal((3, 2, n_subsets))
    found = partial_spearman(p, m, g)
    for row in range(2):
        design = np.stack([np.ones(n_subsets), rankdata(g[row])], 1)
        left = [
            rankdata(side[row]) - design @ np.linalg.lstsq(design, rankdata(side[row]), rcond=None)[0]
            for side in (p, m)
        ]
        if abs(np.corrcoef(rankdata(p[row]), rankdata(g[row]))[0, 1]) < 0.99:
            np.testing.assert_allclose(found[row], np.corrcoef(left)[0, 1], atol=1e-6)
