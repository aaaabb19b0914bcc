"""Data-driven bases: every space observes a random sample of the corpus, in one pass, and fits its own.

Two kinds. *Orthonormal* bases only span a space; the Fisher matrix in its gates is then estimated and solved
as a whole. *Whitened* bases carry the preconditioner themselves: with the Fisher matrix approximated by a
Kronecker product A ⊗ S of the second moments of activations and of output gradients (K-FAC; Martens & Grosse
2015), A^{-1/2} and S^{-1/2} are applied to the directions, and what is left of the Fisher matrix in the gates
is the identity. For a vocabulary S is taken diagonal, the model's mean prediction. What the product leaves
out (how the positions of a chunk go together, the damping) is measured on chunks of its own: directions are
scaled so that the mean eigenvalue is 1 at every layer and in every logit space (4 of pairs of tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.gradients import gate_gradients, label_signals, signals
from stride_cli.operators.operator_space import BasisOptions, Observation, OperatorSpace, Sample, Signals
from stride_cli.operators.second_moments import Moments
from stride_cli.operators.spaces import reads_input, space_classes
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

# tokens that second moments are taken from: 64 for every direction, within these bounds
_SAMPLE_TOKENS = (16_384, 65_536)
_LOOKED_AT = 1 << 16  # chunks at once


def label_uniforms(seed: int, batch: Batch, name: str = "fisher labels") -> np.ndarray:
    """Uniforms (B, T) that draw the Fisher labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    return np.stack([stream(seed, name, int(row)).random(length) for row in batch.rows])


@dataclass(frozen=True)
class Observed:
    """What bases are made of: sums over a sample of the corpus, which add up over parts of it.

    Attributes
    ----------
    moments : of each space, what its `observe` collected
    prediction : (V,) float64      sum over scored positions of the model's distribution of the next token
    """

    moments: list[Moments]
    prediction: torch.Tensor


def fit_bases(
    model: AttributableModel, chunks: ChunkReader, names: Sequence[str], options: BasisOptions
) -> SteeredModel:
    """The model with spaces whose bases are leading principal directions on a random sample of the corpus.

    Activations enter as LN(h), uncentred; gradients are those of labels drawn from the model, so that the
    directions are the ones in which the model's own distribution is most sensitive.

    Parameters
    ----------
    names : space names, as from `parse_space`
    options : BasisOptions

    Returns
    -------
    SteeredModel, its spaces in the order of ``names``
    """
    # 1. one pass over the sample
    observed = observe_sample(model, chunks, names, options, observed_groups(model, chunks, options))
    # 2. every space makes its basis of what it has collected
    steered = bases_from(model, chunks, names, options, observed)
    # 3. gates of whitened ones are put in one unit, that of F itself
    if scales_bases(names, options):
        groups = scaling_groups(steered, chunks, options)
        scale_bases(steered, *curvature_of_sample(steered, chunks, options, groups))
    return steered


def observed_groups(model: AttributableModel, chunks: ChunkReader, options: BasisOptions) -> list[np.ndarray]:
    """The chunks that `observe_sample` is to see, batch by batch."""
    return chunks.plan(options.batch_tokens, _sample(chunks, options.seed, model.d_model))


def observe_sample(
    model: AttributableModel,
    chunks: ChunkReader,
    names: Sequence[str],
    options: BasisOptions,
    groups: Sequence[np.ndarray],
) -> Observed:
    """What bases of these spaces are made of, summed over some batches of the sample."""
    classes = space_classes(names)
    watched = _watched(model, classes, options)
    moments = [Moments() for _ in classes]
    prediction = torch.zeros(model.vocab_size, dtype=torch.float64, device=model.device)

    # labels y' ~ p(· | x): their gradients have F as second moment, E[∇ log p(y') ∇ log p(y')ᵀ]
    def of_drawn(batch: Batch) -> Signals:
        uniforms, inputs = label_uniforms(options.seed, batch), reads_input(classes)
        return signals(watched, batch, sampled=uniforms, with_inputs=inputs, with_prediction=True)

    batches = _told(chunks, "fitting bases", options.batch_tokens, groups)
    for batch, drawn in ShrinkingBatches().each(batches, of_drawn):
        assert drawn.prediction is not None
        prediction += drawn.prediction  # Σ_t p(· | x_<t)
        # position t is used when it predicts a scored token t + 1
        used = torch.nn.functional.pad(batch.weights[:, 1:] > 0, (0, 1)).to(model.device)
        seen = Observation(batch, drawn, used, batch.scored.to(model.device))
        for cls, own in zip(classes, moments, strict=True):
            cls.observe(seen, own, options)
    return Observed(moments, prediction.cpu())


def bases_from(
    model: AttributableModel,
    chunks: ChunkReader,
    names: Sequence[str],
    options: BasisOptions,
    observed: Observed,
) -> SteeredModel:
    """The model with bases of what was observed of the whole sample, each in a unit of its own."""
    classes = space_classes(names)
    watched = _watched(model, classes, options)

    def each_label() -> Iterator[tuple[Signals, torch.Tensor]]:
        for group in observed_groups(model, chunks, options):
            yield from label_signals(watched, chunks.batch(group))

    with progress("fitting bases"):
        spaces = [
            cls.fit(Sample(model, chunks, own, observed.prediction, each_label), options)
            for cls, own in zip(classes, observed.moments, strict=True)
        ]
    spaces = [space.to(model.device).requires_grad_(False) for space in spaces]
    return SteeredModel(model, spaces, options.layer)


def _watched(
    model: AttributableModel, classes: Sequence[type[OperatorSpace]], options: BasisOptions
) -> SteeredModel:
    """The model with probes, which mark the sites whose gradients are wanted: one for each site."""
    probes = {cls.site: probe.to(model.device) for cls in classes if (probe := cls.probe()) is not None}
    return SteeredModel(model, list(probes.values()), options.layer)


def scales_bases(names: Sequence[str], options: BasisOptions) -> bool:
    """Whether bases of some of these spaces are whitened, and scaled to one unit."""
    return options.damping is not None and any(cls.whitens for cls in space_classes(names))


def scaling_groups(steered: SteeredModel, chunks: ChunkReader, options: BasisOptions) -> list[np.ndarray]:
    """The chunks that `curvature_of_sample` is to see, few at a time."""
    return chunks.small_groups(_sample(chunks, options.seed, 0, "curvature sample"), steered.chunks_at_once)


def curvature_of_sample(
    steered: SteeredModel, chunks: ChunkReader, options: BasisOptions, groups: Sequence[np.ndarray]
) -> tuple[list[torch.Tensor], float]:
    """Sums over some groups of the sample, which add up over parts of it: of each space the mean squares of
    its parts' gradients (parts,) float64, and the scored tokens."""
    spaces = steered.spaces
    device = steered.model.device
    totals = [torch.zeros(len(space.parts()), dtype=torch.float64, device=device) for space in spaces]
    tokens = 0.0

    def of_drawn(batch: Batch) -> list[torch.Tensor]:
        # other labels than those that made the bases, which would look too steep along them
        uniforms = label_uniforms(options.seed, batch, "curvature labels")
        return gate_gradients(steered, batch, sampled=uniforms)[0]

    batches = _told(chunks, "scaling bases", options.batch_tokens, groups)
    for batch, gradients in ShrinkingBatches().each(batches, of_drawn):
        # rows are means over tokens, and Σ_t g_t g_tᵀ has the square of their sum as its expectation
        weight = (batch.scored.double()[:, None] ** 2).to(device)  # (B, 1)
        for total, space, gradient in zip(totals, spaces, gradients, strict=True):
            # tr F / p of each part: the mean square of its gates' gradients
            squares = [gradient[:, part].square().mean(dim=1) for part in space.parts()]  # (B,) each
            total += (torch.stack(squares, dim=1).double() * weight).sum(dim=0)
        tokens += float(batch.scored.sum())
    return [total.cpu() for total in totals], tokens


def scale_bases(steered: SteeredModel, totals: Sequence[torch.Tensor], tokens: float) -> None:
    """Scale whitened bases, in place, so that the mean eigenvalue of the Fisher matrix per token is what the
    space says (1, mostly): of every layer inside the blocks by itself, and of every other space. By the
    `curvature_of_sample`."""
    for total, space in zip(totals, steered.spaces, strict=True):
        if not space.whitens:
            continue
        for number, value in enumerate((total / max(1.0, tokens)).tolist()):
            # a layer that no gradient reaches has nothing to scale
            if value > 0:
                space.scale(number, (space.mean_eigenvalue / value) ** 0.5)


def _told(
    chunks: ChunkReader, description: str, batch_tokens: int, groups: Sequence[np.ndarray]
) -> Iterator[Batch]:
    """Batches of groups of chunks, one group after the other, with a bar."""
    total = sum(int(chunks.lengths[group].sum()) for group in groups)
    with progress(description, total, unit="tokens") as bar:
        for batch in (batch for group in groups for batch in chunks.batches(batch_tokens, group)):
            yield batch
            bar.advance(int(chunks.lengths[batch.rows].sum()))


def sample_size(width: int) -> int:
    """Tokens that second moments of that width are taken from, where there are so many."""
    return int(np.clip(64 * width, *_SAMPLE_TOKENS))


def _sample(chunks: ChunkReader, seed: int, width: int, name: str = "basis sample") -> np.ndarray:
    """Random chunks that hold enough tokens for second moments of that width, ascending."""
    order = stream(seed, name).permutation(chunks.n_chunks)
    wanted, tokens = sample_size(width), 0
    for start in range(0, len(order), _LOOKED_AT):  # not at the lengths of all, of which there may be many
        reached = tokens + np.cumsum(chunks.lengths[order[start : start + _LOOKED_AT]])
        if reached[-1] >= wanted:
            return np.sort(order[: start + int(np.searchsorted(reached, wanted)) + 1])
        tokens = int(reached[-1])
    return np.sort(order)
