"""A device that computes on the CPU and refuses to mix with it, so that placement is checked without a GPU.

Torch's private device, with Python behind it: a tensor on ``"pretend"`` holds a CPU tensor that only the
operators here reach. Each operator of torch, the backward pass's too, runs on what its arguments hold, and
its tensors are on the device again; an argument without axes may be the CPU's, as on CUDA. Anything else of
the CPU's is refused, as is NumPy: indices too, which CUDA takes, but copies each time, and waits.

Importing this registers the device in the process, for good: only processes of its own do (`__main__`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
rounding = 0.0  # products of matrices are off by so much at most, relative: another device rounds otherwise
_PRODUCTS = {f"aten::{name}" for name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "linear")}


class Held(torch.Tensor):
    """A tensor on the pretend device; `raw` is the CPU's."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Held:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


_MOVES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """What an operator takes or gives, its tensors changed; torch's own trees take four times as long."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [_mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value  # operators have no tensors deeper down


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator: on what the arguments hold; RuntimeError where the CPU's are among them."""
    name = func._schema.name
    held: list[Held] = []
    others: list[torch.Tensor] = []

    def raw(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, Held):
            held.append(value)
            return value.raw
        others.append(value)
        return value

    raw_args = _mapped(args, raw)
    raw_kwargs = {key: _mapped(value, raw) for key, value in kwargs.items()}
    to = kwargs.get("device")
    onto = to is not None and torch.device(to).type == NAME
    if name not in _MOVES:
        for value in others:
            if value.ndim:
                raise RuntimeError(
                    f"{name}: expected all tensors on the same device, found {NAME}:0 and {value.device} "
                    f"of shape {tuple(value.shape)}"
                )
    if "device" in raw_kwargs and raw_kwargs["device"] is not None:
        raw_kwargs = {**raw_kwargs, "device": torch.device("cpu")}
    found = func(*raw_args, **raw_kwargs)
    if name == "aten::_to_copy" and to is not None and not onto:
        return found
    if name == "aten::copy_" and not isinstance(args[0], Held):
        return args[0]
    if not held and not onto:
        return found
    if rounding and name in _PRODUCTS and found.dtype == torch.float32:
        found.mul_(1 + rounding * (2 * torch.rand(found.shape) - 1))
    by_raw = {id(value.raw): value for value in held}

    def wrap(value: torch.Tensor) -> Held:
        known = by_raw.get(id(value))
        assert known is None or known.shape == value.shape, f"{name} has resized a tensor"
        return Held(value) if known is None else known

    return _mapped(found, wrap)


class _Module:
    """What torch asks of a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
_library = torch.library.Library("_", "IMPL")
# of what makes its result by resizing an empty one, which a wrapper cannot follow
_own = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step"):
    _packet, _, _overload = _name.partition(".")
    _func = getattr(torch.ops.aten.arange, _overload or "default")
    _own.impl(_name, lambda *args, _func=_func, **kwargs: run(_func, args, kwargs), "PrivateUse1")
_library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), dispatch_key="PrivateUse1")

# `torch.tensor` writes into memory that a wrapper does not have. That it makes tensors is asked before, so
# that `with torch.device(…)` still has its say
_device_constructors()
_tensor = torch.tensor


def _as_tensor(data: Any, *, device: Any = None, **settings: Any) -> torch.Tensor:
    if device is None or torch.device(device).type != NAME:
        return _tensor(data, device=device, **settings)
    return _tensor(data, device="cpu", **settings).to(device)


torch.tensor = _as_tensor
