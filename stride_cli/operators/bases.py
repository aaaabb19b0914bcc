"""Data-driven bases: principal directions of activations and of loss gradients, from a sample of chunks.

Two kinds. *Orthonormal* bases only span a space; the Fisher matrix in its gates is then estimated and solved
as a whole. *Whitened* bases carry the preconditioner themselves: with the Fisher matrix approximated by a
Kronecker product A ⊗ S of the second moments of activations and of output gradients (K-FAC; Martens & Grosse
2015), A^{-1/2} and S^{-1/2} are applied to the directions, and what is left of the Fisher matrix in the gates
is the identity. For a vocabulary S is taken diagonal, the model's mean prediction. What the product leaves
out (how the positions of a chunk go together, the damping) is measured on chunks of its own: directions are
scaled so that the mean eigenvalue is 1 at every layer and in every logit space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.corpus.gate_budget import LOGIT_GATES, inside_gates, logit_gates
from stride_cli.data.batches import Batch, ChunkReader, scored_pairs
from stride_cli.operators.gradients import assemble, label_signals, signals
from stride_cli.operators.spaces import (
    LOGIT_SPACES,
    LayerMatrixSpace,
    LinearMatrixSpace,
    MlpMatrixSpace,
    OperatorSpace,
    PairLogitSpace,
    ResidualMatrixSpace,
    ResidualSpace,
    layer_norm,
    vocabulary_buckets,
)
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

# tokens that second moments are taken from: 64 for every direction, within these bounds
_SAMPLE_TOKENS = (16_384, 65_536)
LAYER_SPACES: dict[str, type[LayerMatrixSpace]] = {
    cls.name: cls for cls in (MlpMatrixSpace, LinearMatrixSpace)
}
_PAIRS_HELD = 1 << 24  # tokens whose pairs are counted at once
_MOST_UNITS = 2048  # of a wider layer so many units, drawn at random, are read
# a token rarer than the average one is not scaled up beyond it
_VOCABULARY_DAMPING = 1.0


def label_uniforms(seed: int, batch: Batch, name: str = "fisher labels") -> np.ndarray:
    """Uniforms (B, T) that draw the Fisher labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    return np.stack([stream(seed, name, int(row)).random(length) for row in batch.rows])


def fit_bases(
    model: AttributableModel,
    chunks: ChunkReader,
    names: Sequence[str],
    layer: int,
    *,
    ranks: dict[str, int],
    n_buckets: int | None,
    seed: int,
    batch_tokens: int,
    damping: float | None = None,
    all_labels: bool = False,
) -> list[OperatorSpace]:
    """Spaces whose bases are the leading principal directions on a random sample of the corpus.

    Activations enter as LN(h), uncentred; gradients are those of labels drawn from the model, so that the
    directions are the ones in which the model's own distribution is most sensitive.

    Parameters
    ----------
    names : space names, as from `parse_space`
    ranks : rank of each space by name; clipped to d
    n_buckets : c of the logit spaces; None for as many as keep c r within 131,072
    damping : whiten the bases, after adding this share of the mean eigenvalue to every eigenvalue; None for
        orthonormal bases. The diagonal gate (``residual``) always has orthonormal ones.
    all_labels : of a classifier: the gradients inside the blocks are those of every label, weighted by its
        probability, instead of one drawn

    Returns
    -------
    list of OperatorSpace, in the order of ``names``
    """
    # second moments; a classifier's activations have widths of their own at every layer
    inner = outer = torch.zeros(0, 0, dtype=torch.float64)
    read_by = {name: torch.zeros(0, 0, dtype=torch.float64) for name in names if name in LOGIT_SPACES}
    prediction = torch.zeros(model.vocab_size, dtype=torch.float64)
    residual = any("residual" in name for name in names)
    reads_input = "token-logit" in names
    inside = next((LAYER_SPACES[name] for name in names if name in LAYER_SPACES), None)
    probe: list[OperatorSpace] = []
    if residual:
        probe.append(ResidualSpace(torch.zeros(1, 1), torch.zeros(1, 1)).to(model.device))
    layers = []
    if inside is not None:
        layers = [layer_widths(layer) for layer in model.linear_layers(inside.which)]
        probe.append(inside.from_bases([torch.zeros(1, 1)], [torch.zeros(1, 1)]).to(model.device))
    reads: list[torch.Tensor] = [torch.zeros(0, 0, dtype=torch.float64)] * len(layers)
    gives = list(reads)
    units = {width: _units(width, seed) for pair in layers for width in pair}
    passed = 0  # tokens that a scored prediction reads
    sample = _sample(chunks, seed, model.d_model)
    for batch in chunks.batches(batch_tokens, sample):
        _, drawn = signals(
            model,
            probe,
            layer,
            batch,
            sampled=label_uniforms(seed, batch),
            with_inputs=reads_input,
            with_prediction=True,
        )
        assert drawn is not None and drawn.prediction is not None
        prediction += drawn.prediction.cpu()
        # position t is used when it predicts a scored token t + 1
        used = torch.nn.functional.pad(batch.weights[:, 1:] > 0, (0, 1)).to(model.device)
        for name, moment in read_by.items():
            space = LOGIT_SPACES[name]
            state = drawn.final if space.source == "final" else drawn.inputs
            assert state is not None
            read_by[name] = _add_moment(moment, space.basis_input(state)[used])
        if drawn.pull is not None:
            inner = _add_moment(inner, layer_norm(drawn.hidden)[used])
            # per token again: each row's loss is a mean over its scored tokens
            per_token = drawn.pull.double() * batch.scored.to(model.device)[:, None, None]
            outer = _add_moment(outer, per_token[used])
        if inside is not None:
            # what stands at or before a prediction moves it
            active = (used.flip(1).cumsum(1) > 0).flip(1)
            passed += int(active.sum())
            scored = batch.scored.to(model.device)[:, None, None]
            for number, (read, pull) in enumerate(zip(drawn.inner, drawn.given, strict=True)):
                # in float32: these are most of the arithmetic of the bases, and one batch is short
                wide, long = units[read.shape[-1]], units[pull.shape[-1]]
                reads[number] = _add_moment(reads[number], read[..., wide][active].float(), single=True)
                if all_labels:
                    continue  # see `_label_moments`
                per_token = pull[..., long][active] * scored.expand(*active.shape, 1)[active]
                gives[number] = _add_moment(gives[number], per_token.float(), single=len(long) > 256)
    if inside is not None and all_labels:
        gives = _label_moments(model, probe, layer, chunks.batches(batch_tokens, sample), units)
    tokens = max(1.0, float(prediction.sum()))
    spaces: list[OperatorSpace] = []
    for name in names:
        if name == "residual":
            rank = min(ranks[name], len(inner))
            spaces.append(ResidualSpace(_leading(inner, rank).T, _leading(outer, rank)))
        elif name == "residual-matrix":
            rank = min(ranks[name], len(inner))
            V = _leading(inner / tokens, rank, damping)
            spaces.append(ResidualMatrixSpace(V.T, _leading(outer / tokens, rank, damping)))
        elif inside is not None and name == inside.name:
            down, up = [], []
            for pair, read, given in zip(layers, reads, gives, strict=True):
                ranks_here = [layer_rank(ranks[name], width, model.d_model) for width in pair]
                down.append(
                    _spread(_leading(read / max(1, passed), ranks_here[0], damping), units, pair[0]).T
                )
                up.append(_spread(_leading(given / max(1, passed), ranks_here[1], damping), units, pair[1]))
            spaces.append(inside.from_bases(down, up))
        elif name == "pair-logit":
            spaces.append(_pair_space(chunks, model.vocab_size, ranks[name]))
        else:
            moment = read_by[name]
            rank = min(ranks[name], len(moment))
            # every space its own buckets, so that what collides in one does not in the other
            buckets = n_buckets or max(1, LOGIT_GATES[1] // rank)
            bucket, sign = vocabulary_buckets(model.vocab_size, buckets, seed, name)
            if damping is not None:
                mean = prediction / tokens
                sign = sign / (mean + _VOCABULARY_DAMPING / len(mean)).sqrt().float()
            spaces.append(LOGIT_SPACES[name](_leading(moment / tokens, rank, damping).T, bucket, sign))
    spaces = [space.to(model.device).requires_grad_(False) for space in spaces]
    if damping is not None and "residual" not in names:
        _to_unit_curvature(model, spaces, layer, chunks, seed, batch_tokens)
    return spaces


def _pair_space(chunks: ChunkReader, vocab_size: int, most: int) -> PairLogitSpace:
    """The corpus's pairs of a token and the scored one after it; the most frequent, where there are too many.

    The Fisher matrix of such gates is close to diagonal, and close to how often each pair occurs: factors are
    (count + 1)^−½, as if each had been seen once more.
    """
    pairs, counts = token_pairs(chunks, vocab_size)
    if len(pairs) > most:
        kept = np.sort(np.argsort(-counts, kind="stable")[:most])
        pairs, counts = pairs[kept], counts[kept]
    start = np.searchsorted(pairs, np.arange(vocab_size + 1) * vocab_size)
    factor = 1.0 / np.sqrt(counts + 1.0)
    return PairLogitSpace(
        torch.from_numpy(start), torch.from_numpy(pairs % vocab_size), torch.from_numpy(factor)
    )


def token_pairs(chunks: ChunkReader, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The `scored_pairs` of all chunks, ascending, and how often each occurs: two (N,) int64."""
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[np.ndarray] = []
    held = 0
    for row in range(chunks.n_chunks):
        waiting.append(scored_pairs(*chunks.chunk(row), vocab_size))
        held += len(waiting[-1])
        if held > _PAIRS_HELD or row + 1 == chunks.n_chunks:
            new, times = np.unique(np.concatenate(waiting), return_counts=True)
            pairs, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
            # exact: sums of integers below 2^53
            counts = np.bincount(place, np.concatenate([counts, times]), len(pairs)).astype(np.int64)
            waiting, held = [], 0
    return pairs, counts


def _to_unit_curvature(
    model: AttributableModel,
    spaces: Sequence[OperatorSpace],
    layer: int,
    chunks: ChunkReader,
    seed: int,
    batch_tokens: int,
) -> None:
    """Scale whitened bases, in place, so that the mean eigenvalue of the Fisher matrix per token is 1: of
    every layer inside the blocks by itself, and of every other space."""
    totals = [torch.zeros(len(space.parts()), dtype=torch.float64) for space in spaces]
    tokens = 0.0
    sample = _sample(chunks, seed, 0, "curvature sample")
    parts = chunks.small_groups(sample)
    for batch in (batch for part in parts for batch in chunks.batches(batch_tokens, part)):
        # other labels than those that made the bases, which would look too steep along them
        uniforms = label_uniforms(seed, batch, "curvature labels")
        _, drawn = signals(model, spaces, layer, batch, sampled=uniforms)
        assert drawn is not None
        # rows are means over tokens, and Σ_t g_t g_tᵀ has the square of their sum as its expectation
        weight = batch.scored.double()[:, None] ** 2
        for total, space, gradient in zip(totals, spaces, assemble(spaces, drawn), strict=True):
            squares = [gradient[:, part].square().mean(dim=1) for part in space.parts()]
            total += (torch.stack(squares, dim=1).double().cpu() * weight).sum(dim=0)
        tokens += float(batch.scored.sum())
    for total, space in zip(totals, spaces, strict=True):
        for number, value in enumerate((total / max(1.0, tokens)).tolist()):
            # a layer that no gradient reaches has nothing to scale
            if value > 0:
                space.scale(number, value**-0.5)


def _label_moments(
    model: AttributableModel,
    probe: Sequence[OperatorSpace],
    layer: int,
    batches: Iterable[Batch],
    units: dict[int, torch.Tensor],
) -> list[torch.Tensor]:
    """Σ_i Σ_c p_c δ_ic δ_icᵀ of every linear layer inside a classifier's blocks, (out, out) float64, δ_ic the
    gradient of label c in the units of what it gives that are read, by its width."""
    moments: list[torch.Tensor] = []
    for batch in batches:
        for found, probability in label_signals(model, probe, layer, batch):
            root = probability.sqrt()
            moments = moments or [torch.zeros(0, 0, dtype=torch.float64)] * len(found.given)
            for number, pull in enumerate(found.given):
                read = pull[:, 0, units[pull.shape[-1]]]
                moments[number] = _add_moment(moments[number], read * root.to(read.dtype))
    return moments


def layer_widths(layer: torch.nn.Module) -> tuple[int, int]:
    """How many numbers a linear layer reads, and how many it gives."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, torch.nn.Linear) else (rows, columns)  # else: Conv1D


def layer_rank(rank: int, width: int, d_model: int) -> int:
    """Directions kept of what a layer reads or gives: `rank` of d_model, as the root of the width else."""
    return max(1, min(width, _MOST_UNITS, round(rank * float(np.sqrt(width / d_model)))))


def layer_gates(model: AttributableModel, name: str, rank: int) -> int:
    """p of a space inside the blocks at that rank."""
    pairs = [layer_widths(layer) for layer in model.linear_layers(LAYER_SPACES[name].which)]
    return sum(
        layer_rank(rank, read, model.d_model) * layer_rank(rank, given, model.d_model)
        for read, given in pairs
    )


def affordable_rank(model: AttributableModel, name: str, n_subsets: int) -> int:
    """Rank of the gates inside the blocks, as `inside_gates` allows."""
    pairs = [layer_widths(layer) for layer in model.linear_layers(LAYER_SPACES[name].which)]
    widths = sum(float(np.sqrt(read * given)) for read, given in pairs) / model.d_model
    rank = int(np.sqrt(inside_gates(name, n_subsets) / max(1.0, widths)))
    return min(max(rank, 1), model.d_model)


def affordable_buckets(
    names: Sequence[str], ranks: dict[str, int], model: AttributableModel, n_subsets: int
) -> int:
    """Buckets c of each logit space, as `logit_gates` allows.

    The more buckets, the less of a chunk's gradient is lost to tokens that share one.
    """
    width = model.d_model
    logit = [min(ranks[name], width) for name in names if name in LOGIT_SPACES]
    others = sum(min(ranks[name], width) ** 2 for name in names if name == "residual-matrix")
    others += sum(layer_gates(model, name, ranks[name]) for name in names if name in LAYER_SPACES)
    return max(1, logit_gates(n_subsets, others, len(logit)) // max(logit, default=1))


def _units(width: int, seed: int) -> torch.Tensor:
    """Which units of a layer's inputs or outputs are read, ascending."""
    if width <= _MOST_UNITS:
        return torch.arange(width)
    return torch.from_numpy(np.sort(stream(seed, "inner units").permutation(width)[:_MOST_UNITS]))


def _spread(directions: torch.Tensor, units: dict[int, torch.Tensor], width: int) -> torch.Tensor:
    """Directions (units that are read, r) among all (width, r)."""
    if len(units[width]) == width:
        return directions
    whole = torch.zeros(width, directions.shape[1])
    whole[units[width]] = directions
    return whole


def _add_moment(moment: torch.Tensor, values: torch.Tensor, *, single: bool = False) -> torch.Tensor:
    """Moment (d, d) float64 plus the rows' (N, d) own, multiplied in float32 if `single`; an empty moment is
    zero."""
    rows = values if single else values.double()
    own = (rows.T @ rows).double().cpu()
    return moment + own if len(moment) else own


def _sample(chunks: ChunkReader, seed: int, width: int, name: str = "basis sample") -> np.ndarray:
    """Random chunks that hold enough tokens for second moments of that width, ascending."""
    order = stream(seed, name).permutation(chunks.n_chunks)
    wanted = int(np.clip(64 * width, *_SAMPLE_TOKENS))
    enough = int(np.searchsorted(np.cumsum(chunks.lengths[order]), wanted)) + 1
    return np.sort(order[:enough])


def _leading(moment: torch.Tensor, rank: int, damping: float | None = None) -> torch.Tensor:
    """Leading eigenvectors of a second moment, (d, rank) float32, each with a positive largest entry.

    With a damping they are divided by the root of (eigenvalue + damping × mean eigenvalue).
    """
    values, vectors = torch.linalg.eigh(moment)
    leading = vectors.flip(1)[:, :rank]
    largest = leading.gather(0, leading.abs().argmax(dim=0, keepdim=True))
    leading = leading * largest.sign()
    if damping is not None:
        spread = values.flip(0)[:rank].clamp_min(0) + damping * float(values.mean())
        leading = leading / spread.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    return leading.float()
