"""Curvature that a Kronecker product does not hold: the Gauss–Newton matrix of the loss of chunks, in gates,
which is only multiplied with.

A fit's bases are whitened by a Kronecker product of second moments. Were that product right, the matrix H
would be the identity in them. Along what a query asks for it is tens of times as large, as what many tokens
of the corpus have a say in is not told apart from what few have. So a query's gradient is corrected on its
way, by one step from g towards (H + λ)⁻¹ g (as of preconditioned iterations: ASTRA, arXiv:2507.14740):

    g' = g − H g / (h + λ),      h = |H g|² / gᵀ H g,

up to a factor; h is how large H is along H g, so that what it holds most of is taken off and not turned
round. What H does to a vector takes passes over chunks, and no more: how far steering along v moves the
logits, J v; what their softmax makes of that, C J v with C = diag(p) − p pᵀ; how gates would move the logits
there, Jᵀ C J v (Schraudolph 2002; Martens 2010).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.data.batches import consecutive_groups
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.operators.steered_model import SteeredModel

DAMPING = 300.0  # λ, where the mean eigenvalue of the whitened Fisher matrix is 1
_LOGITS = 1 << 24  # held at once, of each of the three passes
_TRIED = 1e-3  # the length of a first step, in gates
# of gradients that were corrected: measurement, projections and reading ask for the same
_KEPT_BYTES = 1 << 29


class GaussNewton:
    """The matrix of some chunks, and queries' gradients corrected by it.

    Parameters
    ----------
    chunks : of the corpus
    rows : (m,) int64       which of them it is of
    """

    def __init__(self, chunks: ChunkReader, rows: np.ndarray) -> None:
        self._chunks, self._rows = chunks, rows
        self._kept: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    @classmethod
    def drawn(cls, chunks: ChunkReader, count: int, seed: int) -> GaussNewton:
        """Of so many random chunks, all of them where there are no more; the same for one seed."""
        random, total = stream(seed, "gauss-newton sample"), chunks.n_chunks
        rows = np.arange(total) if count >= total else np.sort(random.choice(total, count, replace=False))
        return cls(chunks, rows)

    def corrected(self, steered: SteeredModel, gradients: Sequence[Tensor]) -> list[Tensor]:
        """g' of queries: (Q, p) float32 of every space, on the CPU, as it was given."""
        count = len(gradients[0])
        found = [torch.empty_like(each) for each in gradients]
        with progress("curvature", count * len(self._rows), unit="chunks") as bar:
            for query in range(count):
                own = self._of(steered, [each[query] for each in gradients], bar.advance)
                for place, corrected in zip(found, own, strict=True):
                    place[query] = corrected
        return found

    def _of(
        self, steered: SteeredModel, vectors: list[Tensor], advance: Callable[[int], None]
    ) -> list[Tensor]:
        key = hashlib.sha256(b"".join(each.numpy().tobytes() for each in vectors)).digest()
        if key in self._kept:
            advance(len(self._rows))
        else:
            self._kept[key] = self._one(steered, vectors, advance)
            while len(self._kept) * 4 * steered.gate_size > _KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _one(
        self, steered: SteeredModel, vectors: list[Tensor], advance: Callable[[int], None]
    ) -> list[Tensor]:
        curved = gauss_newton_product(steered, self._chunks, self._rows, vectors, advance)
        along = sum(float(each @ own) for each, own in zip(curved, vectors, strict=True))
        if not along > 0:
            return vectors
        largest = sum(float(each @ each) for each in curved) / along
        return [own - each / (largest + DAMPING) for each, own in zip(curved, vectors, strict=True)]


class Corrections:
    """Matrices of an index's models, each made once: what they have corrected is not corrected again.

    Parameters
    ----------
    chunks : of the corpus
    seed : of the index
    """

    def __init__(self, chunks: ChunkReader, seed: int) -> None:
        self._chunks, self._seed = chunks, seed
        self._made: dict[tuple[int, int], GaussNewton] = {}

    def of(self, number: int, count: int) -> GaussNewton:
        """Of one of the models, by its number, and so many chunks."""
        key = number, count
        if key not in self._made:
            self._made[key] = GaussNewton.drawn(self._chunks, count, self._seed)
        return self._made[key]


@dataclass(frozen=True)
class _Shift:
    """Gates as a pass takes them: (1, p) of every space, or, of the one that acts at linear layers, what they
    add to each layer's weights, (out, in), where that takes less arithmetic."""

    gates: list[Tensor | None]
    weights: list[Tensor]

    @classmethod
    def of(cls, steered: SteeredModel, vectors: Sequence[Tensor]) -> _Shift:
        """From (p,) of every space."""
        layers = steered.layer_space
        if layers is None or not layers.wide:
            return cls([each[None] for each in vectors], [])
        pairs = list(zip(steered.spaces, vectors, strict=True))
        (own,) = (vector for space, vector in pairs if space is layers)
        gates = [None if space is layers else vector[None] for space, vector in pairs]
        return cls(gates, layers.layer_weights(own))

    @property
    def parts(self) -> list[Tensor]:
        """All that there are."""
        return [*self.weights, *(each for each in self.gates if each is not None)]

    def each(self, change: Callable[[Tensor], Tensor]) -> _Shift:
        gates = [None if each is None else change(each) for each in self.gates]
        return _Shift(gates, [change(each) for each in self.weights])

    def as_gates(self, steered: SteeredModel) -> list[Tensor]:
        """(p,) of every space, where this is a gradient: in weights, or in gates."""
        layers = steered.layer_space
        inside = layers.of_layer_weights(self.weights) if layers is not None and self.weights else None
        return [inside if each is None else each[0] for each in self.gates]  # type: ignore[misc]


def gauss_newton_product(
    steered: SteeredModel,
    chunks: ChunkReader,
    rows: np.ndarray,
    vectors: Sequence[Tensor],
    advance: Callable[[int], None] = lambda count: None,
) -> list[Tensor]:
    """H v of one vector, H = (1/N) Σ_t J_tᵀ C_t J_t over the N scored tokens t of some chunks.

    Parameters
    ----------
    steered : SteeredModel
    chunks : of the corpus
    rows : (m,) int64           which of them
    vectors : (p,) float32 of every space, on the CPU
    advance : callable          told how many more chunks are done

    Returns
    -------
    list of (p,) float32, one per space, on the CPU; zero where no token is scored, or v is
    """
    device = steered.model.device
    found = [torch.zeros(space.gate_size) for space in steered.spaces]
    length = float(torch.stack([each.square().sum() for each in vectors]).sum().sqrt())
    if not length > 0:
        return found
    along = _Shift.of(steered, [(each / length).to(device) for each in vectors])
    sums = along.each(torch.zeros_like)
    tokens, step = 0.0, 0.0
    for group in chunks.plan(steered.tokens_at_once, rows):
        for batch in map(chunks.batch, chunks.small_groups(group)):
            for part in _parts(batch, steered.model.vocab_size):
                step = _add(steered, part, along, sums, step)
                tokens += float(part.scored.sum())
                advance(len(part.rows))
    scale = length / max(1.0, tokens)
    return [scale * each.cpu() for each in sums.as_gates(steered)]


def _parts(batch: Batch, vocabulary: int) -> Iterator[Batch]:
    """Rows that together have few enough logits."""
    counts = np.count_nonzero(batch.weights[:, 1:].numpy(), axis=1)
    for rows in consecutive_groups(counts, max(1, _LOGITS // vocabulary)):
        yield batch.take(slice(int(rows[0]), int(rows[-1]) + 1))


def _add(steered: SteeredModel, batch: Batch, along: _Shift, sums: _Shift, step: float) -> float:
    """Add Jᵀ C J v of a batch to `sums`, and give the step of its central difference, to go on with."""
    ids = batch.ids.to(steered.model.device)
    weights = batch.weights.to(steered.model.device)
    scored = torch.nonzero(weights[:, 1:])  # (S, 2): row, and position that predicts
    if not len(scored):
        return step
    share = weights[:, 1:][scored[:, 0], scored[:, 1]].float()
    at = scored[:, 0] * ids.shape[1] + scored[:, 1]
    with torch.no_grad():
        if not step:
            moved = _difference(steered, ids, at, along, _TRIED)
            size = float(moved.square().mean().sqrt())
            # where errors of rounding and of the third order are alike
            step = torch.finfo(steered.model.dtype).eps ** (1 / 3) / max(size, 1e-6)
        moved = _difference(steered, ids, at, along, step)
    start = along.each(lambda each: torch.zeros_like(each, requires_grad=True))
    with torch.enable_grad():
        logits = _logits(steered, ids, at, start)
        p = torch.softmax(logits.detach(), dim=-1)
        pull = p * (moved - (p * moved).sum(dim=-1, keepdim=True)) * share[:, None]
        taken = torch.autograd.grad(logits, start.parts, pull, allow_unused=True, materialize_grads=True)
    for whole, own in zip(sums.parts, taken, strict=True):
        whole.add_(own)
    return step


def _difference(steered: SteeredModel, ids: Tensor, at: Tensor, along: _Shift, step: float) -> Tensor:
    """J v by a central difference, (S, V)."""
    ahead, behind = (
        _logits(steered, ids, at, along.each(lambda each, way=way: way * step * each))  # type: ignore[misc]
        for way in (1.0, -1.0)
    )
    return (ahead - behind) / (2 * step)


def _logits(steered: SteeredModel, ids: Tensor, at: Tensor, shift: _Shift) -> Tensor:
    """Of a batch (B, T), at places of its B T positions, steered: (S, V) float32."""
    model, layer, layers = steered.model, steered.layer, steered.layer_space
    tokens = ids.flatten()[None, at]
    state, inputs = steered.entry_states(ids)
    read_inputs = None if inputs is None else inputs.flatten(0, 1)[None, at]
    pairs = [
        (space, gate) for space, gate in zip(steered.spaces, shift.gates, strict=True) if gate is not None
    ]
    inside = next((gate for space, gate in pairs if space is layers), None)

    def steer(number: int, read: Tensor, output: Tensor) -> Tensor:
        assert layers is not None
        if inside is None:
            return output + (read.float() @ shift.weights[number].T).to(output.dtype)
        return output + layers(read, inside, number).to(output.dtype)

    with model.at_layers(layers.which, ids.shape[1], steer) if layers else nullcontext():
        if (start := steered.first_block) < layer:
            state = model.advance(state, start, layer)
        for space, gate in pairs:
            if space.site == "residual":
                state = state + space(state, gate).to(state.dtype)
        final = model.continue_from(state, layer)
    final = final.flatten(0, 1)[None, at]  # (1, S, d)
    logits = model.uncapped_logits(final).float()
    for space, gate in pairs:
        if space.site == "logit":
            logits = logits + space(space.reads(final, read_inputs, tokens), gate)
    return model.soft_cap(logits)[0]
