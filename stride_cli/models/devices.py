"""Devices and number formats by the names that the command line knows."""

from __future__ import annotations

import warnings

import torch

from stride_cli.errors import ModelError, first_line

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU; ModelError for a device that cannot be used."""
    # torch's own, of the first product in a backward pass on CUDA; it goes on as if nothing were
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device '{name}' cannot be used: {first_line(error)}", fix="try --device cpu"
        ) from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bf16 on CUDA, fp32 elsewhere; ModelError for a name that is unknown."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ModelError(f"dtype '{name}' is unknown", fix=f"one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def total_bytes(device: torch.device) -> int:
    """Memory of a device; 0 where that is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)
