"""Random bases, from which the published recipe begins."""

from __future__ import annotations

import math

import torch

from stride_cli.operators.logit_spaces import LogitSpace, vocabulary_buckets
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.spaces import SPACES
from stride_cli.randomness import torch_seed

TRAINABLE = ("residual", "residual-matrix", "logit", "token-logit")


def initial_space(
    name: str, *, d_model: int, vocab_size: int, rank: int, n_buckets: int, seed: int
) -> OperatorSpace:
    """Draw the bases of a space of `TRAINABLE`, uniform ±1/√fan-in as torch.nn.Linear."""
    place = list(SPACES).index(name)
    generator = torch.Generator().manual_seed(torch_seed(seed, "operator bases", place))

    def uniform(rows: int, columns: int) -> torch.Tensor:
        bound = 1 / math.sqrt(columns)
        return (torch.rand(rows, columns, generator=generator) * 2 - 1) * bound

    kind, rank = SPACES[name], min(rank, d_model)
    if issubclass(kind, LogitSpace):
        bucket, sign = vocabulary_buckets(vocab_size, n_buckets, seed, name)
        return kind(uniform(rank, d_model), bucket, sign)
    drawn: OperatorSpace = kind(uniform(rank, d_model), uniform(d_model, rank))
    return drawn
