"""What many chunks say alike is shared out: against the kernel's closed form, and through a method."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from stride_cli.attribution import estimates
from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import Estimate, Shared, shared_credit
from stride_cli.errors import UsageError
from stride_cli.operators.redundancy import Redundancy
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import score_all

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
    shared = credit(own, products)
    found = products - products.mean() - shared[:]
    np.testing.assert_allclose(found, exact - exact.mean(), atol=1e-5 * np.abs(products).max())
    np.testing.assert_array_equal(shared[20:30], shared[np.arange(20, 30)])


def credit(own: Redundancy, products: np.ndarray, exact: Exact | None = None) -> Shared:
    nothing = Exact(np.empty(0, np.int64), np.empty(0), 1.0, 0.0)
    return shared_credit(
        own, RIDGE, N, lambda start, stop: (products[start:stop], products[start:stop]), exact or nothing
    )


def test_a_sample_stands_for_all(monkeypatch) -> None:
    own = directions()
    influences = 5.0 * own.vectors[:, 0] * np.sqrt(N) + np.random.default_rng(2).standard_normal(N)
    whole = credit(own, influences)[:]
    for name, value in (("_ROWS", 100), ("_SAMPLED", 150), ("_STRETCH", 10)):
        monkeypatch.setattr(estimates, name, value)
    assert np.corrcoef(whole, credit(own, influences)[:])[0, 1] > 0.98


def test_exact_values_count_less_what_is_shared(monkeypatch) -> None:
    own, random = directions(), np.random.default_rng(3)
    truth = 4.0 * own.vectors[:, 0] * np.sqrt(N) + random.standard_normal(N)
    errors = np.full(N, 0.01)
    projected = truth + errors * random.standard_normal(N)
    chunks = np.array([3, 40, 200])
    truth[chunks] += 25.0  # which estimates do not say, and which is shared out as well
    read = Exact(chunks, truth[chunks], 1.0, 0.0)
    monkeypatch.setattr(
        Estimate, "_projected", lambda *_: lambda start, stop: (projected[start:stop], errors[start:stop])
    )
    asked = SimpleNamespace(projections=np.empty(N))
    found = Estimate(asked, 0, None, own).given(read, RIDGE)  # type: ignore[arg-type]
    kept = projected.copy()
    kept[chunks] = truth[chunks]
    shared = credit(own, kept)[:]
    np.testing.assert_allclose(found.prior.means, kept - shared, atol=0.05)
    np.testing.assert_allclose(found.shared[:], shared)
    plain = Estimate(asked, 0, None, own).given(read)  # type: ignore[arg-type]
    np.testing.assert_array_equal(plain.prior.means[chunks], truth[chunks])
    assert plain.shared is None


def test_influences_are_shared_by_default(task_and_queries) -> None:
    """A large ridge changes nothing, a small one what is estimated and what is read."""
    task, queries = task_and_queries
    found = {}
    for how in ("read=5,redundancy=0", "read=5,redundancy=1e6", "read=5", "read=0,redundancy=0", "read=0"):
        method = open_method(f"stride:project=256,{how}")
        method.fit(task)
        found[how] = score_all(method, queries)
    read, same, usual = (found[how] for how in ("read=5,redundancy=0", "read=5,redundancy=1e6", "read=5"))
    np.testing.assert_allclose(same, read, atol=0.02 * np.abs(read).max())
    for plain, shared in ((read, usual), (found["read=0,redundancy=0"], found["read=0"])):
        assert np.abs(shared - plain).max() > 0.01 * np.abs(plain).max()


def test_it_needs_projections(task_and_queries) -> None:
    task, _ = task_and_queries
    method = open_method("stride:project=0,redundancy=10,read=0")
    with pytest.raises(UsageError, match="needs a projection of every chunk"):
        method.fit(task)
