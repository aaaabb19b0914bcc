"""Chunks that are not read: projections and recovery together."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution import estimates
from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import Posteriors
from stride_cli.attribution.shared_pairs import QueryPairs
from stride_cli.recovery.candidates import Candidates
from stride_cli.recovery.conditioning import corrections, tell

N = 6_000


@pytest.fixture
def known() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    errors = random.uniform(0.3, 3.0, N)  # as large as the chunk's gradient, and so is what it can do
    truth = errors * random.standard_t(3, N)
    return {
        "truth": truth,
        "errors": errors,
        "projected": truth + errors * random.standard_normal(N),
    }


def read(chunks: np.ndarray, influences: np.ndarray) -> Exact:
    return Exact(Candidates(chunks, np.zeros((1, len(chunks))), 1.0), influences, 1.0, 0.0)


NOTHING = read(np.empty(0, np.int64), np.empty(0))


def learnt(known: dict[str, np.ndarray]) -> Posteriors:
    return Posteriors.learnt(
        N, lambda start, stop: (known["projected"][start:stop], known["errors"][start:stop]), NOTHING
    )


def means(found: Posteriors, count: int = N) -> np.ndarray:
    """Of chunks that were not read."""
    return found.known(NOTHING)[0][:count]


def test_they_are_closer_than_what_projections_say(known) -> None:
    found, variances = learnt(known).known(NOTHING)
    errors = [np.square(values - known["truth"]) for values in (found, known["projected"])]
    assert errors[0].mean() < 0.7 * errors[1].mean()
    # how far they are off they say
    assert variances.mean() == pytest.approx(errors[0].mean(), rel=0.1)
    for some in (known["errors"] < 1, known["errors"] > 2, np.abs(found) > 3):
        assert variances[some].mean() == pytest.approx(errors[0][some].mean(), rel=0.25)


def test_subsets_say_what_estimates_add_up_to(known) -> None:
    random, count = np.random.default_rng(2), N // 4
    columns = np.stack([np.sort(random.choice(count, 5, replace=False)) for _ in range(N)])
    matrix = np.zeros((count, N))
    matrix[columns, np.arange(N)[:, None]] = 1.0
    rows = np.sort(np.argsort(-np.abs(known["projected"]))[:200])
    without, variances = learnt(known).known(read(rows, known["truth"][rows]))
    y = matrix @ known["truth"] + 2.0
    found = without + corrections(columns, y, without, variances, exact=True, intercept=True)
    errors = [np.square(values - known["truth"]).mean() for values in (found, without)]
    assert errors[0] < 0.85 * errors[1]
    np.testing.assert_array_equal(found[rows], known["truth"][rows])
    # halves of the chunks gain more: what is left of single chunks does not add up
    halves = [random.permutation(N)[: N // 2] for _ in range(200)]
    sums = np.array(
        [[(values - known["truth"])[half].sum() for half in halves] for values in (found, without)]
    )
    assert sums[0].std() < 0.8 * sums[1].std()
    # subsets that are too few for so many chunks say nothing
    assert tell(N, count) and not tell(N, N // 100)


def test_parts_are_those_of_the_whole_and_what_was_read_is_left_out(known, monkeypatch) -> None:
    whole, values, nothing = learnt(known), means(learnt(known)), np.empty(0)
    rows = np.array([0, 17, 4_000, N - 1])
    chunks, kept, _ = whole.kept(rows, nothing)
    assert np.intersect1d(chunks, rows).size == 0 and len(chunks) == N - len(rows)
    np.testing.assert_array_equal(kept, values[chunks])
    # a larger corpus: part by part, learnt from a sample, only the strongest kept
    monkeypatch.setattr(estimates, "_ROWS", 1_000)
    monkeypatch.setattr(estimates, "_STRETCH", 100)
    monkeypatch.setattr(estimates, "_SAMPLED", 3_000)
    sampled = learnt(known)
    again = means(sampled)
    np.testing.assert_allclose(again, values, rtol=0.02, atol=0.15 * values.std())
    monkeypatch.setattr(estimates, "_MOST_KEPT", 50)
    chunks, kept, _ = sampled.kept(rows, nothing)
    others = np.setdiff1d(np.arange(N), rows)
    strongest = others[np.argsort(-np.abs(again[others]))[:50]]
    np.testing.assert_array_equal(chunks, np.sort(strongest))
    assert (np.diff(chunks) > 0).all() and np.abs(kept).min() >= np.abs(again[others]).mean()


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
    np.testing.assert_allclose(means(useless), means(Posteriors.learnt(N, part, NOTHING)), atol=0.5)
    # the truth goes with them
    more = 2.0 * pairs.standard(slice(0, N))

    def both(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return part(start, stop)[0] + more[start:stop], part(start, stop)[1]

    found, without = (Posteriors.learnt(N, both, NOTHING, own) for own in (pairs, None))
    assert found.slope == pytest.approx(2.0, abs=0.1)
    errors = [np.square(means(each) - known["truth"] - more).mean() for each in (found, without)]
    assert errors[0] < 0.9 * errors[1]
    # how many are above is counted with them too
    thresholds = np.quantile(known["truth"] + more, [0.999, 0.99, 0.9])
    above = found.kept(np.empty(0, np.int64), thresholds)[2]
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
    np.testing.assert_allclose(means(found, 2), [-1.0, -1.0])


def test_of_many_chunks_some_say_how_many_are_above(known, monkeypatch) -> None:
    whole, rows = learnt(known), np.array([0, 17, 4_000, N - 1])
    thresholds = np.quantile(known["truth"], [0.999, 0.99, 0.9])
    above = whole.kept(rows, thresholds)[2]
    wanted = [(np.delete(known["truth"], rows) > each).sum() for each in thresholds]
    np.testing.assert_allclose(above, wanted, rtol=0.35, atol=3)
    monkeypatch.setattr(estimates, "_ROWS", 1_000)
    monkeypatch.setattr(estimates, "_COUNTED", 400)
    monkeypatch.setattr(estimates, "_FEWEST_COUNTED", 200)
    np.testing.assert_allclose(whole.kept(rows, thresholds)[2], above, rtol=0.1)
