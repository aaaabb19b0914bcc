"""Train one classifier on rows of its file, and measure it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stride_cli.errors import CorpusError, NumericalError
from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe

BETAS, EPSILON = (0.9, 0.999), 1e-8  # AdamW's


def train_network(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    recipe: ClassifierRecipe,
    *,
    members: np.ndarray | None = None,
    seed: int | None = None,
    after_step: Callable[[int], None] | None = None,
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
    after_step : callable, optional called with the number of each step once it is done

    Returns
    -------
    float      mean loss over the last epoch, nats, while it was training

    Raises
    ------
    CorpusError         no row to train on
    NumericalError      the loss is not finite
    """
    members = members_of(members, len(labels))
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
                if after_step is not None:
                    after_step(step)
            mean = total / len(batches)
            if not math.isfinite(mean):
                raise diverged(mean, epoch)
    network.eval()
    return mean


def outcomes_of(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute loss and margin of every example, in float64.

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


def _make_optimizer(network: nn.Module, recipe: ClassifierRecipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            network.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
    return torch.optim.AdamW(
        network.parameters(), lr=recipe.lr, betas=BETAS, eps=EPSILON, weight_decay=recipe.weight_decay
    )


def members_of(rows: np.ndarray | None, n_rows: int) -> np.ndarray:
    """Resolve a mask or numbers of rows to numbers, (m,) int64; default: all."""
    members = np.arange(n_rows)[slice(None) if rows is None else rows]
    if len(members) == 0:
        raise CorpusError("there is no row to train on", fix="give a subset of one row or more")
    return members


def diverged(loss: float, epoch: int, name: str | None = None) -> NumericalError:
    what = "the training loss" if name is None else f"'{name}'"
    return NumericalError(
        f"{what} is {loss} in epoch {epoch + 1} (expected a finite number)", fix="train with a lower --lr"
    )
