"""Arguments of a decoder's blocks beside the hidden state, and the same for several times the rows."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockCall:
    """Arguments of a block besides the hidden state; tensors have the batch's rows, or one, and broadcast."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read_tokens(one: Sequence[BlockCall], other: Sequence[BlockCall]) -> bool:
    """True where calls for other tokens of the same length differ, or where blocks hand something on to later
    ones: embeddings of each layer, shared keys and values (Gemma 4)."""
    found: list[list[Any]] = [[], []]
    for calls, kept in zip((one, other), found, strict=True):
        _mapped([(call.args, call.kwargs) for call in calls], kept.append, {})
    shared = any(isinstance(each, UserDict) for call in one for each in call.kwargs.values())
    return shared or any(not torch.equal(a, b) for a, b in zip(*found, strict=True))


def repeated(calls: Sequence[BlockCall], rows: int, times: int) -> list[BlockCall]:
    """Calls for `times` the batch one behind the other; what blocks hand on is a copy that they share."""

    def repeat(tensor: Tensor) -> Tensor:
        batched = times > 1 and tensor.ndim > 1 and len(tensor) == rows
        return tensor.repeat(times, *[1] * (tensor.ndim - 1)) if batched else tensor

    memo: dict[int, Any] = {}
    return [BlockCall(*_mapped((call.args, call.kwargs), repeat, memo)) for call in calls]


def _mapped(value: Any, change: Callable[[Tensor], Any], memo: dict[int, Any]) -> Any:
    """Change every tensor of nested tuples, lists and mappings; one that is there twice stays one."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, UserDict):
        if id(value) not in memo:
            memo[id(value)] = type(value)({key: _mapped(each, change, memo) for key, each in value.items()})
        return memo[id(value)]
    if isinstance(value, dict):
        return {key: _mapped(each, change, memo) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, change, memo) for each in value)
    return value
