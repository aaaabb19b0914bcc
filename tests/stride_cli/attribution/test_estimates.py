"""Chunks without exact values: what projections and pairs say of them, and subsets together with these."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution import estimates
from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import Posteriors
from stride_cli.attribution.shared_pairs import QueryPairs
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, dense

N = 6_000


@pytest.fixture
def known() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    errors = random.uniform(0.3, 3.0, N)  # as large as the chunk's gradient, and so is what it can do
    truth = errors * random.standard_t(3, N)
    return {"truth": truth, "errors": errors, "projected": truth + errors * random.standard_normal(N)}


def read(chunks: np.ndarray, influences: np.ndarray) -> Exact:
    return Exact(chunks, influences, 1.0, 0.0)


NOTHING = read(np.empty(0, np.int64), np.empty(0))


def learnt(known: dict[str, np.ndarray], exact: Exact = NOTHING) -> Posteriors:
    return Posteriors.learnt(
        N, lambda start, stop: (known["projected"][start:stop], known["errors"][start:stop]), exact
    )


def test_they_are_closer_than_what_projections_say(known) -> None:
    found = learnt(known).prior
    errors = [np.square(values - known["truth"]) for values in (found.means, known["projected"])]
    assert errors[0].mean() < 0.7 * errors[1].mean()
    # how far they are off they say
    variances = np.square(found.spreads)
    assert variances.mean() == pytest.approx(errors[0].mean(), rel=0.1)
    for some in (known["errors"] < 1, known["errors"] > 2, np.abs(found.means) > 3):
        assert variances[some].mean() == pytest.approx(errors[0][some].mean(), rel=0.25)


def test_subsets_say_what_estimates_add_up_to(known) -> None:
    random, count = np.random.default_rng(2), N // 4
    columns = np.stack([np.sort(random.choice(count, 5, replace=False)) for _ in range(N)]).astype(np.uint16)
    y = np.zeros(count)
    np.add.at(y, columns, known["truth"][:, None])
    rows = np.sort(np.argsort(-np.abs(known["projected"]))[:200])
    prior = learnt(known, read(rows, known["truth"][rows])).prior
    found = dense([solve_lasso(columns, y + 2.0, LassoSettings(0.003), n_subsets=count, prior=prior)])[0]
    errors = [np.square(values - known["truth"]).mean() for values in (found, prior.means)]
    assert errors[0] < 0.95 * errors[1]
    np.testing.assert_array_equal(found[rows], known["truth"][rows])
    # halves of the chunks gain more: what is left of single chunks does not add up
    halves = [random.permutation(N)[: N // 2] for _ in range(200)]
    sums = np.array(
        [[(values - known["truth"])[half].sum() for half in halves] for values in (found, prior.means)]
    )
    assert sums[0].std() < 0.95 * sums[1].std()


def test_parts_are_those_of_the_whole_and_exact_values_stand_in_them(known, monkeypatch) -> None:
    rows = np.array([0, 17, 4_000, N - 1])
    exact = read(rows, np.array([1.0, -2.0, 3.0, 0.0]))
    whole = learnt(known, exact).prior
    np.testing.assert_array_equal(whole.means[rows], exact.influences)
    np.testing.assert_array_equal(np.flatnonzero(whole.spreads == 0), rows)
    # a larger corpus: part by part, learnt from a sample
    monkeypatch.setattr(estimates, "_ROWS", 1_000)
    np.testing.assert_allclose(learnt(known, exact).prior.means, whole.means, rtol=1e-12)
    monkeypatch.setattr(estimates, "_SCANNED_TWICE", 2_000)
    monkeypatch.setattr(estimates, "_STRETCH", 100)
    monkeypatch.setattr(estimates, "_SAMPLED", 3_000)
    sampled = learnt(known, exact).prior
    np.testing.assert_allclose(sampled.means, whole.means, rtol=0.02, atol=0.15 * whole.means.std())


def overlap(scores: np.ndarray) -> QueryPairs:
    chunks = np.flatnonzero(scores)
    return QueryPairs(chunks, scores[chunks], len(scores), float(scores.mean()), float(scores.std()))


def test_pairs_count_as_far_as_projections_bear_them_out(known) -> None:
    random = np.random.default_rng(1)
    scores = np.where(random.uniform(size=N) < 0.3, random.exponential(size=N), 0.0)
    pairs = overlap(scores)

    def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return known["projected"][start:stop], known["errors"][start:stop]

    # nothing in the truth goes with them: next to nothing is made of them
    useless = Posteriors.learnt(N, part, NOTHING, pairs)
    assert abs(useless.slope) < 0.06
    np.testing.assert_allclose(useless.prior.means, learnt(known).prior.means, atol=0.5)
    # the truth goes with them
    more = 2.0 * pairs.standard(slice(0, N))

    def both(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return part(start, stop)[0] + more[start:stop], part(start, stop)[1]

    found, without = (Posteriors.learnt(N, both, NOTHING, own) for own in (pairs, None))
    assert found.slope == pytest.approx(2.0, abs=0.1)
    errors = [np.square(each.prior.means - known["truth"] - more).mean() for each in (found, without)]
    assert errors[0] < 0.9 * errors[1]
    # how many are above is counted with them too
    thresholds = np.quantile(known["truth"] + more, [0.999, 0.99, 0.9])
    above = found.expected_above(thresholds)
    wanted = [(known["truth"] + more > each).sum() for each in thresholds]
    np.testing.assert_allclose(above, wanted, rtol=0.35, atol=3)
    # where all were read, they are what they are
    whole = read(np.arange(N), known["truth"] + more)
    np.testing.assert_allclose(Posteriors.learnt(N, both, whole, pairs).slope, 2.0, atol=0.1)
    # what was read says more than what is estimated of it
    strongest = np.sort(np.argsort(-scores)[:200])
    some = read(strongest, (known["truth"] + 3.0 * pairs.standard(slice(0, N)))[strongest])
    assert Posteriors.learnt(N, both, some, pairs).slope > 2.1


def test_chunks_without_a_gradient_are_what_they_are() -> None:
    """No gate answers to them: projections know their influence, that of nothing, without an error."""
    projected = np.array([-1.0, -1.0, 5.0, 2.0])
    errors = np.array([0.0, 0.0, 1.0, 1.0])
    found = Posteriors.learnt(4, lambda start, stop: (projected[start:stop], errors[start:stop]), NOTHING)
    np.testing.assert_allclose(found.prior.means[:2], [-1.0, -1.0])


def test_of_many_chunks_some_say_how_many_are_above(known, monkeypatch) -> None:
    rows = np.array([0, 17, 4_000, N - 1])
    whole = learnt(known, read(rows, known["truth"][rows]))
    thresholds = np.quantile(known["truth"], [0.999, 0.99, 0.9])
    above = whole.expected_above(thresholds)
    wanted = [(np.delete(known["truth"], rows) > each).sum() for each in thresholds]
    np.testing.assert_allclose(above, wanted, rtol=0.35, atol=3)
    monkeypatch.setattr(estimates, "_ROWS", 1_000)
    monkeypatch.setattr(estimates, "_COUNTED", 400)
    monkeypatch.setattr(estimates, "_FEWEST_COUNTED", 200)
    np.testing.assert_allclose(whole.expected_above(thresholds), above, rtol=0.1)
