"""p-values: uniform where nothing is going on, whatever items have in common; q against SciPy; power."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, kstest, rankdata

from stride_cli.audit.calibration import benjamini_hochberg, fewest_together, p_values, power
from stride_cli.audit.ranking import _NATURAL

VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@settings(deadline=None, max_examples=50)
@given(statistic=st.integers(0, 5), controls=VALUES)
def test_p_is_the_mid_rank_among_item_and_controls(statistic: int, controls: list[int]) -> None:
    pool = np.array([statistic, *controls], float)
    expected = rankdata(-pool)[0] / len(pool)  # from the top, ties in the middle
    found = p_values(np.array([statistic, np.nan]), np.array([*controls, np.nan]))  # NaN: not tested
    assert found[0] == pytest.approx(expected) and np.isnan(found[1])


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_few_sources_of_versions_make_up_no_discoveries(shared: float) -> None:
    """Versions of 20 items, however like each other those of one are, at three times their steepness.

    Steepness is lognormal here, and that of the items 1.8 times their versions', as it was measured. Ranked
    among versions as they are, 5 sources of 40 with correlation 0.8 gave P(p ≤ 0.05) = 0.11.
    """
    generator = np.random.default_rng(1)
    found, any_false = [], 0
    for _ in range(300):
        common, own = np.sqrt(shared) * generator.normal(size=20), np.sqrt(1 - shared)
        versions = np.repeat(common, 10) + own * generator.normal(size=200)
        items = 1.8 * np.exp(0.5 * (common + own * generator.normal(size=20)))
        p = p_values(items, _NATURAL * np.exp(0.5 * versions))
        found.append(p)
        any_false += int((benjamini_hochberg(p) < 0.05).any())
    assert np.mean(np.concatenate(found) <= 0.05) < 0.05 and any_false / 300 < 0.05


@pytest.mark.parametrize("learnt", [0, 15])
def test_false_discoveries_stay_under_the_rate(learnt: int) -> None:
    """Items that share their controls, as all do here: p is uniform, and few discoveries are false."""
    generator = np.random.default_rng(4)
    shares, found, nothing = [], [], []
    for _ in range(400):
        values = generator.normal(size=230)
        values[:learnt] += 4
        p = p_values(values[:30], values[30:])
        hits = benjamini_hochberg(p) < 0.05
        shares.append(hits[learnt:].sum() / max(1, hits.sum()))
        found.append(hits[:learnt].mean() if learnt else 1.0)
        nothing.append(p[-1])
    assert np.mean(shares) < 0.06 and np.mean(found) > 0.9
    assert kstest(np.array(nothing) - generator.random(400) / 201, "uniform").pvalue > 0.01


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_q_as_scipy(p: list[float]) -> None:
    np.testing.assert_allclose(benjamini_hochberg(np.array(p)), false_discovery_control(p), atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=60), shift=st.floats(0.01, 4))
def test_power_is_how_many_raised_controls_stand_out_from_the_others(
    values: list[float], shift: float
) -> None:
    controls = np.array(values)
    expected = np.mean(
        [
            (1 + (np.delete(controls, row) >= each + shift).sum()) / len(values) <= 0.05
            for row, each in enumerate(values)
        ]
    )
    assert power(controls, 0.05, shift) == pytest.approx(expected, abs=1e-12)
    assert power(controls[:19], 0.05, 100.0) == 0 and power(np.arange(25), 0.05, 100.0) == 1


@pytest.mark.parametrize(("items", "controls"), [(36, 100), (3, 24), (400, 9)])
def test_so_many_together_are_discovered_and_one_less_is_not(items: int, controls: int) -> None:
    def discovered(count: int) -> int:
        p = np.ones(items)
        p[:count] = 1 / (controls + 1)
        return int((benjamini_hochberg(p) < 0.05).sum())

    enough = fewest_together(items, controls, 0.05)
    assert discovered(min(enough - 1, items)) == 0
    if enough <= items:
        assert discovered(enough) == enough
