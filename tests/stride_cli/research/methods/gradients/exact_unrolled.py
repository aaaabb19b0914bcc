"""A fine-tuning replayed step by step and differentiated backwards: the reference for `unrolled`.

AdamW, clipping, schedule and all: how a query's loss after training changes with the weight of each chunk in
each batch, exact to first order, with no curvature assumed and nothing projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.research.methods.gradients.unrolled import differentiated, flat, losses, put
from stride_cli.training.epoch_batches import Batch, as_read, make_batch
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import make_optimizers, planned_steps

_BETAS, _EPS = (0.9, 0.95), 1e-8  # as `make_optimizers` has them; checked


@dataclass(frozen=True)
class Step:
    """One step of a training, as it was taken.

    Attributes
    ----------
    chunks : (B,) int64         of its batch
    epoch : int
    rate : float                of Adam
    weights, first, second : (P,)      parameters and moments before it
    gradient : (P,)             as clipped
    clipped : float             by this factor
    """

    chunks: np.ndarray
    epoch: int
    rate: float
    weights: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    clipped: float


class Unrolled:
    """A training, and its derivative.

    Parameters
    ----------
    chunks : sequence of Chunk      all n
    recipe : Recipe                 of a fine-tuning
    members : (m,) int64            the chunks to train on
    counts : (n,) float, optional   how much each counts in the mean loss of its batch; default: 1
    """

    def __init__(
        self, chunks: Sequence[Chunk], recipe: Recipe, members: np.ndarray, counts: np.ndarray | None = None
    ) -> None:
        self._chunks, self._recipe = chunks, recipe
        self._counts = torch.ones(len(chunks)) if counts is None else torch.from_numpy(counts).float()
        self._model = initial_model(recipe).eval()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        for optimizer in make_optimizers(self._model, recipe):
            for group in optimizer.param_groups:
                assert (group["betas"], group["eps"], group["weight_decay"]) == (_BETAS, _EPS, 0.0)
        self.steps = list(self._train(members))

    def _train(self, members: np.ndarray) -> Iterator[Step]:
        recipe = self._recipe
        weights = flat(self._parameters)
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        _, plan = planned_steps(self._chunks, recipe, subset=members)
        for number, (chunks, epoch, share) in enumerate(plan, 1):
            put(weights, self._parameters)
            losses, places = self._losses(self._batch(chunks, epoch))
            counts = self._counts[chunks][places]
            gradient = self._derivative((counts * losses).sum() / counts.sum())
            clipped = min(1.0, recipe.clip / (float(gradient.norm()) + 1e-6))
            step = Step(
                chunks, epoch, recipe.adam_lr * share, weights, first, second, gradient * clipped, clipped
            )
            first, second, moved, spread = self._moved(step, number)
            weights = weights - step.rate * moved / (spread + _EPS)
            yield step
        self._last = weights

    @staticmethod
    def _moved(step: Step, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Adam's moments after a step, m and v, and as they count, m̂ and √v̂."""
        first = _BETAS[0] * step.first + (1 - _BETAS[0]) * step.gradient
        second = _BETAS[1] * step.second + (1 - _BETAS[1]) * step.gradient.square()
        moved, spread = first / (1 - _BETAS[0] ** number), (second / (1 - _BETAS[1] ** number)).sqrt()
        return first, second, moved, spread

    def losses(self, queries: list[Batch]) -> list[float]:
        """Of the trained model, mean nats per scored token."""
        put(self._last, self._parameters)
        return [float(self._losses(query)[0].detach().mean()) for query in queries]

    def influences(self, queries: list[Batch], n_chunks: int) -> np.ndarray:
        """−∂loss(query)/∂weight(chunk) of the training, (Q, n) float64; 0 for chunks that it did not see."""
        found = np.zeros((len(queries), n_chunks))
        put(self._last, self._parameters)
        # ∂loss/∂θ after the last step, and ∂loss/∂ Adam's m and v, which the loss does not see by itself
        of_weights = torch.stack([self._derivative(self._losses(query)[0].mean()) for query in queries])
        of_first, of_second = torch.zeros_like(of_weights), torch.zeros_like(of_weights)
        with sdpa_kernel(SDPBackend.MATH):
            for number in range(len(self.steps), 0, -1):
                step = self.steps[number - 1]
                _, _, moved, spread = self._moved(step, number)
                wide = spread + _EPS
                # θ' = θ − η m̂ / (√v̂ + ε)
                of_first -= step.rate * of_weights / wide / (1 - _BETAS[0] ** number)
                slope = step.rate * moved / (2 * spread * wide.square()) / (1 - _BETAS[1] ** number)
                of_second += of_weights * torch.where(spread > 0, slope, 0.0)
                # m' = β₁ m + (1 − β₁) g,   v' = β₂ v + (1 − β₂) g²
                pulled = (1 - _BETAS[0]) * of_first + 2 * (1 - _BETAS[1]) * step.gradient * of_second
                of_first, of_second = _BETAS[0] * of_first, _BETAS[1] * of_second
                if step.clipped < 1:  # g = c g° / |g°|
                    along = (pulled @ step.gradient) / self._recipe.clip**2
                    pulled = step.clipped * (pulled - along[:, None] * step.gradient)
                self._through(step, pulled, of_weights, found)
        return -found

    def _through(self, step: Step, pulled: Tensor, of_weights: Tensor, found: np.ndarray) -> None:
        """Through g°(θ, w) of a step, the gradient of the weighted mean loss of its batch: adds
        ⟨pulled, ∂g°/∂θ⟩ to `of_weights` and ⟨pulled, ∂g°/∂w⟩ to the chunks' columns of `found`."""
        put(step.weights, self._parameters)
        own = self._counts[step.chunks].requires_grad_()
        losses, places = self._losses(self._batch(step.chunks, step.epoch))
        share = own[places]
        loss = (share * losses).sum() / share.sum()
        _, products = differentiated(loss, self._parameters, [*self._parameters, own])
        for query, vector in enumerate(pulled):
            *weights, chunks = products(vector)
            of_weights[query] += flat(weights)
            np.add.at(found[query], step.chunks, chunks.numpy())

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of every scored token: its loss, and the row that it is in; differentiable twice."""
        return losses(self._model, batch), batch.rows // batch.ids.shape[1]

    def _derivative(self, loss: Tensor) -> Tensor:
        return flat(torch.autograd.grad(loss, self._parameters, materialize_grads=True))

    def _batch(self, chunks: np.ndarray, epoch: int) -> Batch:
        return make_batch(as_read(self._chunks, chunks, self._recipe, epoch), torch.device("cpu"))
