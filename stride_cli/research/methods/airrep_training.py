"""Training AirRep's encoder so that its group scores rank retrained subsets (Sun et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.research.methods.airrep_encoder import AirRepEncoder

_WARMUP = 10  # steps
_CLIP = 10.0  # of normalised losses, and of the weight of a pair


@dataclass(frozen=True, eq=False)
class Split:
    """Subsets that were trained on, and examples that the trained models were measured on.

    Attributes
    ----------
    texts : sequence of D str      the examples
    masks : (S, n) bool            the subsets of the corpus's chunks
    losses : (S, D) float64        loss of the model trained on a subset on an example
    """

    texts: Sequence[str]
    masks: np.ndarray
    losses: np.ndarray


def train_encoder(
    encoder: AirRepEncoder, chunks: Sequence[str], splits: Sequence[Split], options: Any, *, seed: int
) -> list[float]:
    """Fit an encoder in place, by AdamW with the pairwise ranking loss.

    An epoch takes each split's subsets once, `top_k` at a time. Gradients of the vectors are taken first and
    carried into the encoder batch by batch, so that memory holds one batch of activations; this is the exact
    gradient of a step's loss.

    Parameters
    ----------
    chunks : sequence of n str     texts of the corpus

    Returns
    -------
    list of float      mean loss of every epoch
    """
    texts = list(chunks)
    first = [len(texts)]  # where each split's examples begin in `texts`
    for split in splits:
        texts.extend(split.texts)
        first.append(len(texts))
    targets = [normalised_losses(split.losses) for split in splits]
    cached: Tensor | None = None  # BERT's vectors of all texts, where the projector alone is trained
    if options.tune == "projector":
        cached = encoder.embed(texts, batch_size=options.batch_size, projected=False)
    trained = encoder if cached is None else encoder.projector
    parameters = list(trained.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP))
    history = []
    with progress("training the encoder", options.epochs, unit="epochs") as bar:
        for epoch in range(options.epochs):
            random = stream(seed, "airrep epoch", epoch)
            losses = []
            for number in random.permutation(len(splits)):
                split = splits[number]
                order = random.permutation(len(split.masks))
                for start in range(0, len(order), options.top_k):
                    subsets = order[start : start + options.top_k]
                    if len(subsets) < 2:  # nothing to compare it with
                        continue
                    examples = random.permutation(len(split.texts))[: options.examples]
                    union = np.flatnonzero(split.masks[subsets].any(0))
                    pool = np.sort(random.permutation(union)[: options.pool])
                    rows = np.concatenate([pool, first[number] + examples])
                    members = torch.from_numpy(split.masks[np.ix_(subsets, pool)]).to(encoder.device)
                    wanted = torch.from_numpy(targets[number][np.ix_(examples, subsets)]).to(encoder.device)
                    optimizer.zero_grad()
                    if cached is not None:
                        vectors = encoder.projector(cached[torch.from_numpy(rows).to(encoder.device)])
                        loss = step_loss(vectors, members, wanted)
                        loss.backward()
                    else:
                        loss = _backward_in_batches(
                            encoder, [texts[row] for row in rows], members, wanted, options.batch_size
                        )
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimizer.step()
                    schedule.step()
                    losses.append(float(loss.detach()))
            history.append(float(np.mean(losses)) if losses else 0.0)
            bar.advance()
    optimizer.zero_grad(set_to_none=True)
    return history


def normalised_losses(losses: np.ndarray) -> np.ndarray:
    """Normalise losses to how much better than the mean an example fares: (S, D) to (D, S) float32.

    (mean − loss) / standard deviation, per example, within ±10; 0 where all subsets agree.
    """
    spread = losses.std(0)
    scaled = (losses.mean(0) - losses) / np.where(spread > 0, spread, 1)
    return np.clip(scaled.T, -_CLIP, _CLIP).astype(np.float32)


def step_loss(vectors: Tensor, members: Tensor, targets: Tensor) -> Tensor:
    """Compute the ranking loss of one step.

    Parameters
    ----------
    vectors : (P + D, width)      of P chunks, then of D examples
    members : (S, P) bool         which chunks each subset has
    targets : (D, S)              as `normalised_losses`
    """
    n_chunks = members.shape[1]
    return ranking_loss(group_scores(vectors[n_chunks:] @ vectors[:n_chunks].T, members), targets)


def group_scores(products: Tensor, members: Tensor) -> Tensor:
    """Score whole subsets: their members' scores, averaged with weights softmax(|score|).

    Parameters
    ----------
    products : (D, P)          score of every chunk for every example
    members : (S, P) bool

    Returns
    -------
    Tensor (D, S)      0 for a subset without members
    """
    strength = products.abs()[:, None, :].masked_fill(~members[None], -torch.inf)  # (D, S, P)
    empty = ~members.any(1)
    strength = strength.masked_fill(empty[None, :, None], 0.0)  # a softmax of nothing is not a number
    weights = strength.softmax(-1) * members[None]
    return torch.einsum("dsp,dp->ds", weights, products)


def ranking_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute RankNet's log(1 + exp(−(s_a − s_b))) over pairs with t_a > t_b, weighted by t_a − t_b up to 10.

    Parameters
    ----------
    scores, targets : (D, S)

    Returns
    -------
    Tensor ()      mean over the ordered pairs of all examples; 0 where there is none
    """
    difference = targets[:, :, None] - targets[:, None, :]
    ordered = difference > 0
    losses = F.softplus(-(scores[:, :, None] - scores[:, None, :])) * difference.clamp(0, _CLIP)
    return (losses * ordered).sum() / ordered.sum().clamp_min(1)


def _backward_in_batches(
    encoder: AirRepEncoder, texts: Sequence[str], members: Tensor, targets: Tensor, batch_size: int
) -> Tensor:
    """Add the gradient of `step_loss` in all of the encoder; return the loss."""
    vectors = encoder.embed(texts, batch_size=batch_size).requires_grad_(True)
    loss = step_loss(vectors, members, targets)
    (pull,) = torch.autograd.grad(loss, vectors)
    for start in range(0, len(texts), batch_size):
        again = encoder(texts[start : start + batch_size])
        (again * pull[start : start + batch_size]).sum().backward()
    return loss
