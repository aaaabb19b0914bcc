"""Train many small classifiers at once with stacked parameters, each as `train_network` would.

Networks of one architecture, each on rows of its own and from a seed of its own, are one tensor program:
every parameter gets a leading axis (G, …), the loss of all is differentiated by one vmap over
`torch.func.functional_call`, and the optimizer steps all of them. For chains of linear layers with ReLU under
SGD, forward and backward pass are written out as batched products (`ChainSteps`). A network computes what it
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

from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe
from stride_cli.models.classifier.networks import MLP, Logistic, build_network
from stride_cli.training.classifier_loop import BETAS, EPSILON, diverged, members_of

_STACK_BYTES = 1 << 30
_CACHED_BYTES = 24 << 20  # measured: an MLP of 0.1 M weights is trained fastest 20 to 30 at once
_EVALUATED_AT_ONCE = 512


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
        """Compute the logits of every network on the same inputs: (B, …) → (G, B, C)."""

        def run(parameters: dict[str, Tensor], some: Tensor) -> Tensor:
            return functional_call(self.template, parameters, (some,))

        pieces = [
            vmap(run, in_dims=(0, None))(self.parameters, inputs[start : start + _EVALUATED_AT_ONCE])
            for start in range(0, len(inputs), _EVALUATED_AT_ONCE)
        ]
        return torch.cat(pieces, dim=1)

    def network(self, number: int) -> nn.Module:
        """Put one network's weights into the template, and return that."""
        with torch.no_grad():
            for name, parameter in self.template.named_parameters():
                parameter.copy_(self.parameters[name][number])
        return self.template


def train_stacked(
    recipe: ClassifierRecipe,
    inputs: Tensor,
    labels: Tensor,
    members: Sequence[np.ndarray],
    seeds: Sequence[int],
    *,
    n_classes: int,
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

    Returns
    -------
    Stack

    Raises
    ------
    CorpusError         a network has no row to train on
    NumericalError      a loss is not finite
    """
    members = [members_of(rows, len(labels)) for rows in members]
    shape = tuple(inputs.shape[1:])
    template = build_network(recipe.network, shape, n_classes, seed=0).to(inputs)
    template.eval()
    drawn = [build_network(recipe.network, shape, n_classes, seed=seed).state_dict() for seed in seeds]
    parameters = {
        name: torch.stack([one[name] for one in drawn]).to(inputs) for name, _ in template.named_parameters()
    }
    del drawn
    # an MLP or a logistic regression that is trained by SGD
    chain = type(template) in (MLP, Logistic) and recipe.optimizer == "sgd"
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
    for name, values in parameters.items():
        if not bool(torch.isfinite(values).all()):
            raise diverged(math.nan, recipe.epochs - 1, name)
    return Stack(template, parameters)


def choose_at_once(recipe: ClassifierRecipe, shape: Sequence[int], n_classes: int) -> int:
    """Choose how many networks are trained together.

    The smaller the network, the more of a step is overhead that a stack shares: so many that weights and
    momentum are 24 MB, at least 16 and at most 256; fewer where activations would not fit into memory.
    """
    network = build_network(recipe.network, shape, n_classes, seed=0)
    size = sum(parameter.numel() for parameter in network.parameters())
    wanted = min(256, max(16, _CACHED_BYTES // (8 * size)))
    # weights, gradient, optimizer's state; a batch of inputs, and what layers make of it
    width = 4 * size + recipe.batch_size * 8 * math.prod(shape)
    return max(1, min(wanted, _STACK_BYTES // (4 * width)))


class ChainSteps:
    """SGD steps of G chains.

    Parameters
    ----------
    network : MLP or Logistic
    parameters : dict           name → (G, …), changed in place
    recipe : ClassifierRecipe
    """

    def __init__(self, network: nn.Module, parameters: dict[str, Tensor], recipe: ClassifierRecipe) -> None:
        layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        self.weights = [parameters[f"{name}.weight"] for name in layers]  # (G, out, in)
        self.biases = [parameters[f"{name}.bias"] for name in layers]  # (G, out)
        self.speeds = [torch.zeros_like(value) for value in (*self.weights, *self.biases)]
        self.recipe = recipe

    @torch.no_grad()
    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor, rates: Tensor) -> None:
        """Take one step of every chain.

        Parameters
        ----------
        inputs : (G, B, …)
        labels : (G, B) int64
        weight : (G, B)       of each row in its batch's mean; 0 for padding
        rates : (G,)          a chain whose rate is 0 stays as it is
        """
        states = [inputs.flatten(2)]
        last = len(self.weights) - 1
        for number, (matrix, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            state = torch.baddbmm(bias[:, None], states[-1], matrix.transpose(1, 2))
            states.append(state if number == last else state.clamp_min_(0))
        error = states.pop().softmax(-1)  # ∂loss/∂logits = weight (p − onehot)
        error.scatter_add_(-1, labels[..., None], -torch.ones_like(weight)[..., None])
        error.mul_(weight[..., None])
        speeds = self.speeds
        momentum = self.recipe.momentum
        for number in range(last, -1, -1):
            state = states.pop()
            # before the weights of this layer move
            before = torch.bmm(error, self.weights[number]) if number else None
            speeds[number].baddbmm_(error.transpose(1, 2), state, beta=momentum)
            speeds[last + 1 + number].mul_(momentum).add_(error.sum(1))
            if before is not None:
                error = before.mul_(state > 0)
        equal = bool((rates == rates[0]).all())
        for value, speed in zip((*self.weights, *self.biases), speeds, strict=True):
            if self.recipe.weight_decay:
                speed.add_(value, alpha=self.recipe.weight_decay)
            if equal:
                value.sub_(speed, alpha=float(rates[0]))
            else:
                value.addcmul_(speed, rates.view(-1, *[1] * (value.ndim - 1)), value=-1)


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
        """Take one step; see `ChainSteps.step`."""
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
                first.lerp_(gradient, 1 - BETAS[0])
                second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
                value.mul_(1 - rate * recipe.weight_decay)
                size = second.sqrt().div_(math.sqrt(1 - BETAS[1] ** self.count)).add_(EPSILON)
                value.addcmul_(first / size, rate, value=-1 / (1 - BETAS[0] ** self.count))
