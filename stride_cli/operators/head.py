"""The one pass through the output head: blocks of logits, labels true or drawn, what the loss says to them.

Logits are as large as everything else of a batch together, so rows go through the head in blocks, and of each
block only the stretch of positions that a scored token follows. A label's probability is next to 1 where the
model is sure, and 1 − p in float32 would be 0 there: gradients and losses are taken from the sum of all other
labels' probabilities instead, which keeps its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stride_cli.errors import NumericalError
from stride_cli.models.devices import total_bytes

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.models.protocol import AttributableModel

_BYTES = 64 << 20  # logits held at once (float32): alg:microbatch
_OF_DEVICE = 96  # the share of a device's memory that they may take, where that is more: 1/96


@dataclass(frozen=True)
class Labelled:
    """Losses of the labels of a block, and their residuals.

    Attributes
    ----------
    error : (b, s, V) float32     −∂(Σ ω loss)/∂logits = ω (onehot − p); lent until the context ends
    doubt : (b, s) float64        1 − p of the label; 0 where ω = 0
    surprise : (b, s) float64     −log p of the label; 0 where ω = 0
    """

    error: Tensor
    doubt: Tensor
    surprise: Tensor


@dataclass(frozen=True)
class HeadBlock:
    """Some rows of a batch on their way through the head.

    Attributes
    ----------
    rows : slice                  of the batch
    stretch : slice               positions whose states go through the head
    after : slice                 the positions that they predict, one further on
    state : (b, s, d)             a leaf of the graph where `head_blocks` tracks
    raw : (b, s, V)               logits, in the model's dtype; with their graph where it tracks
    values : (b, s, V) float32    the same, without
    weight : (b, s) float32       ω, what each predicted token counts
    """

    rows: slice
    stretch: slice
    after: slice
    state: Tensor
    raw: Tensor
    values: Tensor
    weight: Tensor
    _normaliser: Tensor  # (b, s) float64, log Σ exp
    _error: Tensor  # (b, s, V) −ω p; lent to `labelled`

    def draw(self, uniform: Tensor) -> Tensor:
        """Labels from the model's own distribution, by inverse CDF: (b, s) in [0, 1) → (b, s) int64."""
        cumulative = self._error.cumsum(dim=-1).neg_()  # up to the factor ω
        threshold = uniform.to(cumulative.dtype) * cumulative[..., -1]
        labels = torch.searchsorted(cumulative, threshold[..., None], right=True)[..., 0]
        return labels.clamp_max(self.values.shape[-1] - 1)

    def expected(self, factor: Tensor) -> Tensor:
        """Σ over positions of factor ω p: factor (b,) → (V,) float64."""
        return -torch.einsum("bsv,b->v", self._error, factor.to(self._error.dtype)).double()

    @contextmanager
    def labelled(self, labels: Tensor) -> Iterator[Labelled]:
        """Losses of labels (b, s); results of later calls take the same memory."""
        error, where = self._error, labels[..., None]
        own = error.gather(-1, where)
        # a label's own entry is the sum of the others
        doubt = -error.scatter_(-1, where, 0).sum(dim=-1)  # (b, s), ω (1 − p)
        error.scatter_(-1, where, doubt[..., None])
        log_p = self.values.gather(-1, where)[..., 0].double() - self._normaliser
        share = doubt.double() / torch.where(self.weight > 0, self.weight, 1).double()
        exact = torch.where(share < 0.5, -torch.log1p(-share.clamp_max(0.5)), -log_p)
        try:
            yield Labelled(error, share, exact)
        finally:
            error.scatter_(-1, where, own)


def block_bytes(device: torch.device) -> int:
    """Bytes that a block of float32 logits may take; more on a GPU, which small blocks leave idle."""
    return max(_BYTES, total_bytes(device) // _OF_DEVICE)


def head_blocks(
    model: AttributableModel,
    final: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    tracked: bool,
    around: Callable[[slice, slice], AbstractContextManager[object]] = lambda rows, after: nullcontext(),
) -> Iterator[HeadBlock]:
    """Send a batch through the head, block after block.

    Parameters
    ----------
    final : (B, T, d)             normed states before the head; their graph is not entered
    ids : (B, T) int64
    weights : (B, T) float32      ω: what each token counts as a label; a row's first is nothing's label
    tracked : bool                whether `raw` is to have a graph that begins at `state`
    around : callable, optional   (rows, after) → a context to be in while the head runs
    """
    n_rows, length = ids.shape
    at_once = max(1, block_bytes(final.device) // (4 * model.vocab_size * max(1, length)))
    for start in range(0, n_rows, at_once):
        rows = slice(start, min(start + at_once, n_rows))
        columns = torch.nonzero(weights[rows, 1:].sum(dim=0)).flatten()
        first, last = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)
        stretch, after = slice(first, last), slice(first + 1, last + 1)
        state = final.detach()[rows, stretch].contiguous().requires_grad_(tracked)  # one product, not b
        with torch.set_grad_enabled(tracked), around(rows, after):
            raw = model.logits(state)
        values = raw.detach().float()
        weight = weights[rows, after]
        # p in one pass over the logits, and log Σ exp from the largest: log p = v − log Σ exp
        error = values.softmax(dim=-1)
        normaliser = values.amax(dim=-1).double() - error.amax(dim=-1).double().log()
        error.mul_(-weight[..., None])
        yield HeadBlock(rows, stretch, after, state, raw, values, weight, normaliser, error)


def check_finite(loss: Tensor, batch: Batch) -> None:
    """Refuse losses (B,) that are not finite.

    Raises
    ------
    NumericalError      names the first row whose loss is not finite
    """
    bad = torch.nonzero(~torch.isfinite(loss)).flatten()
    if len(bad):
        raise NumericalError(
            f"the model's loss on row {int(batch.rows[int(bad[0])])} is not finite "
            f"(expected a number, found {float(loss[bad[0]])})",
            fix="check the checkpoint (stride model info MODEL), or run with --dtype fp32",
        )


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def seeded(output: Tensor, gradient: Tensor) -> Tensor:
    """A number whose gradient in `output` is `gradient`, of the same shape; zero, to be differentiated.

    What `torch.autograd.grad` does with ``grad_outputs``, which has it import sympy, a third of a second.
    """
    with torch.enable_grad():
        number: Tensor = _Seeded.apply(output, gradient)
    return number
