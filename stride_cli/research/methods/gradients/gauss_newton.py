"""Exact products with the Gauss–Newton matrix of a corpus, and the conjugate gradients that solve with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.output import progress
from stride_cli.research.methods.gradients.capture import Layer, layer_sizes
from stride_cli.research.methods.gradients.passes import Passes
from stride_cli.research.methods.gradients.unrolled import differentiated, flat


def gauss_newton(passes: Passes, chunks: ChunkReader, vectors: Tensor) -> Tensor:
    """Multiply with Σ_i J_iᵀ H_i J_i / n over the chunks, of all chosen layers together, in one pass.

    J are the derivatives of a chunk's logits, H is the Hessian of its loss in them.

    Parameters
    ----------
    vectors : (Q, P) float32      the layers' matrices one after the other

    Returns
    -------
    (Q, P) float32
    """
    found = torch.zeros_like(vectors)
    with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
        for batch in chunks.batches(passes.batch_tokens):
            with moved(passes.capture.layers, vectors.device) as changes:
                logits, weights = scored_logits(passes, batch)
                pull = torch.zeros_like(logits, requires_grad=True)
                # ⟨v, ∂⟨pull, logits⟩⟩ is linear in pull: its derivative there is J v
                _, derivative = differentiated((pull * logits).sum(), changes, [pull])
                p = logits.detach().softmax(-1)
                for query, vector in enumerate(vectors):
                    (along,) = derivative(vector)
                    curved = weights * p * (along - (p * along).sum(-1, keepdim=True))
                    found[query] += flat(torch.autograd.grad(logits, changes, curved, retain_graph=True))
    return found / chunks.n_chunks


def scored_logits(passes: Passes, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute the logits of a batch's scored tokens, (N, V), and what each token counts, (N, 1)."""
    model = passes.capture.model
    ids, weights = batch.ids.to(model.device), batch.weights.to(model.device)[:, 1:]
    if passes.reduction == "mean":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(1)
    rows, columns = torch.nonzero(weights, as_tuple=True)
    with torch.enable_grad():
        final = model.continue_from(model.hidden(ids, 0), 0)
        return model.logits(final[rows, columns]).float(), weights[rows, columns, None]


@contextmanager
def moved(layers: Sequence[Layer], device: torch.device) -> Iterator[list[Tensor]]:
    """Add a change to every layer's matrix, (n_out, n_in) zeros that can be differentiated in."""
    changes = [torch.zeros(each.n_out, each.n_in, device=device, requires_grad=True) for each in layers]
    with ExitStack() as hooks:
        for layer, change in zip(layers, changes, strict=True):
            hooks.callback(layer.module.register_forward_hook(partial(_add, change)).remove)
        yield changes


def _add(change: Tensor, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add to a layer's output what a change of its matrix does, whose last column may be the bias."""
    n_in = (layer_sizes(module) or (0, 0))[0]
    weight = change[:, :n_in].to(output.dtype)
    bias = change[:, n_in].to(output.dtype) if change.shape[1] > n_in else None
    if isinstance(module, nn.Embedding):
        return output + functional.embedding(args[0], weight.T)
    if isinstance(module, nn.Conv2d):
        plain: Any = functional.conv2d
        settings = module.stride, module.padding, module.dilation
        return output + plain(args[0], weight.view_as(module.weight), bias, *settings)
    return output + functional.linear(args[0], weight, bias)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], right: Tensor, steps: int
) -> Tensor:
    """Solve for every row (Q, P) from zero, in so many steps.

    Parameters
    ----------
    product : of a positive definite matrix
    precondition : multiplies by about its inverse
    """
    found, left = torch.zeros_like(right), right.clone()
    ahead = precondition(left)
    size = (left * ahead).sum(1, keepdim=True)
    with progress("conjugate gradients", steps, unit="steps") as ticker:
        for _ in range(steps):
            curved = product(ahead)
            step = _ratio(size, (ahead * curved).sum(1, keepdim=True))
            found += step * ahead
            left -= step * curved
            way = precondition(left)
            before, size = size, (left * way).sum(1, keepdim=True)
            ahead = way + _ratio(size, before) * ahead
            ticker.advance()
    return found


def as_rows(matrices: dict[int, Tensor]) -> Tensor:
    """Join the matrices of all layers, (Q, n_out, n_in) each, in the layers' order: (Q, P)."""
    return torch.cat([matrices[layer].flatten(1) for layer in range(len(matrices))], dim=1)


def as_matrices(rows: Tensor, layers: Sequence[Layer]) -> dict[int, Tensor]:
    """Split rows (Q, P) into the layers' matrices: the inverse of `as_rows`."""
    parts = rows.split([layer.size for layer in layers], dim=1)
    shapes = [(layer.n_out, layer.n_in) for layer in layers]
    return {n: part.unflatten(1, shape) for n, (part, shape) in enumerate(zip(parts, shapes, strict=True))}


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    return torch.where(under > 0, over / under, 0.0)  # nothing is left of a row that is solved
