"""Sequences that may share a padded batch, of models whose positions depend on a batch's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LengthKinds:
    """Kinds of sequences by length: those of one kind can be padded to one batch.

    Rotary angles of LongRoPE are of one set up to a boundary in tokens, and of another beyond it; those of
    dynamic NTK are, beyond it, of `each` length's own. The longest sequence of a batch decides for all.
    """

    boundary: int
    each: bool

    def __call__(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Kinds (N,) int64 of lengths (N,)."""
        found = np.asarray(lengths, np.int64)
        return np.where(found > self.boundary, found if self.each else 1, 0)


def length_kinds(model: Any) -> LengthKinds | None:
    """Kinds of a model of transformers; None where padding changes no position.

    What dynamic NTK remembers of longer sequences, which came before, is forgotten before each pass.
    """
    found: list[LengthKinds] = []
    for module in model.modules():
        names = getattr(module, "rope_type", None)
        types: dict[Any, Any] = names if isinstance(names, dict) else {None: names}
        for layer, kind in types.items():
            settings: Any = getattr(getattr(module, "config", None), "rope_parameters", None)
            settings = settings[layer] if layer is not None else settings
            if kind == "longrope":
                found.append(LengthKinds(int(settings["original_max_position_embeddings"]), False))
            elif kind and "dynamic" in kind:
                found.append(LengthKinds(int(module.original_max_seq_len), True))
                name = "max_seq_len_cached" if layer is None else f"{layer}_max_seq_len_cached"
                module.register_forward_pre_hook(lambda module, args, name=name: setattr(module, name, 0))
    if not found:
        return None
    return LengthKinds(min(each.boundary for each in found), any(each.each for each in found))
