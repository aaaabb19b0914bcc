"""Train many small NanoChat models at once, each as `language_loop.train` would.

Small models on a CPU spend little of their time in matrix products: most goes into calls, temporary memory
and elementwise passes. So forward and backward pass are written out here for this one architecture, with
everything between the products done by compiled kernels in one pass each, and softmax instead of flash
attention, whose backward pass is slow on CPUs for short sequences. Activations of one model at a time stay in
cache; parameters and optimizer states are stacked: AdamW runs once for all models, Muon's Newton–Schulz
iterations once for all matrices of a model (for all models together they were no faster).

Each model sees exactly the batches, passes and rates that `train` would give it; results agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import NumericalError
from stride_cli.models.language.language_recipe import Architecture, Recipe
from stride_cli.models.language.nanochat import LOGIT_CAP, RMS_EPS, ROPE_THETA
from stride_cli.models.muon import orthogonalised
from stride_cli.research.training import nanochat_kernels as kernels
from stride_cli.training.epoch_batches import Batch, as_read, make_batch
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import planned_steps

_ROWS = 256  # of logits at once: they stay in cache
_BETAS = (0.9, 0.95)  # of AdamW, as in `train`
_ADAM_EPS = 1e-8
_MOMENTUM = 0.95  # of Muon
_LAYER = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "up": ("fc1",), "down": ("fc2",)}


@torch.no_grad()
def train_stacked(
    chunks: Sequence[Any], recipe: Recipe, masks: Sequence[np.ndarray], seeds: Sequence[int]
) -> list[Any]:
    """Train one model per mask and seed.

    Parameters
    ----------
    chunks : sequence of Chunk        all n
    recipe : Recipe                   of a NanoChat trained from scratch
    masks : sequence of (n,) bool     model m is trained on these chunks
    seeds : sequence of int           of its initial weights and order

    Returns
    -------
    list of NanoChatForCausalLM, in eval mode, in order

    Raises
    ------
    CorpusError         a subset has no scored token
    NumericalError      a loss is not finite
    """
    assert recipe.architecture is not None
    recipes = [recipe.with_seed(seed) for seed in seeds]
    plans = [planned_steps(chunks, r, subset=mask) for r, mask in zip(recipes, masks, strict=True)]
    models = [initial_model(r) for r in recipes]
    # longest first: those that are still training are always the first rows of every stack
    order = sorted(range(len(models)), key=lambda m: -plans[m][0])
    stack = _Stack(recipe, [models[m] for m in order])
    totals = [plans[m][0] for m in order]
    steps: list[Iterator[tuple[np.ndarray, int, float]]] = [plans[m][1] for m in order]
    step = _Step(recipe)
    for number in range(totals[0]):
        active = sum(total > number for total in totals)
        rates = []
        for place in range(active):
            batch, epoch, rate = next(steps[place])
            rates.append(rate)
            read = as_read(chunks, batch, recipes[order[place]], epoch)
            loss = step.run(stack, place, make_batch(read, torch.device("cpu")))
            if not math.isfinite(loss):
                raise NumericalError(
                    f"the training loss is {loss} at step {number + 1} of {totals[place]}",
                    fix="train the base model with a lower --lr, and build the index again",
                )
        stack.update(torch.tensor(rates), number + 1)
    for place, m in enumerate(order):
        stack.write_back(place, models[m].eval())
    return models


class _Stack:
    """Parameters, gradients and optimizer states of M models, one tensor each: attention (M, L, 4, d, d) as
    q, k, v, o; up (M, L, 4d, d); down (M, L, d, 4d); embedding and head (M, V, d)."""

    def __init__(self, recipe: Recipe, models: Sequence[Any]) -> None:
        self.recipe = recipe
        rows = [_parameters(model) for model in models]
        self.values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self.gradients = {name: torch.zeros_like(value) for name, value in self.values.items()}
        muon = recipe.optimizer == "muon+adamw"
        self.muon = ("attention", "up", "down") if muon else ()
        self.adam = tuple(name for name in self.values if name not in self.muon)
        self.first = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.second = {name: torch.zeros_like(self.values[name]) for name in self.adam}

    def update(self, rates: Tensor, number: int) -> None:
        """Step the optimizers of the first len(rates) models; gradients are zero afterwards."""
        if self.muon:
            self._update_muon(rates * self.recipe.lr)
        self._update_adam(rates * self.recipe.adam_lr, number)
        for gradient in self.gradients.values():
            gradient[: len(rates)].zero_()

    def _update_muon(self, rates: Tensor) -> None:
        active = len(rates)
        directions = {}
        for name in self.muon:
            gradient, momentum = self.gradients[name][:active], self.first[name][:active]
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            directions[name] = gradient.lerp(momentum, _MOMENTUM)
        # model by model: the same products in the same order, whatever it is trained beside
        for place in range(active):
            square = directions["attention"][place]
            square.copy_(orthogonalised(square.flatten(0, 1)).view_as(square))
            # the up matrices lie across: their transposes go together with the down matrices
            up, down = directions["up"][place], directions["down"][place]
            flat = orthogonalised(torch.cat([up.transpose(1, 2), down]))
            up.copy_(flat[: len(up)].transpose(1, 2))
            down.copy_(flat[len(up) :])
        for name, direction in directions.items():
            value = self.values[name][:active]
            ratio = math.sqrt(max(1.0, value.shape[-2] / value.shape[-1]))
            by_model = _expand(rates, value)
            if self.recipe.weight_decay:
                value.mul_(1 - by_model * self.recipe.weight_decay)
            value.addcmul_(direction, by_model * -ratio)

    def _update_adam(self, rates: Tensor, number: int) -> None:
        active = len(rates)
        gradients = {name: self.gradients[name][:active] for name in self.adam}
        if self.recipe.clip:
            squares = sum(g.flatten(1).norm(dim=1).square() for g in gradients.values())
            factor = (self.recipe.clip / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp_max(1.0)
            for gradient in gradients.values():
                gradient.mul_(_expand(factor, gradient))
        bias_first, bias_second = 1 - _BETAS[0] ** number, 1 - _BETAS[1] ** number
        for name, gradient in gradients.items():
            value, first, second = (t[name][:active] for t in (self.values, self.first, self.second))
            by_model = _expand(rates, value)
            if self.recipe.optimizer == "adamw" and self.recipe.weight_decay and name in _LAYER:
                value.mul_(1 - by_model * self.recipe.weight_decay)
            first.lerp_(gradient, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            scale = second.sqrt().div_(math.sqrt(bias_second)).add_(_ADAM_EPS)
            value.addcmul_(torch.div(first, scale, out=scale), by_model * (-1 / bias_first))

    def write_back(self, place: int, model: Any) -> None:
        """Put the weights of row `place` into a model."""
        model.model.embed_tokens.weight.copy_(self.values["embedding"][place])
        model.lm_head.weight.copy_(self.values["head"][place])
        for number, layer in enumerate(model.model.layers):
            for name, matrices in _layer_matrices(layer).items():
                found = self.values[name][place, number]
                for matrix, value in zip(matrices, found if name == "attention" else [found], strict=True):
                    matrix.copy_(value)


def _parameters(model: Any) -> dict[str, Tensor]:
    layers = [_layer_matrices(layer) for layer in model.model.layers]
    return {
        "attention": torch.stack([torch.stack(layer["attention"]) for layer in layers]),
        "up": torch.stack([layer["up"][0] for layer in layers]),
        "down": torch.stack([layer["down"][0] for layer in layers]),
        "embedding": model.model.embed_tokens.weight.detach().clone(),
        "head": model.lm_head.weight.detach().clone(),
    }


def _layer_matrices(layer: Any) -> dict[str, list[Tensor]]:
    return {
        name: [
            getattr(layer.self_attn if name == "attention" else layer.mlp, p).weight.detach() for p in parts
        ]
        for name, parts in _LAYER.items()
    }


def _expand(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


@dataclass
class _Saved:
    """Tensors that a layer's backward pass reads; low: in the precision of matrix products."""

    attention_in: Tensor  # (N, d) normed
    attention_low: Tensor
    attention_inverse: Tensor  # (N,) 1 / rms
    turned: Tensor  # (2, B, H, T, h) queries and keys after rotation and norm
    turned_inverse: Tensor
    qk: Tensor  # the same, low
    v: Tensor  # (B·H, T, h) low
    shares: Tensor  # (B·H, T, T) low
    mixed: Tensor  # (N, d) low
    mlp_in: Tensor
    mlp_low: Tensor
    mlp_inverse: Tensor
    active: Tensor  # (N, 4d) relu, low
    square: Tensor


class _Step:
    """Loss and gradients of one model on one batch."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.architecture is not None
        self.size: Architecture = recipe.architecture
        self.low = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
        self.eps, self.cap = np.float32(RMS_EPS), np.float32(LOGIT_CAP)
        self.h = self.size.width // self.size.heads
        frequency = 1.0 / (ROPE_THETA ** (torch.arange(0, self.h, 2, dtype=torch.float) / self.h))
        angles = torch.arange(self.size.context)[:, None].float() * frequency  # (T, h/2)
        self.cos, self.sin = angles.cos().numpy(), angles.sin().numpy()
        self.masks: dict[int, Tensor] = {}

    def run(self, stack: _Stack, place: int, batch: Batch) -> float:
        """Put the gradient of the batch's mean loss into row `place` of the stack; returns that loss."""
        values = {name: value[place] for name, value in stack.values.items()}
        gradients = {name: value[place] for name, value in stack.gradients.items()}
        shape = batch.ids.shape
        ids = batch.ids.flatten()
        weights = {name: values[name].to(self.low) for name in ("attention", "up", "down")}
        start, _, start_inverse = self._norm(values["embedding"][ids])
        x = start.clone()
        saved = []
        for layer in range(self.size.layers):
            matrices = weights["attention"][layer], weights["up"][layer], weights["down"][layer]
            saved.append(self._forward(x, shape, matrices))
        final, final_low, final_inverse = self._norm(x)
        loss, slope = self._loss(
            final_low.index_select(0, batch.rows), values["head"], batch.targets, gradients["head"]
        )
        upstream = torch.zeros_like(final_low).index_copy_(0, batch.rows, slope)
        dx = torch.zeros_like(final)
        low = self._norm_back(upstream, final, final_inverse, dx)
        for layer in reversed(range(self.size.layers)):
            matrices = weights["attention"][layer], weights["up"][layer], weights["down"][layer]
            slopes = tuple(gradients[name][layer] for name in ("attention", "up", "down"))
            low = self._backward(dx, low, shape, matrices, slopes, saved.pop())
        embedded = torch.zeros_like(dx)
        self._norm_back(dx, start, start_inverse, embedded)
        gradients["embedding"].index_add_(0, ids, embedded)
        return loss

    def _norm(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute x / rms(x), the same low, and 1 / rms(x)."""
        normed, inverse = torch.empty_like(x), torch.empty(len(x))
        low = normed if self.low == torch.float32 else torch.empty_like(x, dtype=self.low)
        kernels.norm_kernel(_array(x), self.eps, _array(normed), _array(low), _array(inverse))
        return normed, low, inverse

    def _norm_back(self, upstream: Tensor, normed: Tensor, inverse: Tensor, dx: Tensor) -> Tensor:
        """Add to dx the slope before a norm; returns dx low."""
        low = dx if self.low == torch.float32 else torch.empty_like(dx, dtype=self.low)
        kernels.norm_back_kernel(_array(upstream), _array(normed), _array(inverse), _array(dx), _array(low))
        return low

    def _forward(self, x: Tensor, shape: torch.Size, weights: tuple[Tensor, Tensor, Tensor]) -> _Saved:
        """Run one block: add to the residual stream `x` (N, d) in place."""
        (n_batch, length), heads, width, h = shape, self.size.heads, self.size.width, self.h
        attention, up, down = weights
        attention_in, attention_low, attention_inverse = self._norm(x)
        qkv = attention_low @ attention[:3].flatten(0, 1).T  # (N, 3d)
        turned = torch.empty(2, n_batch, heads, length, h)
        turned_inverse = torch.empty(turned.shape[:-1])
        qk = torch.empty_like(turned, dtype=self.low)
        v = torch.empty_like(qk[0])
        kernels.turn_kernel(
            _array(qkv.view(-1, 3, heads, h)), length, self.cos, self.sin, self.eps, _array(turned),
            _array(turned_inverse), _array(qk), _array(v),
        )  # fmt: skip
        q, k, v = (part.view(-1, length, h) for part in (qk[0], qk[1], v))
        shares = torch.softmax(torch.baddbmm(self._mask(length), q, k.transpose(1, 2), alpha=h**-0.5), -1)
        mixed = torch.bmm(shares, v).view(n_batch, heads, length, h).transpose(1, 2).reshape(-1, width)
        kernels.add_kernel(_array(x), _array(mixed @ attention[3].T))
        mlp_in, mlp_low, mlp_inverse = self._norm(x)
        active = mlp_low @ up.T
        square = torch.empty_like(active)
        kernels.square_kernel(_array(active), _array(square))
        kernels.add_kernel(_array(x), _array(square @ down.T))
        return _Saved(
            attention_in, attention_low, attention_inverse, turned, turned_inverse, qk, v, shares, mixed,
            mlp_in, mlp_low, mlp_inverse, active, square,
        )  # fmt: skip

    def _backward(
        self,
        dx: Tensor,
        low: Tensor,
        shape: torch.Size,
        weights: tuple[Tensor, Tensor, Tensor],
        gradients: tuple[Tensor, ...],
        saved: _Saved,
    ) -> Tensor:
        """Turn the slope `dx` (N, d) behind a block into the one before it, in place; `low` and the result
        are dx low."""
        (n_batch, length), heads, width, h = shape, self.size.heads, self.size.width, self.h
        attention, up, down = weights
        gradients[2].copy_(low.T @ saved.square)
        inner = low @ down
        kernels.square_back_kernel(_array(inner), _array(saved.active))
        gradients[1].copy_(inner.T @ saved.mlp_low)
        low = self._norm_back(inner @ up, saved.mlp_in, saved.mlp_inverse, dx)
        gradients[0][3].copy_(low.T @ saved.mixed)
        mixed = (low @ attention[3]).view(n_batch, length, heads, h).transpose(1, 2)
        mixed = mixed.reshape(-1, length, h)
        q, k = (part.view(-1, length, h) for part in saved.qk)
        shares = torch.bmm(mixed, saved.v.transpose(1, 2))
        scores = torch.ops.aten._softmax_backward_data(shares, saved.shares, -1, self.low)
        by_head = (n_batch, heads, length, h)
        dq = torch.bmm(scores, k).view(by_head)
        dk = torch.bmm(scores.transpose(1, 2), q).view(by_head)
        dv = torch.bmm(saved.shares.transpose(1, 2), mixed).view(by_head)
        dqkv = torch.empty(n_batch * length, 3, heads, h, dtype=self.low)
        kernels.turn_back_kernel(
            _array(dq), _array(dk), _array(dv), length, self.cos, self.sin, np.float32(h**-0.5),
            _array(saved.turned), _array(saved.turned_inverse), _array(dqkv),
        )  # fmt: skip
        flat = dqkv.view(-1, 3 * width)
        gradients[0][:3].view(3 * width, width).copy_(flat.T @ saved.attention_low)
        inward = flat @ attention[:3].flatten(0, 1)
        return self._norm_back(inward, saved.attention_in, saved.attention_inverse, dx)

    def _mask(self, length: int) -> Tensor:
        if length not in self.masks:
            self.masks[length] = torch.full((length, length), -math.inf, dtype=self.low).triu_(1)
        return self.masks[length]

    def _loss(self, final: Tensor, head: Tensor, targets: Tensor, gradient: Tensor) -> tuple[float, Tensor]:
        """Compute the mean cross entropy under the soft cap, and its slope in `final` (N, d) low; add to
        `gradient`."""
        n = len(targets)
        weight = head.to(self.low)
        slope = torch.empty_like(final)
        total = 0.0
        for first in range(0, n, _ROWS):
            block, wanted = final[first : first + _ROWS], targets[first : first + _ROWS]
            z = block @ weight.T  # (R, V)
            total += kernels.loss_kernel(_array(z), _array(wanted), self.cap, np.float32(1 / n))
            torch.mm(z, weight, out=slope[first : first + _ROWS])
            gradient += z.T @ block
        return total / n, slope


def _array(tensor: Tensor) -> np.ndarray:
    """Return the tensor's own memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
