"""Chunks that are not read: projections and recovery together."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution import estimated
from stride_cli.attribution.estimated import Estimates, Read, Responses, with_estimates
from stride_cli.attribution.shared_pairs import QueryPairs
from stride_cli.recovery.problem import Solution

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


def estimates(known: dict[str, np.ndarray]) -> Estimates:
    return Estimates.of(N, lambda start, stop: (known["projected"][start:stop], known["errors"][start:stop]))


def test_they_are_closer_than_what_projections_say(known) -> None:
    found = estimates(known)
    errors = [np.square(values - known["truth"]) for values in (found.part(0, N), known["projected"])]
    assert errors[0].mean() < 0.7 * errors[1].mean()
    # how far they are off they say
    before = found.known(Read(np.empty(0, np.int64), np.empty(0)))
    np.testing.assert_array_equal(before.means, found.part(0, N))
    assert before.variances.mean() == pytest.approx(errors[0].mean(), rel=0.1)
    for some in (known["errors"] < 1, known["errors"] > 2, np.abs(before.means) > 3):
        assert before.variances[some].mean() == pytest.approx(errors[0][some].mean(), rel=0.25)


def test_subsets_say_what_estimates_add_up_to(known) -> None:
    random, count = np.random.default_rng(2), N // 4
    columns = np.stack([np.sort(random.choice(count, 5, replace=False)) for _ in range(N)])
    matrix = np.zeros((count, N))
    matrix[columns, np.arange(N)[:, None]] = 1.0
    read = np.sort(np.argsort(-np.abs(known["projected"]))[:200])
    exact, own = Read(read, known["truth"][read]), estimates(known)
    none = np.empty(0, np.int64)
    nothing = Solution(none, none * 0.0, 0.0, 0.1, 1.0, 0.1, 0.0, 0.0, 1, 1, 0.0, np.zeros(count), N)

    def dense(responses: Responses | None) -> np.ndarray:
        found, _ = with_estimates(nothing, exact, own, responses)
        values = np.zeros(N)
        values[found.indices] = found.values
        return values

    told = Responses([columns], [matrix @ known["truth"] + 2.0], exact=True, intercept=True)
    found, without = (dense(each) for each in (told, None))
    errors = [np.square(values - known["truth"]).mean() for values in (found, without)]
    assert errors[0] < 0.85 * errors[1]
    np.testing.assert_array_equal(found[read], known["truth"][read])
    # halves of the chunks gain more: what is left of single chunks does not add up
    halves = [random.permutation(N)[: N // 2] for _ in range(200)]
    sums = np.array(
        [[(values - known["truth"])[half].sum() for half in halves] for values in (found, without)]
    )
    assert sums[0].std() < 0.8 * sums[1].std()
    # of two models, whose own influences differ, they are not taken to be those of the mean
    apart = random.normal(size=N)
    two = [matrix @ (known["truth"] + sign * apart) for sign in (1.0, -1.0)]
    both = dense(Responses([columns] * 2, two, True, True))
    assert np.square(both - known["truth"]).mean() < errors[1]
    # subsets that are too few for so many chunks say nothing
    few = Responses([columns], [np.zeros(N // 100)], exact=True, intercept=True)
    assert told.tell and not few.tell


def test_parts_are_those_of_the_whole_and_what_was_read_is_left_out(known, monkeypatch) -> None:
    whole = estimates(known)
    values = whole.part(0, N)
    read = np.array([0, 17, 4_000, N - 1])
    chunks, kept, _ = whole.kept(read)
    assert np.intersect1d(chunks, read).size == 0 and len(chunks) == N - len(read)
    np.testing.assert_array_equal(kept, values[chunks])
    # a larger corpus: part by part, learnt from a sample, only the strongest kept
    monkeypatch.setattr(estimated, "_ROWS", 1_000)
    monkeypatch.setattr(estimated, "_STRETCH", 100)
    monkeypatch.setattr(estimated, "_SAMPLED", 3_000)
    sampled = estimates(known)
    np.testing.assert_allclose(sampled.part(0, N), values, rtol=0.02, atol=0.15 * values.std())
    monkeypatch.setattr(estimated, "_MOST_KEPT", 50)
    chunks, kept, _ = sampled.kept(read)
    others = np.setdiff1d(np.arange(N), read)
    strongest = others[np.argsort(-np.abs(sampled.part(0, N)[others]))[:50]]
    np.testing.assert_array_equal(chunks, np.sort(strongest))
    assert (np.diff(chunks) > 0).all() and np.abs(kept).min() >= np.abs(sampled.part(0, N)[others]).mean()


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
    useless = Estimates.of(N, part, pairs=pairs)
    assert abs(useless.slope) < 0.06
    np.testing.assert_allclose(useless.part(0, N), Estimates.of(N, part).part(0, N), atol=0.5)
    # the truth goes with them
    more = 2.0 * pairs.standard(slice(0, N))

    def both(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return part(start, stop)[0] + more[start:stop], part(start, stop)[1]

    found, without = Estimates.of(N, both, pairs=pairs), Estimates.of(N, both)
    assert found.slope == pytest.approx(2.0, abs=0.1)
    errors = [np.square(each.part(0, N) - known["truth"] - more).mean() for each in (found, without)]
    assert errors[0] < 0.9 * errors[1]
    # how many are above is counted with them too
    thresholds = np.quantile(known["truth"] + more, [0.999, 0.99, 0.9])
    above = found.kept(np.empty(0, np.int64), thresholds)[2]
    wanted = [(known["truth"] + more > each).sum() for each in thresholds]
    np.testing.assert_allclose(above, wanted, rtol=0.35, atol=3)
    # where all were read, they are what they are
    whole = Read(np.arange(N), known["truth"] + more)
    np.testing.assert_allclose(Estimates.of(N, both, read=whole, pairs=pairs).slope, 2.0, atol=0.1)
    # what was read says more than what is estimated of it
    strongest = np.sort(np.argsort(-scores)[:200])
    read = Read(strongest, (known["truth"] + 3.0 * pairs.standard(slice(0, N)))[strongest])
    assert Estimates.of(N, both, read=read, pairs=pairs).slope > 2.1


def test_chunks_without_a_gradient_are_what_they_are() -> None:
    """No gate answers to them: projections know their influence, that of nothing, without an error."""
    projected = np.array([-1.0, -1.0, 5.0, 2.0])
    errors = np.array([0.0, 0.0, 1.0, 1.0])
    found = Estimates.of(4, lambda start, stop: (projected[start:stop], errors[start:stop]))
    np.testing.assert_allclose(found.part(0, 4)[:2], [-1.0, -1.0])


def test_of_many_chunks_some_say_how_many_are_above(known, monkeypatch) -> None:
    whole, read = estimates(known), np.array([0, 17, 4_000, N - 1])
    thresholds = np.quantile(known["truth"], [0.999, 0.99, 0.9])
    above = whole.kept(read, thresholds)[2]
    wanted = [(np.delete(known["truth"], read) > each).sum() for each in thresholds]
    np.testing.assert_allclose(above, wanted, rtol=0.35, atol=3)
    assert whole.kept(read)[2].shape == (0,)
    monkeypatch.setattr(estimated, "_ROWS", 1_000)
    monkeypatch.setattr(estimated, "_COUNTED", 400)
    monkeypatch.setattr(estimated, "_FEWEST_COUNTED", 200)
    np.testing.assert_allclose(whole.kept(read, thresholds)[2], above, rtol=0.1)
