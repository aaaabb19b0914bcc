"""Linear layers inside the blocks of a decoder: which there are, and visiting them while the model runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from stride_cli.corpus.gate_budget import steered_blocks
from stride_cli.errors import ModelError

# the last linear layer of a feed-forward part, by the names that model families give it
_MLP_OUTPUT = re.compile(r"(^|\.)(fc2|down_proj|c_proj|dense_4h_to_h|fc_out|w2|wo|proj_out)$")
_ATTENTION = re.compile(r"attn|attention")

LayerVisitor = Callable[[int, Tensor, Tensor], Tensor | None]


class AdapterMatrices(NamedTuple):
    """B A, which low-rank adaptation added to a linear layer: training moved W by dB A + B dA.

    Attributes
    ----------
    A : (r, in) float32               its row space matters alone
    B : (out, r) float32 or None      its column space; None where it is not known, or nothing was trained
    """

    A: Tensor
    B: Tensor | None


@dataclass(frozen=True)
class LinearLayers:
    """Layers that run once in every pass, in the order in which they run: three kinds by name.

    Attributes
    ----------
    mlp : of every block the layer with which its feed-forward part writes; none of a model where a block has
        no such part that can be told, or several (fused experts)
    outputs : of `gate_budget.steered_blocks` these, and what attention runs last, which writes too
    all : all of them
    overwritten : those whose output the model changes in place afterwards (Falcon)
    left_out : what holds matrices beside them, by its name inside a block, and why it is none of them
    """

    mlp: list[nn.Module] = field(default_factory=list)
    outputs: list[nn.Module] = field(default_factory=list)
    all: list[nn.Module] = field(default_factory=list)
    overwritten: frozenset[nn.Module] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)


def find_linear_layers(blocks: Iterable[nn.Module], d_model: int, run: Callable[[], None]) -> LinearLayers:
    """Find the linear layers of some blocks; experts that some tokens skip, or fused ones, are none.

    `d_model`: width of the residual stream; `run` runs the blocks on anything.
    """
    written: list[nn.Module] = []
    attentions: list[set[nn.Module]] = []  # of each block, the layers of its attention
    candidates: dict[nn.Module, str] = {}  # and their names inside a block
    left_out: dict[str, str] = {}
    for block in blocks:
        named = dict(block.named_modules())
        lists = tuple(f"{name}." for name, module in named.items() if isinstance(module, nn.ModuleList))
        layers = {}
        for name, module in named.items():
            if not is_linear(module):
                if any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
                    left_out[name] = "several matrices in one weight, as of fused experts"
            elif name.startswith(lists):
                left_out[name.split(".0.")[0]] = "experts, each of which sees some tokens"
            else:
                layers[name] = module
        last = [name for name in layers if _MLP_OUTPUT.search(name) and not _ATTENTION.search(name)]
        if len(last) == 1 and d_model in layer_widths(layers[last[0]]):
            written.append(layers[last[0]])
        attentions.append({module for name, module in layers.items() if _ATTENTION.search(name)})
        candidates |= {module: name for name, module in layers.items()}
    # many families declare their layers in another order than they call them in (OPT, Phi-3, GPT-J)
    ran: list[nn.Module] = []
    outputs: list[tuple[nn.Module, Tensor, int]] = []
    me = threading.get_ident()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != me:
            return
        if not isinstance(output, Tensor) or output.shape[-1] != layer_widths(module)[1]:
            left_out[candidates[module]] = "gives something else than its product, as routers do"
            return
        ran.append(module)
        outputs.append((module, output, output._version))

    handles = [module.register_forward_hook(note) for module in candidates]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    found = [module for module in ran if ran.count(module) == 1]
    for module in candidates.keys() - set(found):
        left_out.setdefault(
            candidates[module], "its weight is used without a call, several times, or not at all"
        )
    overwritten = frozenset(module for module, output, version in outputs if output._version != version)
    if len(written) < len(attentions) or not set(written) <= set(found):
        return LinearLayers(all=found, overwritten=overwritten, left_out=left_out)
    lasts = [next((module for module in reversed(found) if module in own), None) for own in attentions]
    steered = {each[number] for each in (written, lasts) for number in steered_blocks(len(lasts))}
    writers = [module for module in found if module in steered]
    return LinearLayers(written, writers, found, overwritten, left_out)


def check_layer(layer: int, n_layers: int) -> None:
    """ModelError for a layer that a model of so many does not have; 0 is what the first block reads."""
    if not 0 <= layer <= n_layers:
        raise ModelError(
            f"layer {layer} is not between 0 and the model's {n_layers} layers",
            fix="give another --layer, or leave it out",
        )


def is_linear(module: nn.Module) -> bool:
    """True for linear layers: those of torch, and GPT-2's `Conv1D`, whose weights are (in, out)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def layer_widths(layer: nn.Module) -> tuple[int, int]:
    """Input and output width of a linear layer."""
    if isinstance(layer, nn.Linear):  # whose weights may be packed
        return layer.in_features, layer.out_features
    rows, columns = layer.get_parameter("weight").shape  # Conv1D
    return rows, columns


@contextmanager
def visiting(found: LinearLayers, which: str, length: int, visit: LayerVisitor) -> Iterator[None]:
    """While it lasts, `visit(number, inputs, outputs)` is called when one of the layers has run in this
    thread; see `CausalLM.at_layers`."""
    layers: list[nn.Module] = getattr(found, which)
    me = threading.get_ident()

    def hook(number: int) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if threading.get_ident() != me:  # another query's pass, through the same model
                return None
            # some models (OPT) flatten rows and positions into one axis here
            rows = output.reshape(-1, length, output.shape[-1])
            given = visit(number, args[0].reshape(*rows.shape[:2], -1), rows)
            result = (rows if given is None else given).reshape(output.shape)
            # what was visited stays as it was, and in the graph
            return result.clone() if given is None and module in found.overwritten else result

        return seen

    handles = [module.register_forward_hook(hook(number)) for number, module in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
