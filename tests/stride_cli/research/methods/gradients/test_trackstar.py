from __future__ import annotations

import numpy as np

from stride_cli.research.methods.gradients.trackstar import TrackStar
from tests.stride_cli.research.methods.gradients.scored import scored


def _cosines(held, train, damping=0.1, mix=0.0):
    fisher = (1 - mix) * train.T @ train / len(train) + mix * held.T @ held / len(held)
    fisher += damping * np.trace(fisher) / len(fisher) * np.eye(len(fisher))
    values, vectors = np.linalg.eigh(fisher)
    root = (vectors / np.sqrt(values)) @ vectors.T
    a, b = held @ root, train @ root
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


def test_whole_space_by_hand(softmax):
    train, held = softmax.gradients[: softmax.n].numpy(), softmax.gradients[softmax.n :].numpy()
    found = scored(TrackStar(rank=8, moments="none"), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, _cosines(held, train), rtol=1e-3, atol=1e-3)
    assert np.abs(found).max() <= 1 + 1e-5


def test_adafactor_moments_by_hand(softmax):
    matrices = softmax.gradients.numpy().reshape(-1, 3, 5)
    squares = np.square(matrices[: softmax.n]).mean(axis=0)
    rows, columns = squares.mean(axis=1), squares.mean(axis=0)
    divided = (matrices / np.sqrt(np.outer(rows, columns) / rows.mean())).reshape(-1, 15)
    found = scored(TrackStar(rank=8), softmax.task, softmax.queries)
    expected = _cosines(divided[softmax.n :], divided[: softmax.n])
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_auto_mix_makes_the_largest_eigenvalues_meet(softmax):
    """1,000 of 65,536 numbers are, of 15, the first."""
    train, held = softmax.gradients[: softmax.n].numpy(), softmax.gradients[softmax.n :].numpy()
    largest = [np.linalg.eigvalsh(each.T @ each / len(each))[-1] for each in (held, train)]
    mix = largest[1] / sum(largest)
    assert 0.05 < mix < 0.95
    found = scored(TrackStar(rank=8, moments="none", mix="auto"), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, _cosines(held, train, mix=mix), rtol=1e-3, atol=1e-3)
    nothing = TrackStar(rank=8, mix="auto")
    nothing.fit(softmax.task)
    assert list(nothing.score(softmax.queries.take(np.arange(0)))) == []
