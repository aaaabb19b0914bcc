"""What chunks have in common, as their projections tell, against the kernel of the gradients themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import shared_credit
from stride_cli.operators import redundancy
from stride_cli.operators.projections import Folding, Projections, encode
from stride_cli.operators.redundancy import Redundancy, read_redundancy
from stride_cli.randomness import stream

N, P, SIZE, SHARED = 600, 8_000, 2048, 3
STORED = {"common_form": redundancy.FORM}


def gradients(shared: float = 1.0) -> np.ndarray:
    """Chunks of different lengths, some of which share one of three directions each."""
    random = np.random.default_rng(0)
    own = random.standard_normal((N, P))
    for _ in range(SHARED):
        some = random.random(N) < 0.4
        own[some] += shared * random.standard_normal(P)
    return own * random.uniform(0.5, 2.0, N)[:, None]


def projected(values: np.ndarray) -> Projections:
    folded = Folding(P, 8 * SIZE, seed=0)([torch.from_numpy(values.astype(np.float32))])
    return Projections(*encode(folded), 0)


def kernel_of(values: np.ndarray) -> np.ndarray:
    """Products in units of the mean square length, but for chunks' own."""
    kernel = values @ values.T
    kernel /= np.trace(kernel) / len(kernel)
    np.fill_diagonal(kernel, 0.0)
    return kernel


@pytest.mark.parametrize(("sample", "permuted"), [(N, N), (200, N), (200, N - 1)])
def test_it_is_what_stands_out_of_the_kernel(
    sample: int, permuted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redundancy, "SAMPLE", sample)
    monkeypatch.setattr(redundancy, "_PERMUTED", permuted)
    values = gradients()
    found = Redundancy.of(projected(values))
    kernel = kernel_of(values)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(len(found.values)), atol=1e-3)
    leading = np.linalg.eigvalsh(kernel)[::-1][:SHARED]
    np.testing.assert_allclose(found.values[:SHARED], leading, rtol=0.1 if sample == N else 0.2)
    # it holds nearly all of the kernel that the leading directions hold
    values, vectors = np.linalg.eigh(kernel)
    best = vectors[:, -SHARED:]
    inside = np.linalg.svd(found.vectors[:, :SHARED].T @ best)[1]
    assert inside.min() > (0.99 if sample == N else 0.97)
    np.testing.assert_allclose(found.means, found.vectors.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_copies_share_alike_whichever_were_drawn(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of copies of one chunk some are in the sample and some are not, and of longer gradients than most."""
    monkeypatch.setattr(redundancy, "SAMPLE", 200)
    values = gradients()
    random = np.random.default_rng(5)
    copies = random.choice(N, 20, replace=False)
    one = 4.0 * random.standard_normal(P)
    values[copies] = one + noise * 4.0 * random.standard_normal((20, P))
    projections = projected(values)
    drawn = stream(projections.seed, "redundancy sample").permutation(N)[:200]
    assert 2 <= len(set(drawn.tolist()) & set(copies.tolist())) <= 18
    found = Redundancy.of(projections)
    shares = np.asarray(found.vectors[copies], np.float64) @ np.sqrt(found.values)
    assert shares.std() < 0.05 * abs(shares.mean())
    # what they say alike is shared out: of a query that all of them answer, next to nothing is left
    influences = values @ one / (one @ one)
    every = Exact(np.arange(N), influences, 1.0, 0.0)
    shared = shared_credit(found, 10.0, N, lambda start, stop: (influences[start:stop],) * 2, every)
    left = (influences - shared[np.arange(N)])[copies]
    assert left.std() < 0.05 and abs(left.mean()) < 0.2


def test_chunks_without_gradient_share_nothing() -> None:
    found = Redundancy.of(projected(np.zeros((N, P))))
    assert found.vectors.shape == (N, 1) and not found.vectors.any() and found.values.tolist() == [0.0]
    again = read_redundancy(found.arrays(), STORED, N)
    assert again is not None and again.means.tolist() == [0.0]
