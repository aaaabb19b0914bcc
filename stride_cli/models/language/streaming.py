"""Models larger than memory: weights of blocks stay where they are stored, and come while their block runs.

A pass reads block after block, and so does a backward pass, from the last to the first: at no time more than
one block's weights are needed. What is stored is the checkpoint itself, mapped from disk (`safetensors`), and
what transformers has to lay out anew (fused experts) beside it; a block's weights come to the device, and in
the precision, that the model computes in before it runs, and go after it. Where a pass is to be
differentiated, autograd would keep them all; it keeps of each a note of where it lies instead
(`torch.autograd.graph.saved_tensors_hooks`), and the weight is fetched again when its gradient's turn comes.
Activations stay, as in any other pass. Every operation is the same on the same numbers, and so is the result.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError, required
from stride_cli.models.language.files import Source, weight_files
from stride_cli.models.language.quantised import quantisation
from stride_cli.models.language.structure import largest_stack
from stride_cli.output import note
from stride_cli.parallel import available_bytes

_ROOM = 0.8  # the share of free memory that weights may take: what computes with them needs some too
_PRECISIONS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_streamed(source: Source, dtype: torch.dtype, device: torch.device, wanted: bool | None) -> bool:
    """Decide if a checkpoint's weights are streamed from disk; says so on stderr where nobody asked.

    `dtype`, `device`: in which, and where, the model computes. `wanted` None: where the weights are larger
    than the memory that is free. Raises ModelError: they are asked to be, and are kept in few bits.
    """
    # weights that are made as they are read: no file has them that could be mapped
    if source.gguf is not None or source.base is not None:
        return False
    if quantisation(source.directory) is not None:
        if wanted:
            raise ModelError(
                f"the weights of '{source.given}' are quantised, and such are not streamed",
                fix="leave out --stream, or give the model in plain weights",
            )
        return False
    if wanted is not None:
        return wanted
    files = weight_files(source.directory)
    if files[0].suffix != ".safetensors":
        return False
    count, stored = stored_numbers(files)
    if device.type == "cpu" and stored == {dtype}:
        return False  # transformers maps them: they take no memory of the process's own
    return _told(count * dtype.itemsize, device, "on disk")


def outgrows(model: nn.Module, device: torch.device) -> bool:
    """True where a model in memory is larger than what is free on a device; says so on stderr."""
    need = sum(each.numel() * each.element_size() for each in model.parameters())
    return _told(need, device, "in memory")


def _told(need: int, device: torch.device, where: str) -> bool:
    free = free_bytes(device)
    if free is None or need <= _ROOM * free:
        return False
    note(
        f"the model's weights take {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: "
        f"they stay {where}, and each block's come while it runs (--no-stream loads them all)"
    )
    return True


def free_bytes(device: torch.device) -> int | None:
    """Memory that weights could have: of a GPU, or of this machine; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes() if device.type == "cpu" else None


def stored_numbers(files: Iterable[Path]) -> tuple[int, set[torch.dtype]]:
    """Count numbers of safetensors files by precision, from their headers; ModelError where a file is
    none."""
    from safetensors import SafetensorError, safe_open

    count, found = 0, set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no mapping
                    part = opened.get_slice(key)
                    count += math.prod(part.get_shape())
                    found.add(_PRECISIONS.get(part.get_dtype(), torch.int64))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the weights in {file} cannot be read: {error}", fix="copy the file again"
            ) from error
    return count, found


# Loading


def placement(source: Source, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """Options of `from_pretrained` with which the weights of blocks are left where they are on disk; those
    that have to be laid out anew go to an empty `folder`. MissingExtraError without the package
    accelerate."""
    required("accelerate", "stream")
    from transformers import AutoConfig, AutoModelForCausalLM

    # the model without numbers says which of its modules is the stack of blocks
    config = AutoConfig.from_pretrained(source.directory, **source.options)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stack = largest_stack(outline)
    places = dict.fromkeys(_around(outline, stack), "cpu")
    places |= {name: "disk" for name, module in outline.named_modules() if module is stack}
    return {"device_map": places, "offload_folder": folder}


def _around(model: nn.Module, stack: nn.ModuleList) -> dict[str, nn.Module]:
    """The outermost modules that neither are the stack nor hold it, by name."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if not any(inner is stack for inner in child.modules()):
            found[name] = child
        elif child is not stack:
            found |= {f"{name}.{inner}": module for inner, module in _around(child, stack).items()}
    return found


def stream_from_disk(model: Any, device: torch.device) -> None:
    """Have a model that was loaded by `placement` run block by block, and all else of it on the device.

    Its directory for what was laid out anew may be deleted afterwards: it is mapped.
    """
    from accelerate.hooks import remove_hook_from_submodules
    from safetensors import safe_open

    # 1. where the weights lie that accelerate left on disk, by name
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    left = next((each for each in maps if each is not None), None)
    if left is None:
        raise ModelError(
            f"{type(model).__name__}: transformers left none of its blocks on disk", fix="give --no-stream"
        )
    # 2. as their files have them, mapped
    opened: dict[str, Any] = {}
    stored = {}
    for name, place in left.dataset.index.items():
        file = str(place["safetensors_file"])
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        stored[name] = opened[file].get_tensor(place.get("weight_name", name))
    # 3. without accelerate's hooks, and its refusal to move what it dispatched
    remove_hook_from_submodules(model)
    for name in ("to", "cuda", "cpu", "hf_device_map"):
        model.__dict__.pop(name, None)
    stream(model, stored, device)


def stream_from_memory(model: Any, device: torch.device) -> None:
    """Have a model in memory run block by block on a device without room for it; nothing on the CPU."""
    if device.type != "cpu":
        stream(model, {name: parameter.data for name, parameter in model.named_parameters()}, device)


# Running


def stream(model: Any, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """Have the largest stack of blocks take its weights from `stored` while it runs, block by block.

    `stored`: name → weight on the CPU, in any precision, of the blocks' parameters at least. All else of the
    model goes to `device`.
    """
    blocks = largest_stack(model)
    for module in _around(model, blocks).values():
        module.to(device)
    for module in blocks.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
    names: dict[int, str] = {}  # a parameter's first name; others may share it
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    for block in blocks:
        own = {id(parameter): stored[names[id(parameter)]] for parameter in block.parameters()}
        _StreamedBlock(block, own, device)


@dataclass(frozen=True)
class _Weight:
    """A block's weight: the modules that hold it, each under its name for it; its outline; where it lies."""

    places: tuple[tuple[nn.Module, str], ...]
    outline: nn.Parameter  # without numbers: in a block that does not run
    stored: Tensor

    def fetched(self, device: torch.device) -> Tensor:
        return self.stored.to(device=device, dtype=self.outline.dtype)


@dataclass(frozen=True)
class _Note:
    """Stand-in that autograd keeps for a weight, or for a part of one."""

    weight: _Weight
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in numbers, from the weight's first

    def fetched(self, device: torch.device) -> Tensor:
        start = self.weight.stored.storage_offset() + self.offset
        part = self.weight.stored.as_strided(self.size, self.stride, start)
        return part.to(device=device, dtype=self.weight.outline.dtype)


class _StreamedBlock:
    """A block's forward pass with its weights there while it lasts; several threads may be in it."""

    def __init__(self, block: nn.Module, stored: Mapping[int, Tensor], device: torch.device) -> None:
        self._device = device
        self._forward = block.forward
        self._lock = threading.Lock()
        self._inside = 0
        self._noted: dict[int, _Weight] = {}  # by `_place` of a copy
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        held: dict[int, nn.Parameter] = {}
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
                    held[id(parameter)] = parameter
        self._weights = []
        for number, parameter in held.items():
            weight = stored[number]
            if weight.shape != parameter.shape:
                raise ValueError(f"stored as {tuple(weight.shape)}, wanted as {tuple(parameter.shape)}")
            outline = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            self._weights.append(_Weight(tuple(places[number]), outline, weight))
        self._let_go()

        @functools.wraps(self._forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        # on the instance, whatever its class: who calls the block comes by here
        block.forward = run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # weights are let go at the end of the forward pass; autograd has notes of them
        with self._present():
            if not torch.is_grad_enabled():
                return self._forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(self._keep, self._fetch):
                return self._forward(*args, **kwargs)

    @contextmanager
    def _present(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._bring()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._let_go()

    def _bring(self) -> None:
        # inference tensors could not take part in another thread's backward pass
        with torch.inference_mode(False), torch.no_grad():
            for weight in self._weights:
                found = weight.fetched(self._device)
                parameter = nn.Parameter(found, requires_grad=False)
                if found is not weight.stored:  # else it is mapped, and costs nothing to keep
                    self._noted[_place(parameter)] = weight  # which is there as long as the note
                for module, name in weight.places:
                    module._parameters[name] = parameter

    def _let_go(self) -> None:
        self._noted = {}
        for weight in self._weights:
            for module, name in weight.places:
                module._parameters[name] = weight.outline

    def _keep(self, saved: Tensor) -> Tensor | _Note:
        """Give autograd a stand-in for a streamed tensor."""
        # a cast copy (autocast) has other numbers than what is stored, and is kept as it is
        weight = self._noted.get(_place(saved))
        if weight is None or saved.dtype != weight.outline.dtype:
            return saved
        return _Note(weight, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def _fetch(self, kept: Tensor | _Note) -> Tensor:
        return kept.fetched(self._device) if isinstance(kept, _Note) else kept


def _place(tensor: Tensor) -> int:
    """The same number for a tensor and its views, and for no other that is alive."""
    number: int = tensor.untyped_storage()._cdata
    return number
