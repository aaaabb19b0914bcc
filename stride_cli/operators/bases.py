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
from dataclasses import replace
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

SAMPLE_TOKENS = 16_384  # that second moments are taken from, where there are so many
_SCALE_TOKENS = 4096  # that scales are taken from: one number a part is estimated, and no direction


def label_uniforms(seed: int, batch: Batch, name: str = "fisher labels") -> np.ndarray:
    """Uniforms (B, T) that draw the Fisher labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    return np.stack([stream(seed, name, int(row)).random(length) for row in batch.rows])


def fit_bases(
    model: AttributableModel, chunks: ChunkReader, names: Sequence[str], options: BasisOptions
) -> SteeredModel:
    """Fit spaces whose bases are leading principal directions on a random sample of the corpus.

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
    # 1. The model with probes, which mark the sites whose gradients are wanted: one for each site
    probes = {cls.site: probe.to(model.device) for cls in classes if (probe := cls.probe()) is not None}
    watched = SteeredModel(model, list(probes.values()), options.layer, fitting=True)
    groups = chunks.plan(options.batch_tokens, _sample(chunks, options.seed, SAMPLE_TOKENS))
    # 2. One pass over the sample, in which every space collects what it needs
    moments, prediction = _observe(watched, chunks, classes, options, groups)

    # for classifiers, whose few labels need not be drawn; asked by the spaces that want them
    def each_label() -> Iterator[tuple[Signals, torch.Tensor]]:
        for group in groups:
            yield from label_signals(watched, chunks.batch(group))

    # 3. Every space makes its basis of what it has collected
    with progress("fitting bases"):
        spaces = [
            cls.fit(Sample(model, chunks, own, prediction, each_label), options)
            for cls, own in zip(classes, moments, strict=True)
        ]
    moved = [space.to(model.device).requires_grad_(False) for space in spaces]
    steered = SteeredModel(model, moved, options.layer, fitting=True)
    # 4. Gates of whitened bases are put in one unit, that of F itself
    if options.damping is not None and any(space.whitens for space in spaces):
        _scale(steered, chunks, options)
    return replace(steered, fitting=False)


def _observe(
    watched: SteeredModel,
    chunks: ChunkReader,
    classes: Sequence[type[OperatorSpace]],
    options: BasisOptions,
    groups: Sequence[np.ndarray],
) -> tuple[list[Moments], torch.Tensor]:
    """Let every space collect what it needs of the sample, and sum the model's distribution of the next token
    over scored positions, (V,) float64."""
    model = watched.model
    moments = [Moments(rounded=watched.rounds) for _ in classes]
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
        seen = Observation(drawn, used, batch.scored.to(model.device))
        for cls, own in zip(classes, moments, strict=True):
            cls.observe(seen, own, options)
    return moments, prediction.cpu()


def _scale(steered: SteeredModel, chunks: ChunkReader, options: BasisOptions) -> None:
    """Scale whitened bases, in place, so that the mean eigenvalue of the Fisher matrix per token is what the
    space says (1, mostly): of every layer inside the blocks by itself, and of every other space."""
    spaces, device = steered.spaces, steered.model.device
    totals = [torch.zeros(len(space.parts()), dtype=torch.float64, device=device) for space in spaces]
    tokens = 0.0

    def of_drawn(batch: Batch) -> list[torch.Tensor]:
        # other labels than those that made the bases, which would look too steep along them
        uniforms = label_uniforms(options.seed, batch, "curvature labels")
        return gate_gradients(steered, batch, sampled=uniforms)[0]

    rows = _sample(chunks, options.seed, _SCALE_TOKENS, "curvature sample")
    groups = chunks.small_groups(rows, steered.chunks_at_once)
    batches = _told(chunks, "scaling bases", options.batch_tokens, groups)
    for batch, gradients in ShrinkingBatches().each(batches, of_drawn):
        # rows are means over tokens, and Σ_t g_t g_tᵀ has the square of their sum as its expectation
        weight = (batch.scored.double()[:, None] ** 2).to(device)  # (B, 1)
        for total, space, gradient in zip(totals, spaces, gradients, strict=True):
            # tr F / p of each part: the mean square of its gates' gradients
            squares = [gradient[:, part].square().mean(dim=1) for part in space.parts()]  # (B,) each
            total += (torch.stack(squares, dim=1).double() * weight).sum(dim=0)
        tokens += float(batch.scored.sum())
    for total, space in zip(totals, spaces, strict=True):
        if not space.whitens:
            continue
        for number, value in enumerate((total.cpu() / max(1.0, tokens)).tolist()):
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


def _sample(chunks: ChunkReader, seed: int, wanted: int, name: str = "basis sample") -> np.ndarray:
    """Draw chunks that hold so many tokens, ascending: all of them, where there are no more."""
    # at random, since corpora are in order of their sources; every chunk has a token
    order = stream(seed, name).permutation(chunks.n_chunks)[:wanted]
    reached = np.cumsum(chunks.lengths[order])
    return np.sort(order[: int(np.searchsorted(reached, wanted)) + 1])
