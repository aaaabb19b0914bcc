"""Tail-patch steps against brute force and first order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.research.evaluation.options import TailPatchOptions
from stride_cli.research.evaluation.ranking import random_chunks
from stride_cli.research.evaluation.tail_patch import Patcher, measure_tail_patch


def plain_losses(model, batch) -> torch.Tensor:
    """Summed loss of each row by the model's own forward pass."""
    logits = model.model(input_ids=batch.ids).logits[:, :-1].double()
    picked = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
    return -(picked * batch.weights[:, 1:]).sum(1)


@pytest.fixture
def patcher(task_and_queries) -> Patcher:
    return Patcher(*task_and_queries, lr=1e-2)


def test_a_step_is_a_step_and_is_taken_back(patcher: Patcher, task_and_queries) -> None:
    """θ − η ∇ of the mean loss of the chunks' scored tokens, by the model's own forward pass."""
    task, queries = task_and_queries
    module, chunks = task.model.model, np.array([3, 11, 30])
    before = [parameter.clone() for parameter in module.parameters()]
    found = patcher.change(chunks, range(len(queries)))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in module.parameters())

    batch, asked = task.chunks.batch(chunks), queries.batch(range(len(queries)))
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    try:
        (plain_losses(task.model, batch).sum() / batch.weights[:, 1:].sum()).backward()
        with torch.no_grad():
            scored = asked.weights.sum(1)
            base = plain_losses(task.model, asked) / scored
            for parameter in module.parameters():
                parameter -= 1e-2 * parameter.grad
            expected = base - plain_losses(task.model, asked) / scored
    finally:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), before, strict=True):
                parameter.copy_(value)
                parameter.grad = None
                parameter.requires_grad_(False)
    assert found == pytest.approx(expected.numpy(), rel=1e-2, abs=1e-6)


def test_a_query_gains_most_from_chunks_like_itself(task_and_queries) -> None:
    """Chunks of highest gradient product, by brute force, against random ones: a lift above zero."""
    task, queries = task_and_queries
    patcher = Patcher(task, queries, lr=1e-3)
    alone = np.stack([patcher.change(np.array([row]), range(len(queries))) for row in range(task.n_chunks)])
    tops = np.argsort(-alone, axis=0)[:10].T  # (Q, 10)
    small, large = measure_tail_patch(patcher, tops, [3, 10], draws=3)
    assert (small.lift > 0).all() and (large.lift > 0).all()
    assert small.attributed.mean() > large.attributed.mean()  # the very best help most
    assert small.to_record("mine", TailPatchOptions(), seed=0)["lift"]["low"] > 0
    drawn = random_chunks(task.n_chunks, 3, 3, seed=task.seed, name="tail-patch random")
    assert small.random == pytest.approx(
        np.mean([patcher.change(rows, range(len(queries))) for rows in drawn], axis=0), abs=1e-9
    )
    reverse, *_ = measure_tail_patch(patcher, np.argsort(alone, axis=0)[:3].T, [3], draws=3)
    assert (reverse.lift < 0).all()
