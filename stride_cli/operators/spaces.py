"""Operator spaces: what a steering operator is allowed to change, and the gradient of a loss in its gates.

Every space turns a gate vector ``a`` (one per subset) into a shift of the frozen model's activations, linear
in ``a``: of the residual stream at one layer (site ``"residual"``), of what linear layers inside the blocks
give (``"layers"``), or of the output logits before any soft cap (``"logit"``).

============================  =========================================  ====================================
space                         shift                                      source
============================  =========================================  ====================================
``residual``                  ``U (a ⊙ SiLU(W LN(h)))``                  paper, Table operator_arch
``residual-matrix``           ``U (a V LN(h))``, a is r' × r              design, PCA bases on both sides
``mlp-matrix``                ``U_j (a_j V_j φ_j)``, j: last layer of    as above; φ: what the layer reads
                              every feed-forward part
``linear-matrix``             the same, j: every linear layer            as above
``logit``                     ``S (a B LN(h_final))``, a is c × r         paper, §3.1; S: buckets to tokens
``token-logit``               ``S (a B LN(h_0))``, a is c × r             as logit, read at the embedding
``head-matrix``               ``S (a B [h_final, 1])``, a is c × r        as logit, in the head's own units
``pair-logit``                ``a_g`` for y after x, g = (x, y)           every pair of tokens of the corpus
============================  =========================================  ====================================

A sum of spaces is written with ``+`` (``residual-matrix+logit``): all its shifts are applied at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from stride_cli.errors import UsageError
from stride_cli.randomness import stream, torch_seed

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

SPACE_NAMES = (
    "residual",
    "residual-matrix",
    "logit",
    "token-logit",
    "pair-logit",
    "head-matrix",
    "mlp-matrix",
    "linear-matrix",
)
_ENTRIES = 1 << 21  # positions × gates looked up at once
# gates that are a change of a network's own weights, so that its training time holds in them
WEIGHT_SPACES = frozenset(("head-matrix", "linear-matrix"))


def parse_space(text: str) -> tuple[str, ...]:
    """The spaces named by ``"residual-matrix+logit"``, in order.

    Raises
    ------
    UsageError
        A name is unknown or repeated.
    """
    names = tuple(part.strip() for part in text.split("+"))
    for name in names:
        if name not in SPACE_NAMES:
            raise UsageError(
                f"unknown operator space '{name}' in '{text}'",
                fix=f"use one of {', '.join(SPACE_NAMES)}, or a sum such as residual-matrix+logit",
            )
    if len(set(names)) != len(names):
        raise UsageError(f"operator space '{text}' names a space twice", fix="name each space once")
    if "mlp-matrix" in names and "linear-matrix" in names:
        raise UsageError(
            f"operator space '{text}': linear-matrix acts where mlp-matrix does, and at the other layers",
            fix="name one of the two",
        )
    return names


def layer_norm(hidden: torch.Tensor) -> torch.Tensor:
    """LayerNorm without parameters over the last axis, in float32 (paper, Table operator_arch)."""
    return F.layer_norm(hidden.float(), (hidden.shape[-1],))


class OperatorSpace(torch.nn.Module):
    """A family of steering operators that share one basis and differ in their gates.

    Attributes
    ----------
    name : str
    site : str          ``"residual"`` (shift added to h at the layer), ``"layers"`` (to what linear layers
                        inside the blocks give) or ``"logit"`` (to the logits)
    gate_size : int     p, the length of one gate vector
    """

    name: ClassVar[str]
    site: ClassVar[str]
    gate_size: int

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """The shift that each row's gates cause.

        Parameters
        ----------
        hidden : (B, T, d)     residual stream at the layer, or the final normed state for logit spaces
        gates : (B, p)         one gate vector per row

        Returns
        -------
        Tensor (B, T, d) or, for logit spaces, (B, T, V); float32
        """
        raise NotImplementedError

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """Gradient in the gates, per row, of ``Σ_t ⟨cotangent_t, shift_t⟩``.

        Parameters
        ----------
        hidden : (B, T, d)
        cotangent : (B, T, d) or (B, T, V)     zero at positions that are not scored

        Returns
        -------
        Tensor (B, p) float32
        """
        raise NotImplementedError

    def parts(self) -> list[slice]:
        """The gates that have directions of their own, in order: those of each layer, or all of them."""
        return [slice(0, self.gate_size)]

    def scale(self, part: int, factor: float) -> None:
        """Multiply the shift that the gates of one of the `parts` cause, in place."""
        raise NotImplementedError

    def arrays(self) -> dict[str, np.ndarray]:
        """The basis as arrays to store, float32 (integers for index arrays)."""
        return {name: value.detach().cpu().numpy() for name, value in self.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        """What rebuilds the space around its arrays."""
        return {"name": self.name, "gate_size": self.gate_size}


class ResidualSpace(OperatorSpace):
    """Rank-r gate in the residual stream: ``U (a ⊙ SiLU(W LN(h)))`` (paper, Table operator_arch).

    Parameters
    ----------
    W : (r, d) float32     projection down
    U : (d, r) float32     projection back
    """

    name = "residual"
    site = "residual"

    def __init__(self, W: torch.Tensor, U: torch.Tensor) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(W.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.gate_size = W.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        features = F.silu(layer_norm(hidden) @ self.W.T)  # (B, T, r)
        return (features * gates[:, None, :]) @ self.U.T

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        features = F.silu(layer_norm(hidden) @ self.W.T)
        return (features * (cotangent.float() @ self.U)).sum(dim=1)

    def scale(self, part: int, factor: float) -> None:
        self.U.data.mul_(factor)


class ResidualMatrixSpace(OperatorSpace):
    """Matrix gate between two bases of the residual stream: ``U (a V LN(h))``.

    Parameters
    ----------
    V : (r, d) float32     leading principal directions of the normed activations
    U : (d, r') float32    leading principal directions of the loss gradients

    A gate vector is the (r', r) matrix, row by row: p = r' r.
    """

    name = "residual-matrix"
    site = "residual"

    def __init__(self, V: torch.Tensor, U: torch.Tensor) -> None:
        super().__init__()
        self.V = torch.nn.Parameter(V.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.gate_size = U.shape[1] * V.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        matrix = gates.reshape(len(gates), self.U.shape[1], self.V.shape[0])  # (B, r', r)
        return (layer_norm(hidden) @ self.V.T) @ matrix.transpose(1, 2) @ self.U.T

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        inner = layer_norm(hidden) @ self.V.T  # (B, T, r)
        outer = cotangent.float() @ self.U  # (B, T, r')
        return torch.bmm(outer.transpose(1, 2), inner).flatten(1)

    def scale(self, part: int, factor: float) -> None:
        self.U.data.mul_(factor)


class LayerMatrixSpace(OperatorSpace):
    """Matrix gates at linear layers inside the blocks: ``U_j (a_j V_j φ_j)``, added to what layer j makes of
    φ_j.

    Parameters
    ----------
    V : (Σ_j r_j in_j,) float32     leading principal directions of what each layer reads, (r_j, in_j) one
                                    after the other, row by row
    U : (Σ_j out_j r'_j,) float32   of the loss gradients in what it gives, (out_j, r'_j)
    shapes : (J, 4) int64           in_j, r_j, out_j, r'_j

    A gate vector is the J matrices (r'_j, r_j) one after the other, row by row: p = Σ_j r'_j r_j.
    """

    site = "layers"
    which: ClassVar[str]  # of the model's linear layers: see `AttributableModel.linear_layers`

    def __init__(self, V: torch.Tensor, U: torch.Tensor, shapes: torch.Tensor) -> None:
        super().__init__()
        self.V = torch.nn.Parameter(V.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.register_buffer("shapes", shapes.long().clone())
        self._shapes = [tuple(row) for row in shapes.tolist()]
        sizes = np.asarray([(r * i, o * s, s * r) for i, r, o, s in self._shapes], np.int64)
        self._starts = np.concatenate([np.zeros((1, 3), np.int64), sizes.cumsum(axis=0)])
        self.gate_size = int(self._starts[-1, 2])

    @classmethod
    def from_bases(cls, V: Iterable[torch.Tensor], U: Iterable[torch.Tensor]) -> LayerMatrixSpace:
        """From V_j (r_j, in_j) and U_j (out_j, r'_j) of every layer."""
        V, U = list(V), list(U)
        shapes = [[v.shape[1], v.shape[0], u.shape[0], u.shape[1]] for v, u in zip(V, U, strict=True)]
        flat = [torch.cat([matrix.reshape(-1) for matrix in matrices]) for matrices in (V, U)]
        return cls(flat[0], flat[1], torch.tensor(shapes))

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor, number: int = 0) -> torch.Tensor:
        """The shift (B, T, out) of one layer, from what it reads (B, T, in)."""
        _, r, _, s = self._shapes[number]
        start = int(self._starts[number, 2])
        matrix = gates[:, start : start + s * r].reshape(len(gates), s, r)
        V, U = self.bases(number)
        return (hidden.float() @ V.T) @ matrix.transpose(1, 2) @ U.T

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor, number: int = 0) -> torch.Tensor:
        """The part (B, r' r) of the gates of one layer, from its (B, T, in) and (B, T, out)."""
        V, U = self.bases(number)
        inner = hidden.float() @ V.T
        outer = cotangent.float() @ U
        return torch.bmm(outer.transpose(1, 2), inner).flatten(1)

    def bases(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """V_j (r, in) and U_j (out, r') of one layer."""
        i, r, o, s = self._shapes[number]
        v, u = self._starts[number, :2].tolist()
        return self.V[v : v + r * i].view(r, i), self.U[u : u + o * s].view(o, s)

    def parts(self) -> list[slice]:
        ends = self._starts[:, 2].tolist()
        return [slice(start, end) for start, end in pairwise(ends)]

    def scale(self, part: int, factor: float) -> None:
        self.bases(part)[1].mul_(factor)


class MlpMatrixSpace(LayerMatrixSpace):
    """`LayerMatrixSpace` at the last linear layer of every block's feed-forward part."""

    name = "mlp-matrix"
    which = "mlp"


class LinearMatrixSpace(LayerMatrixSpace):
    """`LayerMatrixSpace` at every linear layer of every block."""

    name = "linear-matrix"
    which = "all"


class LogitSpace(OperatorSpace):
    """Shift of the output logits: ``S (a B LN(h_final))`` (paper, §3.1, with a factored vocabulary).

    Parameters
    ----------
    B : (r, d) float32          directions of the normed final state
    bucket : (V,) int64         the bucket of each token, 0 … c − 1
    sign : (V,) float32         how strongly the token reads its bucket, with a random sign where tokens share
                                buckets (+ when every token has its own)

    A gate vector is the (c, r) matrix, row by row: p = c r. With c = V this is the paper's ``a_k ∈ R^{r×C}``;
    with c < V tokens share buckets with random signs (a count sketch), so that K × p stays affordable.
    """

    name = "logit"
    site = "logit"
    # what is read: "final" state, "input" of the first block, or the current tokens themselves
    source: ClassVar[str] = "final"

    def reads(self, final: torch.Tensor, inputs: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """The one of them that this space reads; `inputs` may be missing where no space `reads_input`."""
        if self.source == "final":
            return final
        if self.source == "tokens":
            return ids
        assert inputs is not None
        return inputs

    def __init__(self, B: torch.Tensor, bucket: torch.Tensor, sign: torch.Tensor) -> None:
        super().__init__()
        self.B = torch.nn.Parameter(B.float().clone())
        self.register_buffer("bucket", bucket.long().clone())
        self.register_buffer("sign", sign.float().clone())
        self.bucket: torch.Tensor
        self.sign: torch.Tensor
        self.n_buckets = int(bucket.max()) + 1
        # every token has its own bucket: nothing to gather
        self.identity = self.n_buckets == len(bucket) and bool(
            (self.bucket == torch.arange(len(bucket))).all()
        )
        self.gate_size = self.n_buckets * B.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        matrix = gates.reshape(len(gates), self.n_buckets, self.B.shape[0])  # (B, c, r)
        shift = self.features(hidden) @ matrix.transpose(1, 2)  # (B, T, c)
        return (shift if self.identity else shift[..., self.bucket]) * self.sign

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        features = self.features(hidden)
        # features first: (r, V) per row instead of sketching (T, V)
        return self._sketch(torch.bmm(features.transpose(1, 2), cotangent.float()))

    @staticmethod
    def basis_input(hidden: torch.Tensor) -> torch.Tensor:
        """What B reads of the activations (…, d), float32."""
        return layer_norm(hidden)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, d) → (…, r)."""
        return self.basis_input(hidden) @ self.B.T

    def scale(self, part: int, factor: float) -> None:
        self.sign.mul_(factor)

    def _sketch(self, full: torch.Tensor) -> torch.Tensor:
        """(B, r, V) → (B, c r): tokens added up in their buckets."""
        full = full * self.sign
        if not self.identity:
            sketch = full.new_zeros(*full.shape[:2], self.n_buckets)
            full = sketch.index_add_(2, self.bucket, full)
        return full.transpose(1, 2).flatten(1)


class TokenLogitSpace(LogitSpace):
    """`LogitSpace` that reads the current token's embedding (the input of the first block) instead of the
    final state: which token is made likelier after which, whatever the context."""

    name = "token-logit"
    source = "input"


class PairLogitSpace(LogitSpace):
    """One gate for every pair of tokens that follow each other in the corpus: ``a_g`` is added to the logit
    of y wherever the current token is x, g = (x, y).

    What `TokenLogitSpace` says of all tokens in r directions, this says of each pair by itself, so that what
    only a few chunks teach (a name's second half) is not drowned by what all of them do.

    Parameters
    ----------
    start : (V + 1,) int64      the gates of token x are start[x] … start[x + 1] − 1
    second : (p,) int64         y of each gate
    factor : (p,) float32       how strongly each gate shifts its logit
    """

    name = "pair-logit"
    source = "tokens"

    def __init__(self, start: torch.Tensor, second: torch.Tensor, factor: torch.Tensor) -> None:
        OperatorSpace.__init__(self)
        self.register_buffer("start", start.long().clone())
        self.register_buffer("second", second.long().clone())
        self.register_buffer("factor", factor.float().clone())
        self.start: torch.Tensor
        self.second: torch.Tensor
        self.factor: torch.Tensor
        self.gate_size = len(second)

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        ids, length = hidden, hidden.shape[1]
        shift = gates.new_zeros(ids.numel(), len(self.start) - 1)
        for position, gate in self._entries(ids):
            values = gates[position // length, gate] * self.factor[gate]
            shift.index_put_((position, self.second[gate]), values)  # no place twice: each pair is there once
        return shift.view(*ids.shape, -1)

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        ids, length = hidden, hidden.shape[1]
        flat = cotangent.reshape(ids.numel(), -1)
        gradient = flat.new_zeros(len(ids) * self.gate_size, dtype=torch.float32)
        for position, gate in self._entries(ids):
            values = flat[position, self.second[gate]].float() * self.factor[gate]
            gradient.index_add_(0, position // length * self.gate_size + gate, values)
        return gradient.view(len(ids), self.gate_size)

    def scale(self, part: int, factor: float) -> None:
        self.factor.mul_(factor)

    def _entries(self, ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Positions (of B T) and the gates of their tokens, two (N,) int64, in parts that fit in memory."""
        tokens = ids.reshape(-1)
        first = self.start[tokens]
        counts = self.start[tokens + 1] - first
        ends = counts.cumsum(0)
        begin, total = 0, 0
        while begin < len(tokens):
            stop = max(begin + 1, int(torch.searchsorted(ends, total + _ENTRIES, right=True)))
            own = counts[begin:stop]
            position = torch.repeat_interleave(torch.arange(begin, stop, device=ids.device), own)
            before = torch.repeat_interleave(ends[begin:stop] - own - total, own)
            within = torch.arange(len(position), device=ids.device) - before
            yield position, first[position] + within
            begin, total = stop, int(ends[stop - 1])


class HeadMatrixSpace(LogitSpace):
    """`LogitSpace` that reads the final state as the output layer itself does, B (r, d + 1): gates are a
    change of that layer's weights and bias, in its own units."""

    name = "head-matrix"

    @staticmethod
    def basis_input(hidden: torch.Tensor) -> torch.Tensor:
        return F.pad(hidden.float(), (0, 1), value=1.0)


def first_block(spaces: Iterable[OperatorSpace], layer: int) -> int:
    """How many blocks run unsteered: 0 where a space acts in all of them, else `layer`."""
    return 0 if layer_space(spaces) else layer


def layer_space(spaces: Iterable[OperatorSpace]) -> LayerMatrixSpace | None:
    """The one of the spaces that acts at linear layers inside the blocks, if there is one."""
    return next((space for space in spaces if isinstance(space, LayerMatrixSpace)), None)


def entry_states(
    model: AttributableModel,
    spaces: Iterable[OperatorSpace],
    layer: int,
    ids: torch.Tensor,
    *,
    with_inputs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a steered continuation starts from: the residual stream (B, T, d) after the `first_block` blocks,
    and the input of the first block, where a space reads it (or `with_inputs`). Without gradients."""
    spaces = list(spaces)
    start = first_block(spaces, layer)
    with torch.no_grad():
        hidden = model.hidden(ids, start)
        if not (with_inputs or reads_input(spaces)):
            return hidden, None
        return hidden, hidden.detach() if start == 0 else model.hidden(ids, 0)


def reads_input(spaces: Iterable[OperatorSpace]) -> bool:
    """Whether any of the spaces reads the input of the first block."""
    return any(isinstance(space, LogitSpace) and space.source == "input" for space in spaces)


_CLASSES: dict[str, type[OperatorSpace]] = {
    cls.name: cls
    for cls in (
        ResidualSpace,
        ResidualMatrixSpace,
        MlpMatrixSpace,
        LinearMatrixSpace,
        LogitSpace,
        TokenLogitSpace,
        PairLogitSpace,
        HeadMatrixSpace,
    )
}


# those that read activations by a basis of directions
LOGIT_SPACES: dict[str, type[LogitSpace]] = {
    name: cls for name, cls in _CLASSES.items() if issubclass(cls, LogitSpace) and cls is not PairLogitSpace
}


def space_from_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> OperatorSpace:
    """Rebuild a space from the arrays that `OperatorSpace.arrays` gave."""
    return _CLASSES[name](**{key: torch.from_numpy(np.array(value)) for key, value in arrays.items()})


def vocabulary_buckets(
    vocab_size: int, n_buckets: int, seed: int, name: str = "logit"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bucket and sign of every token for that space; the identity when there is a bucket for each.

    Returns
    -------
    bucket : (V,) int64, sign : (V,) float32
    """
    if vocab_size <= n_buckets:
        return torch.arange(vocab_size), torch.ones(vocab_size)
    generator = stream(seed, "vocabulary buckets" if name == "logit" else f"vocabulary buckets of {name}")
    # a shuffled round-robin fills the buckets evenly
    bucket = torch.from_numpy(generator.permutation(vocab_size) % n_buckets)
    sign = torch.from_numpy(generator.integers(0, 2, vocab_size) * 2.0 - 1.0)
    return bucket, sign.float()


def initial_space(
    name: str, *, d_model: int, vocab_size: int, rank: int, n_buckets: int, seed: int
) -> OperatorSpace:
    """A space with random bases, the start of `--fit sgd` (uniform ±1/√fan-in, as torch.nn.Linear)."""
    generator = torch.Generator().manual_seed(torch_seed(seed, "operator bases", SPACE_NAMES.index(name)))

    def uniform(rows: int, columns: int) -> torch.Tensor:
        bound = 1 / math.sqrt(columns)
        return (torch.rand(rows, columns, generator=generator) * 2 - 1) * bound

    rank = min(rank, d_model)
    if name == "residual":
        return ResidualSpace(uniform(rank, d_model), uniform(d_model, rank))
    if name == "residual-matrix":
        return ResidualMatrixSpace(uniform(rank, d_model), uniform(d_model, rank))
    bucket, sign = vocabulary_buckets(vocab_size, n_buckets, seed, name)
    kind = TokenLogitSpace if name == "token-logit" else LogitSpace
    return kind(uniform(rank, d_model), bucket, sign)
