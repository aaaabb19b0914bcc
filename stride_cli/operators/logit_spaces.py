"""Spaces that shift the output logits by a few directions of a state: ``õ = o + S (a B x)`` (paper, §3.1)."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from stride_cli import side_by_side
from stride_cli.corpus.gate_budget import LOGIT_GATES
from stride_cli.operators.device_sums import GatheredSums
from stride_cli.operators.operator_space import BasisOptions, Observation, OperatorSpace, Sample, layer_norm
from stride_cli.operators.second_moments import Moments, leading_directions
from stride_cli.randomness import stream

CLASSIFIER_RANK = 512  # with few classes all features fit: 32 of 128 directions cost .08 of LDS on MNIST
# a token rarer than the average one is not scaled up beyond it
_VOCABULARY_DAMPING = 1.0


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
    classifier_rank: ClassVar[int | None] = CLASSIFIER_RANK
    whitens = True
    has_buckets = True

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
        self._sums: GatheredSums | None = None  # of a device

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        matrix = gates.reshape(len(gates), self.n_buckets, self.B.shape[0])  # (B, c, r)
        shift = self.features(hidden) @ matrix.transpose(1, 2)  # (B, T, c)
        return (shift if self.identity else shift[..., self.bucket]) * self.sign

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        features = self.features(hidden)
        if self.identity or cotangent.device.type != "cpu":
            return self._features_first(features, cotangent)
        # tokens first: a product with c buckets, and not with V tokens that are then added up in them. Only
        # where a loop does this at once: a device moves (B, T, V) several times for it, of which (B, V, r)
        # is a part
        return torch.bmm(self._in_buckets(cotangent).transpose(1, 2), features).flatten(1)

    @staticmethod
    def basis_input(hidden: torch.Tensor) -> torch.Tensor:
        """Norm the activations (…, d) that B reads, float32."""
        return layer_norm(hidden)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project (…, d) → (…, r)."""
        return self.basis_input(hidden) @ self.B.T

    @classmethod
    def observe(cls, seen: Observation, moments: Moments, options: BasisOptions) -> None:
        state = seen.drawn.final if cls.source == "final" else seen.drawn.inputs
        assert state is not None
        moments.add("read", cls.basis_input(state)[seen.used])  # (N, d)

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        moment = sample.moments.take("read")
        rank = min(options.ranks[cls.name], len(moment))
        # every space its own buckets, so that what collides in one does not in the other
        n_buckets = options.n_buckets or max(1, LOGIT_GATES[1] // rank)
        bucket, sign = vocabulary_buckets(len(sample.prediction), n_buckets, options.seed, cls.name)
        if options.damping is not None:
            # K-FAC at the head: F ≈ A ⊗ S with A = E[x xᵀ] of what is read, and S = E[diag(p) − p pᵀ] taken
            # diagonal, the mean prediction p̄ (V,): sign = S^{−1/2}, B = A^{−1/2} along its leading directions
            mean = sample.prediction / sample.tokens
            sign = sign / (mean + _VOCABULARY_DAMPING / len(mean)).sqrt().float()
        return cls(leading_directions(moment / sample.tokens, rank, options.damping).T, bucket, sign)

    def scale(self, part: int, factor: float) -> None:
        self.sign.mul_(factor)
        self._sums = None

    def _in_buckets(self, cotangent: torch.Tensor) -> torch.Tensor:
        """Add up tokens in their buckets: (B, T, V) → (B, T, c) float32."""
        from stride_cli.operators.fit_kernels import add_tokens

        values = cotangent.float().reshape(-1, cotangent.shape[-1]).numpy()
        sign, bucket = self.sign.numpy(), self.bucket.numpy()
        sums = np.zeros((len(values), self.n_buckets), np.float32)
        side_by_side.each(
            lambda rows: add_tokens(values[rows], sign, bucket, sums[rows]),
            side_by_side.stretches(len(values), torch.get_num_threads()),
        )
        return torch.from_numpy(sums).view(*cotangent.shape[:-1], -1)

    def _features_first(self, features: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """Multiply features (B, T, r) with every token of (B, T, V), then add up in buckets: (B, c r)."""
        full = torch.bmm(cotangent.float().transpose(1, 2), features)  # (B, V, r)
        if self.identity:
            return full.mul_(self.sign[:, None]).flatten(1)
        if self._sums is None or self._sums.device != full.device:
            bucket, sign = self.bucket.cpu().numpy(), self.sign.cpu().numpy()
            self._sums = GatheredSums(bucket, sign, self.n_buckets, full.device)
        return self._sums(full).flatten(1)


class TokenLogitSpace(LogitSpace):
    """`LogitSpace` that reads the current token's embedding (the input of the first block) instead of the
    final state: which token is made likelier after which, whatever the context."""

    name = "token-logit"
    source = "input"
    classifier_rank = None


class HeadMatrixSpace(LogitSpace):
    """`LogitSpace` that reads the final state as the output layer itself does, B (r, d + 1): gates are a
    change of that layer's weights and bias, in its own units."""

    name = "head-matrix"
    classifier_rank = CLASSIFIER_RANK + 1  # the bias is one more
    of_weights = True

    @staticmethod
    def basis_input(hidden: torch.Tensor) -> torch.Tensor:
        return F.pad(hidden.float(), (0, 1), value=1.0)


def vocabulary_buckets(
    vocab_size: int, n_buckets: int, seed: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw bucket and sign of every token for a space; the identity where there is a bucket for each.

    Returns
    -------
    bucket : (V,) int64, sign : (V,) float32
    """
    if vocab_size <= n_buckets:
        return torch.arange(vocab_size), torch.ones(vocab_size)
    own = "" if name == LogitSpace.name else f" of {name}"
    generator = stream(seed, f"vocabulary buckets{own}")
    # a shuffled round-robin fills the buckets evenly
    bucket = torch.from_numpy(generator.permutation(vocab_size) % n_buckets)
    sign = torch.from_numpy(generator.integers(0, 2, vocab_size) * 2.0 - 1.0)
    return bucket, sign.float()
