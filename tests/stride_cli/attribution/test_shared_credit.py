"""What many chunks say alike is shared out: against the kernel's closed form, and through a method."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import Posteriors, Shared
from stride_cli.errors import UsageError
from stride_cli.operators.redundancy import Redundancy
from stride_cli.recovery import recall
from stride_cli.recovery.candidates import Candidates
from stride_cli.research.methods.protocol import score_all
from stride_cli.research.methods.registry import open_method

N, K, RIDGE = 300, 4, 10.0


def directions(seed: int = 0) -> Redundancy:
    random = np.random.default_rng(seed)
    vectors = np.linalg.qr(random.standard_normal((N, K)))[0].astype(np.float32)
    return Redundancy(vectors, np.sort(random.uniform(2.0, 40.0, K))[::-1])


def test_it_is_kernel_ridge_regression() -> None:
    """Up to the factor of all chunks that their own products take, and the mean."""
    own = directions()
    kernel = (own.vectors * own.values) @ own.vectors.T + np.eye(N)
    products = np.random.default_rng(1).standard_normal(N) + 3.0 * own.vectors[:, 0] * np.sqrt(N)
    exact = RIDGE * np.linalg.solve(kernel + RIDGE * np.eye(N), products) * (RIDGE + 1.0) / RIDGE
    shared = Shared.of(own, RIDGE, [(np.arange(N), products, 1.0)])
    found = products - products.mean() - shared[:]
    np.testing.assert_allclose(found, exact - exact.mean(), atol=1e-5 * np.abs(products).max())
    np.testing.assert_array_equal(shared[20:30], shared[np.arange(20, 30)])


def test_a_sample_stands_for_all() -> None:
    own = directions()
    influences = 5.0 * own.vectors[:, 0] * np.sqrt(N) + np.random.default_rng(2).standard_normal(N)
    whole = Shared.of(own, RIDGE, [(np.arange(N), influences, 1.0)])
    half = np.arange(0, N, 2)
    sampled = Shared.of(own, RIDGE, [(half, influences[half], 2.0)])
    assert np.corrcoef(whole[:], sampled[:])[0, 1] > 0.98


def test_what_was_read_counts_as_read_less_what_is_shared() -> None:
    own = directions()
    random = np.random.default_rng(3)
    exact = 4.0 * own.vectors[:, 0] * np.sqrt(N) + random.standard_normal(N)
    errors = np.full(N, 0.01)
    estimates = exact + errors * random.standard_normal(N)
    chunks = np.array([3, 40, 200])
    exact[chunks] += 25.0  # which estimates do not say, and which is shared out as well
    read = Exact(Candidates(chunks, np.zeros((1, 3)), 1.0), exact[chunks], 1.0, 0.0)

    def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return estimates[start:stop], errors[start:stop]

    found = Posteriors.learnt(N, part, read, None, own, RIDGE)
    dense = np.zeros(N)
    dense[chunks] = found.shared_out(read)
    others, values, _ = found.kept(chunks, np.empty(0))
    dense[others] = values
    kept = estimates.copy()
    kept[chunks] = exact[chunks]
    wanted = kept - Shared.of(own, RIDGE, [(np.arange(N), kept, 1.0)])[:]
    np.testing.assert_allclose(dense, wanted, atol=0.05)
    np.testing.assert_array_equal(Posteriors.learnt(N, part, read).shared_out(read), exact[chunks])


def test_influences_are_shared_by_default(task_and_queries) -> None:
    """A large ridge changes nothing, a small one what is estimated and what is read."""
    task, queries = task_and_queries
    found = {}
    for how in ("read=5,redundancy=0", "read=5,redundancy=1e6", "read=5", "read=0,redundancy=0", "read=0"):
        method = open_method(f"stride:shrink=false,project=256,{how}")
        method.fit(task)
        found[how] = score_all(method, queries)
    read, same, usual = (found[how] for how in ("read=5,redundancy=0", "read=5,redundancy=1e6", "read=5"))
    np.testing.assert_allclose(same, read, atol=0.02 * np.abs(read).max())
    for plain, shared in ((read, usual), (found["read=0,redundancy=0"], found["read=0"])):
        assert np.abs(shared - plain).max() > 0.01 * np.abs(plain).max()


def test_what_is_said_of_recall_is_of_the_influences_shown(task_and_queries, monkeypatch) -> None:
    task, queries = task_and_queries
    said = []

    def spy(influences: np.ndarray, *_: object) -> recall.Recall:
        said.append(influences)
        return recall.Recall(1, 1, 0.95)

    monkeypatch.setattr(recall, "stated_recall", spy)
    for how in ("", "redundancy=0,"):
        said.clear()
        method = open_method(f"stride:shrink=false,project=256,{how}read=5")
        method.fit(task)
        for shown, own in zip(score_all(method, queries), said, strict=True):
            assert np.abs(shown - own[:, None]).min(axis=1).max() < 1e-6 * np.abs(shown).max()


def test_it_needs_projections(task_and_queries) -> None:
    task, _ = task_and_queries
    method = open_method("stride:project=0,redundancy=10,read=0")
    with pytest.raises(UsageError, match="needs a projection of every chunk"):
        method.fit(task)
