"""Stacked SGD for chains of linear layers with ReLU: forward and backward written out as batched products.

What `training.train_stacked` does for any network through `torch.func`, with fewer passes over memory: the
momentum is accumulated by the matrix product that makes the gradient, and nothing is kept for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe
from stride_cli.models.classifier.networks import MLP, Logistic


def is_chain(network: nn.Module, recipe: ClassifierRecipe) -> bool:
    """Whether this room's own MLP or logistic regression is trained by SGD."""
    return type(network) in (MLP, Logistic) and recipe.optimizer == "sgd"


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
        """One step of every chain.

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
