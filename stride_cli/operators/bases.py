"""Data-driven bases: every space observes a random sample of the corpus, in one pass, and fits its own.

Two kinds. *Orthonormal* bases only span a space; the Fisher matrix in its gates is then estimated and solved
as a whole. *Whitened* bases carry the preconditioner themselves: with the Fisher matrix approximated by a
Kronecker product A ⊗ S of the second moments of activations and of output gradients (K-FAC; Martens & Grosse
2015), A^{-1/2} and S^{-1/2} are applied to the directions, and what is left of the Fisher matrix in the gates
is the identity. For a vocabulary S is taken diagonal, the model's mean prediction. What the product leaves
out (how the positions of a chunk go together, the damping) is measured on chunks of its own: directions are
scaled so that the mean eigenvalue is 1 at every layer and in every logit space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.gradients import assemble, label_signals, signals
from stride_cli.operators.operator_space import BasisOptions, Observation, Sample
from stride_cli.operators.second_moments import Moments
from stride_cli.operators.signals import Signals
from stride_cli.operators.spaces import reads_input, space_classes
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

# tokens that second moments are taken from: 64 for every direction, within these bounds
_SAMPLE_TOKENS = (16_384, 65_536)


def label_uniforms(seed: int, batch: Batch, name: str = "fisher labels") -> np.ndarray:
    """Uniforms (B, T) that draw the Fisher labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    return np.stack([stream(seed, name, int(row)).random(length) for row in batch.rows])


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
    classes = space_classes(names)
    # 1. one pass over the sample. Probes mark the sites whose gradients are wanted, one for each site
    probes = {cls.site: probe.to(model.device) for cls in classes if (probe := cls.probe()) is not None}
    watched = SteeredModel(model, list(probes.values()), options.layer)
    moments = [Moments() for _ in classes]
    prediction = torch.zeros(model.vocab_size, dtype=torch.float64)
    sample = _sample(chunks, options.seed, model.d_model)
    for batch in _told(chunks, "fitting bases", options.batch_tokens, [sample]):
        # labels y' ~ p(· | x): their gradients have F as second moment, E[∇ log p(y') ∇ log p(y')ᵀ]
        _, drawn = signals(
            watched,
            batch,
            sampled=label_uniforms(options.seed, batch),
            with_inputs=reads_input(classes),
            with_prediction=True,
        )
        assert drawn is not None and drawn.prediction is not None
        prediction += drawn.prediction.cpu()  # Σ_t p(· | x_<t)
        # position t is used when it predicts a scored token t + 1
        used = torch.nn.functional.pad(batch.weights[:, 1:] > 0, (0, 1)).to(model.device)
        seen = Observation(batch, drawn, used, batch.scored.to(model.device))
        for cls, own in zip(classes, moments, strict=True):
            cls.observe(seen, own, options)

    def each_label() -> Iterator[tuple[Signals, torch.Tensor]]:
        for batch in chunks.batches(options.batch_tokens, sample):
            yield from label_signals(watched, batch)

    # 2. every space makes its basis of what it has collected
    with progress("fitting bases"):
        spaces = [
            cls.fit(Sample(model, chunks, own, prediction, each_label), options)
            for cls, own in zip(classes, moments, strict=True)
        ]
    spaces = [space.to(model.device).requires_grad_(False) for space in spaces]
    steered = SteeredModel(model, spaces, options.layer)
    # 3. where all of them are whitened, their gates are put in one unit, that of F itself
    if options.damping is not None and all(cls.whitens for cls in classes):
        _to_unit_curvature(steered, chunks, options)
    return steered


def _to_unit_curvature(steered: SteeredModel, chunks: ChunkReader, options: BasisOptions) -> None:
    """Scale whitened bases, in place, so that the mean eigenvalue of the Fisher matrix per token is 1: of
    every layer inside the blocks by itself, and of every other space."""
    spaces = steered.spaces
    totals = [torch.zeros(len(space.parts()), dtype=torch.float64) for space in spaces]
    tokens = 0.0
    sample = _sample(chunks, options.seed, 0, "curvature sample")
    for batch in _told(chunks, "scaling bases", options.batch_tokens, chunks.small_groups(sample)):
        # other labels than those that made the bases, which would look too steep along them
        uniforms = label_uniforms(options.seed, batch, "curvature labels")
        _, drawn = signals(steered, batch, sampled=uniforms)
        assert drawn is not None
        # rows are means over tokens, and Σ_t g_t g_tᵀ has the square of their sum as its expectation
        weight = batch.scored.double()[:, None] ** 2  # (B, 1)
        for total, space, gradient in zip(totals, spaces, assemble(spaces, drawn), strict=True):
            # tr F / p of each part: the mean square of its gates' gradients
            squares = [gradient[:, part].square().mean(dim=1) for part in space.parts()]  # (B,) each
            total += (torch.stack(squares, dim=1).double().cpu() * weight).sum(dim=0)
        tokens += float(batch.scored.sum())
    for total, space in zip(totals, spaces, strict=True):
        for number, value in enumerate((total / max(1.0, tokens)).tolist()):
            # a layer that no gradient reaches has nothing to scale
            if value > 0:
                space.scale(number, value**-0.5)


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
    wanted = sample_size(width)
    enough = int(np.searchsorted(np.cumsum(chunks.lengths[order]), wanted)) + 1
    return np.sort(order[:enough])
