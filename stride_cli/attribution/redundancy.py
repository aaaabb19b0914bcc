"""Chunks that say the same share what they explain: the query's gradient, preconditioned by the chunks' own
second moments.

The Fisher matrix in the bases is a Kronecker product, and of labels drawn from the model. What the chunks of
one corpus have in common, a template or a task, it does not know: every chunk is taken to teach all of it.
With G (n, p) the chunks' gradients as the fit weighs them,

    g'_x = (I + GᵀG / γ)⁻¹ g_x,      γ = ridge · mean ‖G_i‖²,

which is kernel ridge regression in the chunks (Woodbury). GᵀG itself is n × p numbers that nothing keeps; the
subsets' sums S = M G are a sketch of it: rows of M are random, so that with d subsets a chunk

    B = (S − mean of its rows) / √(d (1 − d/K)),   and √n times the mean chunk,   have E[BᵀB] = GᵀG.

A sketch of m rows has m directions at least as large as what n / m chunks add up to by chance, whatever they
have in common: three quarters of its eigenvalues are taken for that, and only what is above them counts.

So what was fitted for every subset tells what all chunks have in common, without a pass over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import NumericalError
from stride_cli.operators.gates import combined_gates, gate_responses

if TYPE_CHECKING:
    import torch

    from stride_cli.operators.store import Operators

_BY_CHANCE = 0.75  # of .5 and .75 of the eigenvalues, and their mean, on two suites


@dataclass(frozen=True)
class Preconditioner:
    """What takes a query's gradient to the preconditioned one, by products with m subsets' gates.

    Attributes
    ----------
    operators : Operators
    matrix : (m, m) float64      what the first m subsets answer → what their gates are subtracted with
    """

    operators: Operators
    matrix: np.ndarray

    @classmethod
    def of(
        cls, operators: Operators, row_sizes: np.ndarray, degree: int, n_chunks: int, ridge: float
    ) -> Preconditioner:
        """From the subsets' sums.

        Parameters
        ----------
        operators : in closed form, whitened: gates are means over subsets' chunks
        row_sizes : (K,)      chunks of each subset
        degree : d
        n_chunks : n
        ridge : γ / mean ‖G_i‖²

        Raises
        ------
        NumericalError      gates are not finite, or all zero
        """
        gram = operators.gram  # (m, m): A Aᵀ
        m, n_subsets = len(gram), operators.n_subsets
        scale = 1.0 if operators.direct_scale is None else operators.direct_scale
        # S = |A_k| a_k / scale, in units of share_i g_i; of fewer rows than K each stands for K / m
        sums = np.asarray(row_sizes[:m], np.float64) / scale
        share = min(degree / n_subsets, 1.0 - 1.0 / max(2, n_subsets))
        spread = np.sqrt(n_subsets / m / (degree * (1.0 - share)))
        centred = (np.eye(m) - 1.0 / m) * spread
        mean = np.full((1, m), n_subsets / (degree * m * np.sqrt(n_chunks)))
        rows = np.concatenate([centred, mean]) * sums  # B = rows @ A
        product = rows @ gram @ rows.T
        gamma = ridge * float(np.trace(product)) / n_chunks
        if not (np.isfinite(gamma) and gamma > 0):
            raise NumericalError(
                "the operators' gates are not finite, or all zero", fix="fit them again, or --redundancy 0"
            )
        values, vectors = np.linalg.eigh(product)
        common = np.maximum(values - np.quantile(values, _BY_CHANCE), 0.0)
        # (I + Σ_j c_j v_j v_jᵀ / γ)⁻¹ with v_j = Bᵀ u_j / √ℓ_j takes c_j / (γ + c_j) of each direction away
        taken = np.divide(common, (gamma + common) * values, out=np.zeros_like(common), where=common > 0)
        inner = vectors.T @ rows
        return cls(operators, inner.T @ (taken[:, None] * inner))

    def __call__(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], np.ndarray]:
        """Gradients (Q, p) float32 a space → the preconditioned ones, and what the subsets answer to these,
        (Q, K) float64."""
        import torch

        answered = self._responses(gradients)[:, : len(self.matrix)]
        weights = np.zeros((len(answered), self.operators.n_subsets))
        weights[:, : len(self.matrix)] = answered @ self.matrix
        found = [
            gradient - torch.from_numpy(combined_gates(gates, weights))
            for gates, gradient in zip(self.operators.gates, gradients, strict=True)
        ]
        return found, self._responses(found)

    def _responses(self, gradients: Sequence[torch.Tensor]) -> np.ndarray:
        total = np.zeros((len(gradients[0]), self.operators.n_subsets))
        for gates, gradient in zip(self.operators.gates, gradients, strict=True):
            total += gate_responses(gates, gradient.numpy())
        return total
