"""The query's gradient, preconditioned by what the subsets' sums say of the chunks' second moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from index_format.design import build_columns
from stride_cli.attribution.redundancy import Preconditioner
from stride_cli.errors import NumericalError, UsageError
from stride_cli.methods.protocol import score_all
from stride_cli.methods.registry import open_method
from stride_cli.operators.gates import PackedGates
from stride_cli.operators.store import Operators

N, P, K, DEGREE = 600, 4_000, 200, 10


def chunks_with_something_in_common(share: float) -> np.ndarray:
    random = np.random.default_rng(0)
    own = random.standard_normal((N, P))
    return own + share * np.sqrt(P) * random.standard_normal((N, 1)) * random.standard_normal(P) / np.sqrt(P)


def operators_of(gradients: np.ndarray, *, packed: bool = False) -> tuple[Operators, np.ndarray]:
    columns = build_columns(0, N, n_subsets=K, degree=DEGREE, seed=0)
    sizes = np.bincount(columns.reshape(-1), minlength=K)
    means = np.zeros((K, P))
    for chunk, subsets in enumerate(columns):
        means[subsets] += gradients[chunk]
    gates = (means / sizes[:, None]).astype(np.float32)
    halves = [gates[:, : P // 4], gates[:, P // 4 :]]
    kept = [PackedGates.of(each) if packed else np.ascontiguousarray(each) for each in halves]
    return Operators([], kept, 0, "closed", np.ones(N, np.uint8), direct_scale=1.0), sizes


@pytest.mark.parametrize("packed", [False, True])
def test_what_chunks_have_in_common_is_taken_away_as_their_own_moments_say(packed: bool) -> None:
    gradients = chunks_with_something_in_common(1.0)
    operators, sizes = operators_of(gradients, packed=packed)
    query = np.random.default_rng(1).standard_normal((2, P)) + gradients[:2]
    parts = [torch.from_numpy(each.astype(np.float32)) for each in np.split(query, [P // 4], axis=1)]
    found, answered = Preconditioner.of(operators, sizes, DEGREE, N, 10.0)(parts)
    found_whole = torch.cat(found, dim=1).numpy()
    kernel = gradients @ gradients.T
    gamma = 10.0 * np.trace(kernel) / N
    solved = np.linalg.solve(gamma * np.eye(N) + kernel, gradients @ query.T)
    exact = query - (gradients.T @ solved).T
    common = np.linalg.svd(gradients, full_matrices=False)[2][0]  # the direction that they share
    before, wanted = query @ common, exact @ common
    np.testing.assert_allclose(found_whole @ common, wanted, atol=0.1 * np.abs(before).max())
    # what is left of the rest is as it was, but for what it is shrunk by as a whole
    for own, of in zip(found_whole, query, strict=True):
        rest = of - (of @ common) * common
        assert np.corrcoef(own - (own @ common) * common, rest)[0, 1] > 0.98
    # the subsets' answers are those to the new gradients
    again = Preconditioner.of(operators, sizes, DEGREE, N, 1e9)(found)[1]  # takes nothing away
    np.testing.assert_allclose(answered, again, rtol=1e-2, atol=1e-3 * np.abs(again).max())


def test_where_chunks_have_nothing_in_common_hardly_anything_changes() -> None:
    gradients = np.random.default_rng(3).standard_normal((N, P))
    operators, sizes = operators_of(gradients)
    query = gradients[:1].astype(np.float32)
    parts = [torch.from_numpy(each) for each in np.split(query, [P // 4], axis=1)]
    found, _ = Preconditioner.of(operators, sizes, DEGREE, N, 10.0)(parts)
    assert np.linalg.norm(torch.cat(found, dim=1).numpy() - query) < 0.1 * np.linalg.norm(query)


def test_gates_of_nothing_are_refused() -> None:
    operators, sizes = operators_of(np.zeros((N, P)))
    with pytest.raises(NumericalError, match="all zero"):
        Preconditioner.of(operators, sizes, DEGREE, N, 10.0)


def test_influences_follow_the_preconditioned_gradient(task_and_queries) -> None:
    """Recovered, estimated or read: a large ridge changes nothing, a small one what all of them say."""
    task, queries = task_and_queries
    found = {}
    for ridge in (0, 1e6, 3):
        for how in ("project=0,read=0", "project=256,read=0", "project=256,read=5"):
            method = open_method(f"stride:shrink=false,redundancy={ridge},{how}")
            method.fit(task)
            found[ridge, how] = score_all(method, queries)
    for how in ("project=0,read=0", "project=256,read=0", "project=256,read=5"):
        plain, same, other = (found[ridge, how] for ridge in (0, 1e6, 3))
        np.testing.assert_allclose(same, plain, atol=0.02 * np.abs(plain).max())
        assert np.abs(other - plain).max() > 0.02 * np.abs(plain).max()


def test_exact_measurement_is_refused(task_and_queries) -> None:
    task, queries = task_and_queries
    method = open_method("stride:redundancy=10,measure=exact,read=0")
    method.fit(task)
    with pytest.raises(UsageError, match="exact measurement takes none"):
        score_all(method, queries)
