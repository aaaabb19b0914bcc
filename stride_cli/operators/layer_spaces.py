"""Spaces that act at linear layers inside the blocks: of feed-forward parts, or of everything."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from functools import lru_cache, reduce
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from stride_cli.corpus.gate_budget import inside_gates
from stride_cli.errors import UsageError
from stride_cli.models.linear_layers import layer_widths
from stride_cli.operators.operator_space import BasisOptions, Observation, OperatorSpace, Sample
from stride_cli.operators.second_moments import Moments, leading_directions
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.operator_space import Signals

_MOST_UNITS = 2048  # of a wider layer so many units, drawn at random, are read


class LayerMatrixSpace(OperatorSpace):
    """Matrix gates at linear layers inside the blocks: ``U_j (a_j V_j φ_l)``, added to what the layer l of
    matrix j makes of φ_l.

    A layer has one matrix. Where it has a low-rank adapter, B A, training moved its weights by dB A + B dA
    alone, and it has two: one from the rows of A to all that it gives, and one from all that it reads to the
    columns of B.

    Parameters
    ----------
    V : (Σ_j r_j in_j,) float32     leading principal directions of what each layer reads, (r_j, in_j) one
                                    after the other, row by row
    U : (Σ_j out_j r'_j,) float32   of the loss gradients in what it gives, (out_j, r'_j)
    shapes : (J, 4) int64           in_j, r_j, out_j, r'_j
    layers : (J,) int64, ascending  each matrix's layer, where not every layer has one

    A gate vector is the J matrices (r'_j, r_j) one after the other, row by row: p = Σ_j r'_j r_j.
    """

    site = "layers"
    which: ClassVar[str]  # of the model's linear layers: see `AttributableModel.linear_layers`
    whitens = True
    diagonal_fisher = True

    def __init__(
        self, V: torch.Tensor, U: torch.Tensor, shapes: torch.Tensor, layers: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.V = torch.nn.Parameter(V.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.register_buffer("shapes", shapes.long().clone())
        self._shapes = [tuple(row) for row in shapes.tolist()]
        sizes = np.asarray([(r * i, o * s, s * r) for i, r, o, s in self._shapes], np.int64)
        self._starts = np.concatenate([np.zeros((1, 3), np.int64), sizes.cumsum(axis=0)])
        self.gate_size = int(self._starts[-1, 2])
        self.register_buffer("layers", None if layers is None else layers.long().clone())
        at = list(range(len(self._shapes))) if layers is None else layers.tolist()
        steps = [after - before for before, after in pairwise([-1, *at])]
        if len(at) != len(self._shapes) or not set(steps) <= {0, 1} or steps[:1] == [0]:
            raise ValueError(f"matrices of layers {at[:4]} …, of {len(self._shapes)} shapes")
        # the numbers of each layer's matrices
        self.matrices = [[number for number, _ in each] for _, each in groupby(enumerate(at), itemgetter(1))]
        # the first matrix of those that see what they read alike, as those of queries, keys and values do
        self._alike: list[int] = []
        for number in range(len(at)):
            V, before = (self.bases(each)[0] for each in (number, max(0, number - 1)))
            self._alike.append(self._alike[-1] if number and V.equal(before) else number)

    @classmethod
    def from_bases(
        cls, V: Iterable[torch.Tensor], U: Iterable[torch.Tensor], layers: Iterable[int] | None = None
    ) -> Self:
        """Build the space from V_j (r_j, in_j) and U_j (out_j, r'_j) of every matrix."""
        V, U = list(V), list(U)
        shapes = [[v.shape[1], v.shape[0], u.shape[0], u.shape[1]] for v, u in zip(V, U, strict=True)]
        flat = [torch.cat([matrix.reshape(-1) for matrix in matrices]) for matrices in (V, U)]
        at = None if layers is None else torch.tensor(list(layers))
        return cls(flat[0], flat[1], torch.tensor(shapes), at)

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Shift (B, T, out) one layer, from what it reads (B, T, in)."""
        parts = []
        for number in self.matrices[layer]:
            (V, U), (_, r, _, s) = self.bases(number), self._shapes[number]
            start = int(self._starts[number, 2])
            matrix = gates[..., start : start + s * r].unflatten(-1, (s, r))  # a_j
            parts.append((hidden.float() @ V.T) @ matrix.transpose(1, 2) @ U.T)
        return reduce(torch.add, parts)

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Compute the gradient (B, Σ r' r) in the gates of one layer, from its (B, T, in) and (B, T, out)."""
        return torch.cat(self._gradients(hidden, cotangent, layer, {}), dim=1)

    def _gradients(
        self, hidden: torch.Tensor, cotangent: torch.Tensor, layer: int, seen: dict[Any, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute the gradient in each of a layer's matrices; `seen` holds the last V φ."""
        found = []
        for number in self.matrices[layer]:
            V, U = self.bases(number)
            # Σ_t (Uᵀ c_t) (V φ_t)ᵀ: the layer's weight gradient Σ_t c_t φ_tᵀ seen through both bases
            key = _place(hidden), self._alike[number]
            if key not in seen:
                seen.clear()
                seen[key] = F.linear(hidden.float(), V)  # (B, T, r)
            outer = F.linear(cotangent.float(), U.T)  # (B, T, r')
            found.append(torch.bmm(outer.transpose(1, 2), seen[key]).flatten(1))
        return found

    def gradient_from(self, found: Signals) -> torch.Tensor:
        seen: dict[Any, torch.Tensor] = {}
        gradient = torch.empty(len(found.loss), self.gate_size, device=found.loss.device)
        for layer, pair in enumerate(zip(found.inner, found.given, strict=True)):
            for number, part in zip(self.matrices[layer], self._gradients(*pair, layer, seen), strict=True):
                gradient[:, self._starts[number, 2] : self._starts[number + 1, 2]] = part
        return gradient

    def bases(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V_j (r, in) and U_j (out, r') of one matrix."""
        i, r, o, s = self._shapes[number]
        v, u = self._starts[number, :2].tolist()
        return self.V[v : v + r * i].view(r, i), self.U[u : u + o * s].view(o, s)

    @classmethod
    def probe(cls) -> OperatorSpace:
        return cls.from_bases([torch.zeros(1, 1)], [torch.zeros(1, 1)])

    @classmethod
    def observe(cls, seen: Observation, moments: Moments, options: BasisOptions) -> None:
        # a prediction is moved by what stands at it and before it: t counts where some t' ≥ t is used
        active = (seen.used.flip(1).cumsum(1) > 0).flip(1)  # (B, T)
        scored = (active * seen.scored[:, None]).flatten()  # (B T,)
        for number, (read, pull) in enumerate(zip(seen.drawn.inner, seen.drawn.given, strict=True)):
            # A_j = Σ_t φ_t φ_tᵀ of what layer j reads, (B, T, in) …
            if not number or _place(read) != _place(seen.drawn.inner[number - 1]):
                moments.add(("read", number), _observed(read, options.seed), active.flatten())
            if options.all_labels:
                continue  # see `_label_moments`
            # … and S_j = Σ_t δ_t δ_tᵀ of the gradients in what it gives, (B, T, out), per token again
            moments.add(("pull", number), _observed(pull, options.seed), scored)

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        widths = [layer_widths(layer) for layer in sample.model.linear_layers(cls.which)]
        ranks = cls.layer_ranks(sample.model, options.ranks[cls.name])
        adapters, moments = sample.model.adapter_matrices(cls.which), sample.moments
        pulls = cls._label_moments(sample, options.seed) if options.all_labels else moments
        tokens = max(1, moments.rows(("read", 0)))  # that a scored prediction depends on
        V, U, known = [], [], dict[int, torch.Tensor]()
        for number, ((wide, long), matrices) in enumerate(zip(widths, ranks, strict=True)):
            # F_j ≈ A_j ⊗ S_j, and V_j = A_j^{−1/2}, U_j = S_j^{−1/2} along their leading directions
            if moments.rows(("read", number)):  # else as the one before it reads
                A, known = moments.take(("read", number)) / tokens, {}
            reads, gives = (A, wide), (pulls.take(("pull", number)) / tokens, long)
            spans: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)]
            if adapters is not None:  # directions are inside the span of these columns
                down, up = adapters[number]
                spans = [(down.T, None), *([] if up is None else [(None, up)])]
            for (r, s), (rows, columns) in zip(matrices, spans, strict=True):
                if rows is not None or r not in known:
                    known[r] = _directions(*reads, r, rows, options).T
                V.append(known[r])
                U.append(_directions(*gives, s, columns, options))
        layers = [number for number, matrices in enumerate(ranks) for _ in matrices]
        return cls.from_bases(V, U, None if adapters is None else layers)

    @classmethod
    def layer_ranks(cls, model: AttributableModel, rank: int) -> list[list[tuple[int, int]]]:
        """Count (r_j, r'_j) of every layer's matrices at a rank: directions of what it reads and gives."""
        pairs = [layer_widths(layer) for layer in model.linear_layers(cls.which)]
        ranks = [tuple(layer_rank(rank, width, model.d_model) for width in pair) for pair in pairs]
        adapters = model.adapter_matrices(cls.which)
        if adapters is None:
            return [[(read, given)] for read, given in ranks]
        return [
            [(min(len(A), wide), given), *([] if B is None else [(read, min(B.shape[1], long))])]
            for (A, B), (read, given), (wide, long) in zip(adapters, ranks, pairs, strict=True)
        ]

    @staticmethod
    def _label_moments(sample: Sample, seed: int) -> Moments:
        """Sum Σ_i Σ_c p_c δ_ic δ_icᵀ of every layer, (out, out) float64, δ_ic the gradient of label c."""
        moments = Moments()
        for found, probability in sample.each_label():
            root = probability.sqrt()  # (B, 1)
            for number, pull in enumerate(found.given):
                # a classifier's states have one position
                moments.add(("pull", number), _observed(pull[:, :1], seed) * root.to(pull.dtype))
        return moments

    @classmethod
    def check_model(cls, model: AttributableModel) -> None:
        if not model.linear_layers(cls.which):
            others = "logit" if model.classes else "residual-matrix+logit+token-logit+pair-logit"
            raise UsageError(
                f"space {cls.name} steers linear layers, of which {model.name} has none that can be told",
                fix=f"use --space {others}",
            )

    @classmethod
    def choose_rank(cls, model: AttributableModel, n_subsets: int, asked: int | None) -> int:
        """Choose the rank that `inside_gates` allows: Σ_j r'_j r_j = r² Σ_j √(in_j out_j) / d, and of
        adapters, one side of whose matrices is given, the largest that it allows."""
        if asked:
            return asked
        adapted = model.adapter_matrices(cls.which) is not None
        most = inside_gates(n_subsets, finetuned=not model.pretrained, adapted=adapted)
        if adapted:
            fits = range(1, model.d_model + 1)  # twice as many gates: training moved nothing else
            count = bisect.bisect_right(fits, 2 * most, key=lambda rank: cls.reserved_gates(model, rank))
            return max(1, count)
        pairs = [layer_widths(layer) for layer in model.linear_layers(cls.which)]
        widths = sum(float(np.sqrt(read * given)) for read, given in pairs) / model.d_model
        rank = int(np.sqrt(most / max(1.0, widths)))
        return min(max(rank, 1), model.d_model)

    @classmethod
    def reserved_gates(cls, model: AttributableModel, rank: int) -> int:
        """p at that rank."""
        return sum(read * given for each in cls.layer_ranks(model, rank) for read, given in each)

    def parts(self) -> list[slice]:
        ends = self._starts[:, 2].tolist()
        return [slice(start, end) for start, end in pairwise(ends)]

    def scale(self, part: int, factor: float) -> None:
        self.bases(part)[1].mul_(factor)

    def mean_squares(self, seen: Signals, probability: torch.Tensor) -> torch.Tensor:
        # in the eigenbasis of A ⊗ S the diagonal of F is the best correction of the product's eigenvalues
        # (EK-FAC; George et al. 2018); of one token g is an outer product, and so is its square
        parts = []
        for layer, (read, pull) in enumerate(zip(seen.inner, seen.given, strict=True)):
            for number in self.matrices[layer]:
                V, U = self.bases(number)
                outer = (pull[:, 0].float() @ U).square() * probability.float()  # (B, r')
                parts.append((outer.T @ (read[:, 0].float() @ V.T).square()).flatten())
        return torch.cat(parts)


class MlpMatrixSpace(LayerMatrixSpace):
    """`LayerMatrixSpace` at the last linear layer of every block's feed-forward part."""

    name = "mlp-matrix"
    which = "mlp"


class OutputMatrixSpace(LayerMatrixSpace):
    """`LayerMatrixSpace` at the layers with which attention and feed-forward parts write into the stream."""

    name = "output-matrix"
    which = "outputs"


class LinearMatrixSpace(LayerMatrixSpace):
    """`LayerMatrixSpace` at every linear layer of every block."""

    name = "linear-matrix"
    which = "all"
    of_weights = True


def layer_rank(rank: int, width: int, d_model: int) -> int:
    """Count the directions of what a layer reads or gives: `rank` of d_model, as the root of the width."""
    return max(1, min(width, _MOST_UNITS, round(rank * float(np.sqrt(width / d_model)))))


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr() or id(tensor), tensor.shape  # not every device tells where a tensor is


@lru_cache(maxsize=64)
def read_units(width: int, seed: int) -> torch.Tensor:
    """Choose the units of a layer's inputs or outputs that second moments are taken of, ascending."""
    return torch.from_numpy(np.sort(stream(seed, "inner units").permutation(width)[:_MOST_UNITS]))


def _observed(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Take the units that are read of (B, T, width): (B T, units), not a copy where these are all."""
    units = read_units(values.shape[-1], seed)
    some = values if len(units) == values.shape[-1] else values[..., units.to(values.device)]
    return some.flatten(0, 1)


def _among_all(directions: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Place directions (units that are read, r) among all: (width, r), zero at the others."""
    units = read_units(width, seed)
    if len(units) == width:
        return directions
    whole = torch.zeros(width, directions.shape[1])
    whole[units] = directions
    return whole


def _directions(
    moment: torch.Tensor, width: int, count: int, span: torch.Tensor | None, options: BasisOptions
) -> torch.Tensor:
    """Find leading directions, (width, count), by a second moment of the units that are read; of all, or
    inside the span of columns (width, count)."""
    if span is None:
        return _among_all(leading_directions(moment, count, options.damping), width, options.seed)
    whole = (moment.triu() + moment.triu(1).T).double()
    within = torch.linalg.qr(span.to(whole.dtype))[0]
    units = within[read_units(width, options.seed)].to(whole.device)
    return (within @ leading_directions(units.T @ whole @ units, count, options.damping).to(within)).float()
