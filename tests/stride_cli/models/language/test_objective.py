"""The block-wise loss and its gradient are the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.objective import (
    cross_entropy,
    head_logits,
    next_token_loss,
    soft_cap,
    token_losses,
    uncapped_logits,
)
from stride_cli.training.epoch_batches import make_batch


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("n", [1, 255, 256, 700])  # around the size of a row block
def test_values_and_gradients(n: int, cap: float | None) -> None:
    """Of each row's loss, and of their mean, which is differentiated in the weight too."""
    generator = torch.Generator().manual_seed(n)
    final = torch.randn(n, 12, generator=generator, requires_grad=True)
    weight = torch.randn(40, 12, generator=generator, requires_grad=True)
    targets = torch.randint(0, 40, (n,), generator=generator)
    upstream = torch.randn(n, generator=generator)
    logits = final @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    plain = functional.cross_entropy(logits, targets, reduction="none")
    ours = token_losses(final, weight.detach(), targets, soft_cap=cap)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    mean = cross_entropy(final, weight, targets, soft_cap=cap)
    torch.testing.assert_close(mean, plain.mean(), rtol=1e-5, atol=0)
    wanted = torch.autograd.grad(3 * plain.mean(), (final, weight), retain_graph=True)
    wanted += torch.autograd.grad(plain, final, upstream)
    found = torch.autograd.grad(3 * mean, (final, weight)) + torch.autograd.grad(ours, final, upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(final, weight, targets, soft_cap=cap), plain)


@pytest.mark.parametrize("name", ["NanoChat", "Llama", "GPT2", "Granite", "Cohere", "OPT"])
def test_logits_of_some_tokens_are_those_of_all(name: str, make_model: Callable[..., Any]) -> None:
    model = make_model(name)
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(2, 3, model.get_output_embeddings().weight.shape[1], generator=generator)
    tokens = torch.randint(0, model.config.vocab_size, (2, 3, 5), generator=generator)
    with torch.no_grad():
        found = soft_cap(model, uncapped_logits(model, final, tokens))
        torch.testing.assert_close(found, head_logits(model, final).gather(-1, tokens))


@pytest.mark.parametrize("name", ["NanoChat", "Llama", "GPT2", "Granite", "Cohere", "OPT"])
def test_loss_of_a_batch_counts_scored_tokens_only(name: str, make_model: Callable[..., Any]) -> None:
    import numpy as np

    model = make_model(name).eval()
    random = np.random.default_rng(0)
    chunks = [
        Chunk(random.integers(0, 97, 9).astype(np.int32), 1, None),
        Chunk(random.integers(0, 97, 6).astype(np.int32), 4, None),
        Chunk(random.integers(0, 97, 7).astype(np.int32), 2, np.array([0, 0, 1, 0, 0, 1, 1], np.uint8)),
    ]
    losses = []
    with torch.no_grad():
        found = float(next_token_loss(model, make_batch(chunks, torch.device("cpu"))))
        for chunk in chunks:  # one by one, unpadded, position by position
            ids = torch.from_numpy(chunk.tokens.astype(np.int64))
            logits = model(ids[None]).logits[0].log_softmax(-1)
            scored = (
                chunk.loss_mask.astype(bool)
                if chunk.loss_mask is not None
                else np.arange(len(ids)) >= chunk.loss_start
            )
            losses += [-float(logits[t - 1, ids[t]]) for t in range(1, len(ids)) if scored[t]]
    assert len(losses) == 8 + 2 + 3
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)
