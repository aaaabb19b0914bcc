from __future__ import annotations

import numpy as np

from stride_cli.methods.gradients.less import LESS
from stride_cli.methods.protocol import score_all
from stride_cli.models import loading


def _scores(method, task, queries):
    method.fit(task)
    return score_all(method, queries)


def _cosine(a, b):
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


def test_large_dim_is_the_cosine_of_gradients(softmax, agreement):
    train, held = softmax.gradients[: softmax.n].numpy(), softmax.gradients[softmax.n :].numpy()
    for projection in ("dense", "kronecker"):
        found = _scores(LESS(dim=20_000, projection=projection), softmax.task, softmax.queries)
        np.testing.assert_allclose(found, _cosine(held, train), atol=0.05)


def test_adam_updates_by_hand(softmax):
    train, held = softmax.gradients[: softmax.n].numpy(), softmax.gradients[softmax.n :].numpy()
    mean, square = train.mean(axis=0), np.square(train).mean(axis=0)
    updates = (0.9 * mean + 0.1 * train) / (np.sqrt(0.999 * square + 0.001 * np.square(train)) + 1e-8)
    for projection in ("dense", "kronecker"):
        found = _scores(LESS(dim=20_000, form="adam", projection=projection), softmax.task, softmax.queries)
        np.testing.assert_allclose(found, _cosine(held, updates), atol=0.05)


def test_language_model_against_autograd(nanochat_task, queries, autograd):
    parameters = nanochat_task.model.model.named_parameters()
    names = [name for name, parameter in parameters if "layers" in name and parameter.ndim == 2]
    chunks = [nanochat_task.chunks.chunk(row) for row in range(nanochat_task.n_chunks)]
    train = autograd(nanochat_task, chunks, names)
    held = autograd(nanochat_task, list(zip(queries.ids, queries.weights, strict=True)), names)
    expected = _cosine(held, train)
    found = _scores(LESS(dim=8192), nanochat_task, queries)
    np.testing.assert_allclose(found, expected, atol=0.06)
    small = _scores(LESS(dim=8192, batch_tokens=12), nanochat_task, queries)
    np.testing.assert_allclose(small, found, rtol=1e-3, atol=1e-4)


def test_checkpoints_are_weighted(softmax, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda path, **options: softmax.task.model)
    method = LESS(dim=8192, checkpoints=f"{tmp_path}|{tmp_path}", rates="1|3")
    found = _scores(method, softmax.task, softmax.queries)
    one = _scores(LESS(dim=8192), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, 4 * one, atol=0.2)
