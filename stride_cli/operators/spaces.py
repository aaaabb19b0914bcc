"""The operator spaces by name: what a steering operator may change.

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
``output-matrix``             the same, j: what writes into the stream   as above
``logit``                     ``S (a B LN(h_final))``, a is c × r         paper, §3.1; S: buckets to tokens
``token-logit``               ``S (a B LN(h_0))``, a is c × r             as logit, read at the embedding
``head-matrix``               ``S (a B [h_final, 1])``, a is c × r        as logit, in the head's own units
``pair-logit``                ``a_g`` for y after x, g = (x, y)           every pair of tokens of the corpus
============================  =========================================  ====================================

A sum of spaces is written with ``+`` (``residual-matrix+logit``): all its shifts are applied at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.corpus.gate_budget import logit_gates
from stride_cli.errors import UsageError
from stride_cli.operators.layer_spaces import LinearMatrixSpace, MlpMatrixSpace, OutputMatrixSpace
from stride_cli.operators.logit_spaces import HeadMatrixSpace, LogitSpace, TokenLogitSpace
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.pair_space import PairLogitSpace
from stride_cli.operators.residual_spaces import ResidualMatrixSpace, ResidualSpace

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

# by name; a new one goes to the end: its place names the random stream of the published recipe's bases
SPACES: dict[str, type[OperatorSpace]] = {
    cls.name: cls
    for cls in (
        ResidualSpace,
        ResidualMatrixSpace,
        LogitSpace,
        TokenLogitSpace,
        PairLogitSpace,
        HeadMatrixSpace,
        MlpMatrixSpace,
        LinearMatrixSpace,
        OutputMatrixSpace,
    )
}


def parse_space(text: str) -> tuple[str, ...]:
    """Split the name of a sum, such as ``"residual-matrix+logit"``, into the names of its spaces.

    A UsageError where one is unknown or repeated, or two act at linear layers inside the blocks.
    """
    names = tuple(part.strip() for part in text.split("+"))
    for name in names:
        try:
            _class_of(name)
        except KeyError:
            raise UsageError(
                f"unknown operator space '{name}' in '{text}'",
                fix=f"use one of {', '.join(SPACES)}, or a sum such as residual-matrix+logit",
            ) from None
    if len(set(names)) != len(names):
        raise UsageError(f"operator space '{text}' names a space twice", fix="name each space once")
    inside = [cls.name for cls in space_classes(names) if cls.site == "layers"]
    if len(inside) > 1:
        raise UsageError(
            f"operator space '{text}': {' and '.join(inside)} each act at linear layers inside the blocks",
            fix="name one of them",
        )
    return names


def _class_of(name: str) -> type[OperatorSpace]:
    """Look up a space: ours, or the entry point of a package ("stride.spaces"); KeyError for no such name."""
    for found in () if name in SPACES else entry_points(group="stride.spaces", name=name):
        SPACES[name] = found.load()
    return SPACES[name]


def space_classes(names: Iterable[str]) -> list[type[OperatorSpace]]:
    """Look up the classes of spaces, as from `parse_space`."""
    return [_class_of(name) for name in names]


def reads_input(spaces: Iterable[OperatorSpace | type[OperatorSpace]]) -> bool:
    """Tell whether any of the spaces reads the input of the first block."""
    return any(space.site == "logit" and space.source == "input" for space in spaces)


def space_from_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> OperatorSpace:
    """Rebuild a space from the arrays that `OperatorSpace.arrays` gave."""
    return _class_of(name)(**{key: torch.from_numpy(np.array(value)) for key, value in arrays.items()})


def affordable_buckets(
    names: Sequence[str], ranks: Mapping[str, int], model: AttributableModel, n_subsets: int
) -> int:
    """Choose the buckets c of each space that has them, as `logit_gates` allows beside the others' gates.

    The more buckets, the less of a chunk's gradient is lost to tokens that share one, and the more the head
    counts.
    """
    classes = space_classes(names)
    with_buckets = [min(ranks[cls.name], model.d_model) for cls in classes if cls.has_buckets]
    others = known_gates(names, ranks, model, n_buckets=0)
    finetuned = not (model.classes or model.pretrained) and any(cls.site == "layers" for cls in classes)
    gates = logit_gates(n_subsets, others, len(with_buckets), finetuned=finetuned)
    return max(1, gates // max(with_buckets, default=1))


def known_gates(
    names: Sequence[str], ranks: Mapping[str, int], model: AttributableModel, n_buckets: int
) -> int:
    """Count gates before there are bases, without those that the corpus decides on: see `reserved_gates`."""
    classes = space_classes(names)
    buckets = [n_buckets * min(ranks[cls.name], model.d_model) for cls in classes if cls.has_buckets]
    return sum(buckets) + sum(cls.reserved_gates(model, ranks[cls.name]) for cls in classes)
