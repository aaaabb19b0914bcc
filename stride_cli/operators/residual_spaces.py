"""Spaces that act on the residual stream at one layer: the paper's diagonal gate, and a whole matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F

from stride_cli.operators.operator_space import BasisOptions, Observation, OperatorSpace, Sample, layer_norm
from stride_cli.operators.second_moments import Moments, leading_directions

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel


class _StreamSpace(OperatorSpace):
    """The base of both spaces: they read LN(h) along one basis, and write to h along another, U (d, r)."""

    site = "residual"
    U: torch.nn.Parameter

    @classmethod
    def probe(cls) -> OperatorSpace:
        return cls(torch.zeros(1, 1), torch.zeros(1, 1))

    @classmethod
    def observe(cls, seen: Observation, moments: Moments, options: BasisOptions) -> None:
        # second moments of what a gate reads, LN(h_t), and of the pull on what it adds to, −∂ℓ/∂h_t
        assert seen.drawn.pull is not None
        moments.add("read", layer_norm(seen.drawn.hidden)[seen.used])  # (N, d)
        per_token = seen.drawn.pull.double() * seen.scored[:, None, None]  # (B, T, d)
        moments.add("pull", per_token[seen.used])

    def scale(self, part: int, factor: float) -> None:
        self.U.data.mul_(factor)


class ResidualSpace(_StreamSpace):
    """Rank-r gate in the residual stream: ``U (a ⊙ SiLU(W LN(h)))`` (paper, Table operator_arch).

    Parameters
    ----------
    W : (r, d) float32     projection down
    U : (d, r) float32     projection back

    Its r gates are too few for a Kronecker product, which has r² of them: the bases are orthonormal, and F is
    estimated as a whole.
    """

    name = "residual"
    default_rank = 32  # tab:stride_hparams

    def __init__(self, W: torch.Tensor, U: torch.Tensor) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(W.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.gate_size = W.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        features = F.silu(layer_norm(hidden) @ self.W.T)  # (B, T, r), B_θ of the table
        return (features * gates[:, None, :]) @ self.U.T

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        features = F.silu(layer_norm(hidden) @ self.W.T)
        return (features * (cotangent.float() @ self.U)).sum(dim=1)

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        # W reads along what LN(h) mostly is, U writes along what the loss mostly asks for: eigenvectors of
        # Σ LN(h) LN(h)ᵀ and of Σ s sᵀ, s = −∂ℓ/∂h; no damping, for F in these r gates is estimated afterwards
        read, pull = sample.moments.take("read"), sample.moments.take("pull")
        rank = min(options.ranks[cls.name], len(read))
        return cls(leading_directions(read, rank).T, leading_directions(pull, rank))


class ResidualMatrixSpace(_StreamSpace):
    """Matrix gate between two bases of the residual stream: ``U (a V LN(h))``.

    Parameters
    ----------
    V : (r, d) float32     leading principal directions of the normed activations
    U : (d, r') float32    leading principal directions of the loss gradients

    A gate vector is the (r', r) matrix, row by row: p = r' r.
    """

    name = "residual-matrix"
    whitens = True

    def __init__(self, V: torch.Tensor, U: torch.Tensor) -> None:
        super().__init__()
        self.V = torch.nn.Parameter(V.float().clone())
        self.U = torch.nn.Parameter(U.float().clone())
        self.gate_size = U.shape[1] * V.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        matrix = gates.reshape(len(gates), self.U.shape[1], self.V.shape[0])  # (B, r', r)
        return (layer_norm(hidden) @ self.V.T) @ matrix.transpose(1, 2) @ self.U.T

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        # Σ_t (Uᵀ c_t) (V LN(h_t))ᵀ, one matrix product a row
        inner = layer_norm(hidden) @ self.V.T  # (B, T, r)
        outer = cotangent.float() @ self.U  # (B, T, r')
        return torch.bmm(outer.transpose(1, 2), inner).flatten(1)

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        # K-FAC: E[vec(g) vec(g)ᵀ] ≈ A ⊗ S for g_t = s_t x_tᵀ, with A = E[x xᵀ] of what is read and
        # S = E[s sᵀ] of what pulls. With V = A^{−1/2} and U = S^{−1/2} the gates' gradient Uᵀ g Vᵀ has F ≈ I
        read, pull = (sample.moments.take(key) / sample.tokens for key in ("read", "pull"))  # (d, d)
        rank = min(options.ranks[cls.name], len(read))
        V = leading_directions(read, rank, options.damping)
        return cls(V.T, leading_directions(pull, rank, options.damping))

    @classmethod
    def reserved_gates(cls, model: AttributableModel, rank: int) -> int:
        return min(rank, model.d_model) ** 2
