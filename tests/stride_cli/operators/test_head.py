"""The pass through the head against float64: errors, doubts and losses, however sure the model is."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.operators import head
from stride_cli.operators.head import head_blocks

WIDTH = 6


@dataclass
class Linear:
    """A head alone."""

    weight: torch.Tensor  # (V, WIDTH)

    @property
    def vocab_size(self) -> int:
        return len(self.weight)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return state @ self.weight.T


def some(seed: int, rows: int, length: int, sure: float, vocabulary: int = 11):
    random = torch.Generator().manual_seed(seed)
    model = Linear(sure * torch.randn(vocabulary, WIDTH, generator=random))
    final = torch.randn(rows, length, WIDTH, generator=random)
    ids = torch.randint(0, vocabulary, (rows, length), generator=random)
    weights = torch.rand(rows, length, generator=random) * (torch.rand(rows, length, generator=random) < 0.6)
    weights[:, 0] = 0
    return model, final, ids, weights


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 4),
    st.integers(2, 7),
    st.sampled_from([0.1, 1.0, 8.0, 40.0]),
    st.sampled_from([1, 600, 1 << 28]),
)
def test_errors_doubts_and_losses(seed: int, rows: int, length: int, sure: float, held: int) -> None:
    model, final, ids, weights = some(seed, rows, length, sure)
    # labels that the model is sure of, as well as others
    ids[:, 1:] = torch.where(
        torch.arange(length - 1) % 2 == 0, model.logits(final)[:, :-1].argmax(-1), ids[:, 1:]
    )
    logits, labels, weight = model.logits(final).double()[:, :-1], ids[:, 1:, None], weights[:, 1:].double()
    # float64, and 1 − p from the others there too
    others = logits.scatter(-1, labels, float("-inf")).logsumexp(-1)
    doubts = torch.exp(others - logits.logsumexp(-1))
    own = logits.gather(-1, labels)[..., 0]
    losses = torch.where(others < own, torch.log1p(torch.exp(others - own)), logits.logsumexp(-1) - own)
    losses, doubts = losses * weight, doubts * (weight > 0)
    errors = (-logits.softmax(-1) * weight[..., None]).scatter(-1, labels, (doubts * weight)[..., None])
    kept, head._BYTES = head._BYTES, held
    seen = torch.zeros(rows, length - 1, dtype=torch.bool)
    contexts: list[slice] = []

    @contextmanager
    def around(some_rows: slice, after: slice):
        contexts.append(after)
        yield

    try:
        for block in head_blocks(model, final, ids, weights, tracked=True, around=around):
            assert contexts[-1] == block.after and block.raw.requires_grad
            for _ in range(2):  # the second time as the first: memory is lent and given back
                with block.labelled(ids[block.rows, block.after]) as found:
                    at = (block.rows, block.stretch)
                    # logits are float32: what their rounding does to the smallest is not the pass's doing
                    rough = 4e-6 * max(1.0, float(logits.abs().max()))
                    torch.testing.assert_close(found.error.double(), errors[at], rtol=rough, atol=1e-30)
                    torch.testing.assert_close(found.doubt, doubts[at], rtol=rough, atol=1e-30)
                    mine = found.surprise * block.weight
                    torch.testing.assert_close(mine, losses[at], rtol=rough, atol=1e-30)
            seen[block.rows, block.stretch] = True
    finally:
        head._BYTES = kept
    assert seen[weights[:, 1:] > 0].all()


def test_labels_are_drawn_as_the_model_predicts() -> None:
    model, final, ids, _ = some(3, 1, 2, 1.0)
    weights = torch.tensor([[0.0, 0.25]])
    (block,) = head_blocks(model, final, ids, weights, tracked=False)
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = torch.cat([block.draw(u.view(1, 1)) for u in uniform]).flatten()
    shares = torch.bincount(drawn, minlength=11) / 4000
    expected = model.logits(final)[0, 0].softmax(-1)
    torch.testing.assert_close(shares, expected, atol=3e-4, rtol=0)
    torch.testing.assert_close(block.expected(torch.tensor([4.0])), expected.double(), atol=1e-6, rtol=0)


def test_a_label_without_probability_is_never_drawn() -> None:
    """Uniforms are in [0, 1): at 0 itself the first label that can come, not the first of the vocabulary."""
    model = Linear(torch.zeros(4, WIDTH))
    model.weight[:, 0] = torch.tensor([-300.0, 0.0, 0.0, -300.0])
    final = torch.ones(1, 2, WIDTH)
    weights = torch.tensor([[0.0, 1.0]])
    (block,) = head_blocks(model, final, torch.zeros(1, 2, dtype=torch.int64), weights, tracked=False)
    drawn = [int(block.draw(torch.full((1, 1), u, dtype=torch.float64))) for u in (0.0, 0.4999, 0.5, 0.9999)]
    assert drawn == [1, 1, 2, 2]
