"""Training of classifiers, one at a time or many at once with stacked parameters.

Many small networks of one architecture, each on rows of its own and from a seed of its own, are one tensor
program: every parameter gets a leading axis (G, …), the loss of all is differentiated by one vmap over
`torch.func.functional_call`, and the optimizer steps all of them. What one network computes is what it
computes alone, up to the rounding of other matrix kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from stride_cli.errors import CorpusError, NumericalError
from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe
from stride_cli.models.classifier.networks import build_network
from stride_cli.output import Ticker
from stride_cli.training.fast.chains import ChainSteps, is_chain
from stride_cli.training.marks import NO_MARKS, Marks

_STACK_BYTES = 1 << 30
_CACHED_BYTES = 24 << 20  # measured: an MLP of 0.1 M weights is trained fastest 20 to 30 at once
_EVALUATED_AT_ONCE = 512
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # AdamW's


@dataclass(frozen=True)
class Stack:
    """G trained networks of one architecture.

    Attributes
    ----------
    template : nn.Module           the architecture; its own weights are not used
    parameters : dict              name → (G, …)
    """

    template: nn.Module
    parameters: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of every network on the same inputs: (B, …) → (G, B, C)."""

        def run(parameters: dict[str, Tensor], some: Tensor) -> Tensor:
            return functional_call(self.template, parameters, (some,))

        pieces = [
            vmap(run, in_dims=(0, None))(self.parameters, inputs[start : start + _EVALUATED_AT_ONCE])
            for start in range(0, len(inputs), _EVALUATED_AT_ONCE)
        ]
        return torch.cat(pieces, dim=1)

    def network(self, number: int) -> nn.Module:
        """One of the networks as the module itself: the template, with its weights."""
        with torch.no_grad():
            for name, parameter in self.template.named_parameters():
                parameter.copy_(self.parameters[name][number])
        return self.template


def train_network(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    recipe: ClassifierRecipe,
    *,
    members: np.ndarray | None = None,
    seed: int | None = None,
    ticker: Ticker | None = None,
    marks: Marks = NO_MARKS,
) -> float:
    """Train one network in place, on the device where it is.

    Parameters
    ----------
    network : nn.Module             as from `build_network`
    inputs : (n, …) float           standardised
    labels : (n,) int64
    recipe : ClassifierRecipe
    members : (m,) int64, optional  rows to train on; default: all
    seed : int, optional            of the order (and of dropout); default: the recipe's
    ticker : Ticker, optional       told of each step
    marks : Marks, optional         told of each step

    Returns
    -------
    float      mean loss over the last epoch, nats, while it was training

    Raises
    ------
    CorpusError         no row to train on
    NumericalError      the loss is not finite
    """
    members = _members(members, len(labels))
    seed = recipe.seed if seed is None else seed
    network.train()
    optimizer = _make_optimizer(network, recipe)
    step, mean = 0, math.nan
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch in range(recipe.epochs):
            total = 0.0
            batches = torch.from_numpy(recipe.order_of(members, seed, epoch)).to(inputs.device)
            for batch in batches:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rate(step, len(members))
                loss = F.cross_entropy(network(inputs[batch]), labels[batch])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
                step += 1
                if ticker is not None:
                    ticker.advance()
                marks.passed(step)
            mean = total / len(batches)
            if not math.isfinite(mean):
                raise _diverged(mean, epoch)
    network.eval()
    return mean


def train_stacked(
    recipe: ClassifierRecipe,
    inputs: Tensor,
    labels: Tensor,
    members: Sequence[np.ndarray],
    seeds: Sequence[int],
    *,
    n_classes: int,
    ticker: Ticker | None = None,
) -> Stack:
    """Train G networks at once, each from its own seed on its own rows.

    Each goes through the batches, rates and steps that `train_network` would take it through. Rows may differ
    in number: a network that is done waits for the others unchanged.

    Parameters
    ----------
    recipe : ClassifierRecipe
    inputs : (n, …) float           standardised; where they are, training runs
    labels : (n,) int64
    members : G arrays (m_g,) int64
    seeds : G numbers               of initial weights and order
    n_classes : int
    ticker : Ticker, optional       told of each network's steps

    Returns
    -------
    Stack

    Raises
    ------
    CorpusError         a network has no row to train on
    NumericalError      a loss is not finite
    """
    members = [_members(rows, len(labels)) for rows in members]
    shape = tuple(inputs.shape[1:])
    template = build_network(recipe.network, shape, n_classes, seed=0).to(inputs)
    template.eval()
    drawn = [build_network(recipe.network, shape, n_classes, seed=seed).state_dict() for seed in seeds]
    parameters = {
        name: torch.stack([one[name] for one in drawn]).to(inputs) for name, _ in template.named_parameters()
    }
    del drawn
    chain = is_chain(template, recipe)
    steps: ChainSteps | FunctionalSteps = (ChainSteps if chain else FunctionalSteps)(
        template, parameters, recipe
    )
    counts = np.array([len(rows) for rows in members])
    per_epoch = np.maximum(1, counts // recipe.batch_size)
    n_steps = recipe.epochs * per_epoch
    size = int(np.minimum(recipe.batch_size, counts).max())
    plans: list[np.ndarray] = [np.zeros((0, 0), np.int64)] * len(members)
    for step in range(int(n_steps.max(initial=0))):
        batch = np.zeros((len(members), size), np.int64)
        weight = np.zeros((len(members), size), np.float32)
        for number, rows in enumerate(members):
            if step >= n_steps[number]:
                continue
            epoch, place = divmod(step, int(per_epoch[number]))
            if place == 0:
                plans[number] = recipe.order_of(rows, seeds[number], epoch)
            own = plans[number][place]
            batch[number, : len(own)], weight[number, : len(own)] = own, 1 / len(own)
        index = torch.from_numpy(batch).to(inputs.device)
        rates = torch.tensor([recipe.rate(step, int(count)) for count in counts]).to(inputs)
        steps.step(inputs[index], labels[index], torch.from_numpy(weight).to(inputs), rates)
        if ticker is not None:
            ticker.advance(int((step < n_steps).sum()))
    for name, values in parameters.items():
        if not bool(torch.isfinite(values).all()):
            raise _diverged(math.nan, recipe.epochs - 1, name)
    return Stack(template, parameters)


def choose_at_once(recipe: ClassifierRecipe, shape: Sequence[int], n_classes: int) -> int:
    """How many networks are trained together.

    The smaller the network, the more of a step is overhead that a stack shares: so many that weights and
    momentum are 24 MB, at least 16 and at most 256; fewer where activations would not fit into memory.
    """
    network = build_network(recipe.network, shape, n_classes, seed=0)
    size = sum(parameter.numel() for parameter in network.parameters())
    wanted = min(256, max(16, _CACHED_BYTES // (8 * size)))
    # weights, gradient, optimizer's state; a batch of inputs, and what layers make of it
    width = 4 * size + recipe.batch_size * 8 * math.prod(shape)
    return max(1, min(wanted, _STACK_BYTES // (4 * width)))


def outcomes_of(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Loss and margin of every example, in float64.

        loss = −log p_y,     margin = logit_y − logsumexp of the other logits = log p_y / (1 − p_y)

    Parameters
    ----------
    logits : (…, B, C)
    labels : (B,) int64

    Returns
    -------
    losses, margins : (…, B) float64 arrays
    """
    values = logits.detach().double()
    where = labels.expand(values.shape[:-1])[..., None]
    own = values.gather(-1, where)[..., 0]
    others = values.scatter(-1, where, -math.inf).logsumexp(-1)
    losses = values.logsumexp(-1) - own
    return losses.cpu().numpy(), (own - others).cpu().numpy()


class FunctionalSteps:
    """Steps of torch.optim.SGD (momentum) or AdamW for every network of a stack, through `torch.func`.

    The interface is `ChainSteps`'.
    """

    def __init__(self, template: nn.Module, parameters: dict[str, Tensor], recipe: ClassifierRecipe) -> None:
        def loss(own: dict[str, Tensor], inputs: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            logits = functional_call(template, own, (inputs,))
            return (F.cross_entropy(logits, labels, reduction="none") * weight).sum()

        self.gradient = vmap(grad(loss))
        self.parameters = parameters
        self.recipe = recipe
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        adam = recipe.optimizer == "adamw"
        self.second = {name: torch.zeros_like(value) for name, value in parameters.items()} if adam else {}
        self.count = 0

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor, rates: Tensor) -> None:
        """One step; see `ChainSteps.step`."""
        gradients = self.gradient(self.parameters, inputs, labels, weight)
        self.count += 1
        recipe = self.recipe
        with torch.no_grad():
            for name, value in self.parameters.items():
                gradient, first = gradients[name], self.first[name]
                rate = rates.view(-1, *[1] * (value.ndim - 1))
                if recipe.optimizer == "sgd":
                    first.mul_(recipe.momentum).add_(gradient).add_(value, alpha=recipe.weight_decay)
                    value.addcmul_(first, rate, value=-1)
                    continue
                second = self.second[name]
                first.lerp_(gradient, 1 - _BETAS[0])
                second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
                value.mul_(1 - rate * recipe.weight_decay)
                size = second.sqrt().div_(math.sqrt(1 - _BETAS[1] ** self.count)).add_(_EPSILON)
                value.addcmul_(first / size, rate, value=-1 / (1 - _BETAS[0] ** self.count))


def _make_optimizer(network: nn.Module, recipe: ClassifierRecipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            network.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
    return torch.optim.AdamW(
        network.parameters(), lr=recipe.lr, betas=_BETAS, eps=_EPSILON, weight_decay=recipe.weight_decay
    )


def _members(rows: np.ndarray | None, n_rows: int) -> np.ndarray:
    rows = np.arange(n_rows) if rows is None else np.asarray(rows)
    if rows.dtype == bool:
        rows = np.flatnonzero(rows)
    if len(rows) == 0:
        raise CorpusError("there is no row to train on", fix="give a subset of one row or more")
    return rows.astype(np.int64)


def _diverged(loss: float, epoch: int, name: str | None = None) -> NumericalError:
    what = "the training loss" if name is None else f"'{name}'"
    return NumericalError(
        f"{what} is {loss} in epoch {epoch + 1} (expected a finite number)", fix="train with a lower --lr"
    )
