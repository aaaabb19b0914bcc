"""The warm-up of LESS: a LoRA adapter trained on a part of the corpus, and Adam's moments along its way
(Xia et al. 2024, arXiv:2402.04333)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import CorpusError, UsageError
from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.capture import Capture, Factors, Layer
from stride_cli.research.methods.gradients.projection import Projector

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.models.language.language_recipe import Recipe

_SCALE = 4.0  # α/r of the publication: 512/128


@dataclass(frozen=True)
class Moments:
    """Adam's state, for its next update.

    Attributes
    ----------
    first, second : list of (n_out, n_in) float32     running means of gradients and of their squares
    betas : (β₁, β₂)
    steps : int                steps that made them
    """

    first: Sequence[Tensor]
    second: Sequence[Tensor]
    betas: tuple[float, float]
    steps: int


class AdamUpdates:
    """A projector of Adam's updates instead of gradients: m̂ / (√v̂ + ε) after one more step, with m̂ and v̂ the
    moments without the bias of their start."""

    def __init__(self, inner: Projector, moments: Moments, epsilon: float = 1e-8) -> None:
        self.inner, self.width, self.spans = inner, inner.width, inner.spans
        self._moments, self._epsilon = moments, epsilon

    def add(self, found: Factors, target: Tensor) -> None:
        for block in found.blocks():
            self.add_matrices(found.layer, block.rows, block.gradients(), target)

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        moments = self._moments
        (beta1, beta2), steps = moments.betas, moments.steps
        first = beta1 * moments.first[layer] + (1 - beta1) * matrices
        second = beta2 * moments.second[layer] + (1 - beta2) * matrices.square()
        first /= 1 - beta1 ** (steps + 1)
        second /= 1 - beta2 ** (steps + 1)
        self.inner.add_matrices(layer, rows, first / (second.sqrt() + self._epsilon), target)


class LowRank:
    """A projector of the gradients of LoRA's matrices, from those of the layers that they are on.

    Of W + s B A and the gradient G of W, that of A is s Bᵀ G and that of B is s G Aᵀ. Matrices 2l and 2l + 1
    of the inner projector are A and B of layer l.
    """

    def __init__(self, inner: Projector, layers: Sequence[Layer]) -> None:
        self.inner, self.width, self.spans = inner, inner.width, inner.spans
        self._layers = layers

    def add(self, found: Factors, target: Tensor) -> None:
        a, b, scale = _parts(self._layers[found.layer])
        scaled = scale * found.outputs
        of_a = replace(found, layer=2 * found.layer, outputs=scaled @ b)
        of_b = replace(found, layer=2 * found.layer + 1, inputs=found.inputs @ a.T, outputs=scaled)
        self.inner.add(of_a, target)
        self.inner.add(of_b, target)

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        a, b, scale = _parts(self._layers[layer])
        self.inner.add_matrices(2 * layer, rows, scale * (b.T @ matrices), target)
        self.inner.add_matrices(2 * layer + 1, rows, scale * (matrices @ a.T), target)


def _parts(layer: Layer) -> tuple[Tensor, Tensor, float]:
    """Give A (rank, n_in), B (n_out, rank) and α/r of an adapted layer."""
    module: Any = layer.module
    return module.lora_a, module.lora_b, module.lora_scale


@dataclass(frozen=True)
class _Point:
    """One of the warm-up's checkpoints: the adapter, Adam's moments, and the epoch's mean learning rate."""

    weights: list[Tensor]
    moments: Moments
    rate: float


class Warmup:
    """A LoRA adapter on a copy of a model, and where its training came along.

    Attributes
    ----------
    capture : Capture            of the layers that have matrices
    rank : int
    rates : list of float        mean learning rate of every epoch
    """

    def __init__(self, capture: Capture, rank: int) -> None:
        self.capture, self.rank = capture, rank
        self._points: list[_Point] = []

    @property
    def rates(self) -> list[float]:
        return [point.rate for point in self._points]

    @property
    def parameters(self) -> list[Tensor]:
        """A and B of every layer."""
        return [part for layer in self.capture.layers for part in _parts(layer)[:2]]

    @torch.no_grad()
    def at(self, number: int) -> Moments:
        """Put the adapter of a checkpoint into the model; return its moments."""
        point = self._points[number]
        for parameter, weight in zip(self.parameters, point.weights, strict=True):
            parameter.copy_(weight)
        device = self.capture.model.device
        moments = point.moments
        return replace(
            moments,
            first=[each.to(device) for each in moments.first],
            second=[each.to(device) for each in moments.second],
        )

    @property
    def matrices(self) -> list[Layer]:
        """A and B of every layer, as a projector of their gradients takes them."""
        return [
            part
            for layer in self.capture.layers
            for part in (replace(layer, n_out=self.rank), replace(layer, n_in=self.rank))
        ]

    def keep(self, optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
        """Remember the adapter and the moments as they are now, on the CPU."""
        states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
        found = [states[parameter] for parameter in self.parameters]
        beta1, beta2 = optimizers[0].param_groups[0]["betas"]
        moments = Moments(
            [state["exp_avg"].detach().cpu().clone() for state in found],
            [state["exp_avg_sq"].detach().cpu().clone() for state in found],
            (beta1, beta2),
            int(found[0]["step"]),
        )
        weights = [parameter.detach().cpu().clone() for parameter in self.parameters]
        self._points.append(_Point(weights, moments, rate))


def warm_up(
    workspace: Workspace, *, share: float, epochs: int, rank: int, lr: float | None, layers: str | None
) -> Warmup:
    """Train a LoRA adapter on a random part of the corpus and keep it after every epoch.

    It starts from the model that the task's was fine-tuned from, as the recipe names it; of a model that was
    trained from scratch, or whose recipe is not known, from the model itself: low-rank changes of random
    weights learn nothing that gradients could be compared in. Training is that of `stride model finetune`.

    Parameters
    ----------
    share : float            of the chunks
    epochs : int
    rank : int               of the matrices; α = 4 rank
    lr : float, optional     peak rate; default: that of `stride model finetune --lora`
    layers : str, optional   as for `Capture`; default: those of attention, or of the body where none has
                             such a name

    Raises
    ------
    UsageError       no layer is chosen
    CorpusError      no chunk has a scored token
    ModelError       the base model is gone, or is another one by now
    NumericalError   the loss is not finite
    """
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.models.language.language_recipe import read_recipe
    from stride_cli.models.language.lora import add_lora
    from stride_cli.output import progress
    from stride_cli.training.finetuning import finetuning_recipe
    from stride_cli.training.language_loop import choose_dtype, make_optimizers, planned_steps, train
    from stride_cli.training.language_trainer import index_chunks
    from stride_cli.training.options import FinetuneOptions

    task = workspace.model
    found = None if task.path is None else read_recipe(task.path)
    model = CausalLM(_start(workspace, found).to(task.device))
    capture = _capture(model, workspace, layers)
    adapted = [each.module for each in capture.layers]
    add_lora(model.model, rank=rank, seed=workspace.seed, layers=adapted, scale=_SCALE)
    chunks = index_chunks(workspace)
    scored = np.array([place for place, chunk in enumerate(chunks) if chunk.n_scored], np.int64)
    if not len(scored):
        raise CorpusError(
            "no chunk has a scored token to warm up on", fix="choose another method: pairs, tfidf"
        )
    options = FinetuneOptions(
        epochs=epochs,
        lora_rank=rank,
        lr=lr,
        seed=workspace.seed,
        batch_tokens=None if found is None else found.batch_tokens,
    )
    recipe = finetuning_recipe(
        chunks,
        options,
        task.n_parameters,
        block_size=max(len(chunk.tokens) for chunk in chunks),
        dtype=choose_dtype("auto", task.device),
    )
    random = stream(workspace.seed, "less warm-up")
    size = max(1, round(share * len(scored)))
    rows = np.sort(random.permutation(scored)[:size])
    total, planned = planned_steps(chunks, recipe, subset=rows)
    rates: dict[int, list[float]] = {}  # of every epoch; steps that rounding leaves over are of the last one
    ends: dict[int, int] = {}
    for step, (_, epoch, rate) in enumerate(planned, 1):
        rates.setdefault(min(epoch, epochs - 1), []).append(rate * recipe.adam_lr)
        ends[min(epoch, epochs - 1)] = step
    warm, optimizers = Warmup(capture, rank), make_optimizers(model.model, recipe)
    means = {ends[epoch]: float(np.mean(each)) for epoch, each in rates.items()}

    def after_step(step: int) -> None:
        if step in means:
            warm.keep(optimizers, means[step])

    with progress("LESS: warm-up", total, unit="steps") as ticker:
        train(
            model.model,
            chunks,
            recipe,
            subset=rows,
            optimizers=optimizers,
            after_step=after_step,
            ticker=ticker,
        )
    for parameter in warm.parameters:
        parameter.requires_grad_(False)  # its gradients are made from those of its layer
        parameter.grad = None
    return warm


def _start(workspace: Workspace, recipe: Recipe | None) -> torch.nn.Module:
    """Load the model that the warm-up starts from, fp32."""
    from stride_cli.models.configuration import base_name, is_adapter
    from stride_cli.models.language.checkpoint import load_weights
    from stride_cli.training.initial_model import base_weights

    path = workspace.model.path
    if recipe is not None and recipe.base is not None:
        start: torch.nn.Module = base_weights(recipe, workspace.model.spec.permissions)
    elif path is not None and is_adapter(path) and (base := base_name(workspace.model.spec)[0]):
        start = load_weights(base)
    else:
        start = copy.deepcopy(workspace.model.model).float()
    return start


def _capture(model: CausalLM, workspace: Workspace, chosen: str | None) -> Capture:
    """Hook the layers that get matrices, without their biases."""
    probe = workspace.chunks.batch(np.arange(1))
    try:
        return Capture(model, probe, layers=chosen or "attention", bias=False)
    except UsageError:
        if chosen is not None:
            raise
        return Capture(model, probe, layers="body", bias=False)
