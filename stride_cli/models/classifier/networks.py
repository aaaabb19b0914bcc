"""The networks of classifiers: an MLP, a small ResNet-9, logistic regression, or a user's own file.

A network is a `torch.nn.Module` from inputs (B, …) to logits (B, classes), made of blocks that run one after
the other and a head. Blocks are found as `blocks` (or `features`) and `head` (or `classifier`), or, in a
`torch.nn.Sequential`, as all modules but the last, and the last.
"""

from __future__ import annotations

import hashlib
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError, StrideError
from stride_cli.permissions import Permissions, name_code, require_trust
from stride_cli.randomness import torch_seed

NETWORKS = ("mlp", "resnet9", "logistic")
ADAPTER_FUNCTION = "network"


@dataclass(frozen=True)
class NetworkSpec:
    """Settings from which a network is built.

    Attributes
    ----------
    name : "mlp", "resnet9", "logistic" or "adapter"
    width : int            of the MLP's hidden layers; channels after the ResNet's first convolution
    layers : int           hidden layers of the MLP
    adapter : str          source text of the user's file; empty unless name is "adapter"
    trusted : bool         that file may be run; of this process, never of a file that a spec is read from
    """

    name: str
    width: int = 0
    layers: int = 0
    adapter: str = ""
    trusted: bool = field(default=False, init=False, compare=False)

    def trusted_by(
        self, permissions: Permissions, where: str | Path = "the network of this classifier"
    ) -> NetworkSpec:
        """Let its file be run, here and in workers; ModelError, naming `where`, without that permission."""
        require_trust(self.adapter, where, permissions)
        trusted = replace(self)
        object.__setattr__(trusted, "trusted", True)
        return trusted

    def to_record(self) -> dict[str, Any]:
        """What is stored of it, which is all but the trust."""
        return {name: value for name, value in asdict(self).items() if name != "trusted"}


def choose_network(given: str, *, width: int | None = None, layers: int | None = None) -> NetworkSpec:
    """A network by its name or by the path of an adapter file, which from now on may be run on this machine.

    Raises ModelError: unknown name, no such file, or a size that cannot be.
    """
    for option, value in (("width", width), ("layers", layers)):
        if value is not None and value < 1:
            raise ModelError(f"--{option} is {value}, expected at least 1", fix=f"try --{option} 1")
    if given == "mlp":
        return NetworkSpec("mlp", width or 128, layers or 1)
    if given == "resnet9":
        return NetworkSpec("resnet9", width or 16)
    if given == "logistic":
        return NetworkSpec("logistic")
    if not given.endswith(".py"):
        raise ModelError(
            f"network '{given}' is unknown", fix=f"one of {', '.join(NETWORKS)}, or a file FILE.py"
        )
    try:
        source = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"the adapter file '{given}' cannot be read: {error}", fix="check the path"
        ) from error
    name_code(source, given)
    return NetworkSpec("adapter", adapter=source).trusted_by(Permissions(trust_code=True))


def build_network(spec: NetworkSpec, shape: Sequence[int], n_classes: int, *, seed: int) -> nn.Module:
    """A network for inputs of a shape, with weights drawn by the seed, on the CPU, float32.

    torch's global generator is left as it was.

    Raises ModelError: inputs that the network cannot take; an adapter file that does not load, or that the
    user has not trusted.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "initial weights"))
        if spec.name == "mlp":
            return MLP(math.prod(shape), [spec.width] * spec.layers, n_classes)
        if spec.name == "resnet9":
            return ResNet9(tuple(shape), spec.width, n_classes)
        if spec.name == "logistic":
            return Logistic(math.prod(shape), n_classes)
        if not spec.trusted:  # as of a recipe, wherever that came from
            spec = spec.trusted_by(Permissions())
        return _build_adapter(spec.adapter, tuple(shape), n_classes)


class _Network(nn.Module):
    blocks: nn.ModuleList
    head: nn.Linear

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        logits: Tensor = self.head(inputs)
        return logits


class MLP(_Network):
    """Fully connected layers with ReLU; weights N(0, 2 / fan-in), of the head N(0, 1 / fan-in), biases 0."""

    def __init__(self, n_inputs: int, widths: Sequence[int], n_classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in widths:
            blocks.append(nn.Sequential(nn.Flatten(), _linear(n_inputs, width, 2.0), nn.ReLU()))
            n_inputs = width
        self.blocks = nn.ModuleList(blocks)
        self.head = _linear(n_inputs, n_classes, 1.0)


class Logistic(_Network):
    """Multinomial logistic regression: one block that flattens, and a head that starts at 0."""

    def __init__(self, n_inputs: int, n_classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Flatten()])
        self.head = _linear(n_inputs, n_classes, 0.0)


class ResNet9(_Network):
    """Nine weight layers: three stages of convolution and pooling, two residual pairs, mean over positions.

    Normalisation is by groups within an example, not over a batch: an example's logits then do not depend on
    its neighbours, training and evaluation are one function, and there is no state besides the weights.

    Parameters
    ----------
    shape : (H, W), (C, H, W), (H, W, C) or (H·H,)      of one image
    width : channels after the first convolution; the stages have 2, 4 and 8 times as many
    """

    def __init__(self, shape: tuple[int, ...], width: int, n_classes: int) -> None:
        super().__init__()
        image = _Image(shape)
        w = width
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(image, _Convolution(image.channels, w)),
                nn.Sequential(_Convolution(w, 2 * w), _Halve()),
                _Residual(2 * w),
                nn.Sequential(_Convolution(2 * w, 4 * w), _Halve()),
                nn.Sequential(_Convolution(4 * w, 8 * w), _Halve()),
                nn.Sequential(_Residual(8 * w), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            ]
        )
        self.head = _linear(8 * w, n_classes, 1.0)


class _Image(nn.Module):
    """Inputs of any image layout as (B, C, H, W)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        side = math.isqrt(math.prod(shape))
        self.last = len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] not in (1, 3, 4)
        if self.last:
            shape = (shape[2], shape[0], shape[1])
        elif len(shape) == 2:
            shape = (1, *shape)
        elif len(shape) == 1 and side * side == shape[0]:
            shape = (1, side, side)
        elif len(shape) != 3:
            raise ModelError(
                f"inputs of shape {tuple(shape)} are no images (expected (H, W), (C, H, W), (H, W, C) or a "
                "square flattened)",
                fix="use --network mlp",
            )
        self.size = shape
        self.channels = self.size[0]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.last:
            return inputs.movedim(-1, 1)
        return inputs.reshape(len(inputs), *self.size)


class _Convolution(nn.Module):
    """3 × 3 convolution, normalisation by groups of up to 8 channels, ReLU."""

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(n_inputs, n_outputs, 3, padding=1, bias=False)
        nn.init.normal_(self.convolution.weight, std=math.sqrt(2 / (9 * n_inputs)))
        self.norm = nn.GroupNorm(max(1, n_outputs // 8), n_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(inputs)))


class _Halve(nn.Module):
    """2 × 2 max pooling, as long as there are two rows and columns."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.max_pool2d(inputs, 2) if min(inputs.shape[-2:]) >= 2 else inputs


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = _Convolution(width, width)
        self.second = _Convolution(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(self.first(inputs))


def split_network(network: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Blocks and head of a network; see the module's docstring.

    Raises ModelError: no such parts.
    """
    head = getattr(network, "head", None) or getattr(network, "classifier", None)
    for name in ("blocks", "features"):
        body = getattr(network, name, None)
        if isinstance(body, nn.Module) and isinstance(head, nn.Module):
            inside = isinstance(body, nn.ModuleList | nn.Sequential)
            return (list(body.children()) if inside else [body]), head
    if isinstance(network, nn.Sequential) and len(network) >= 2:
        return list(network)[:-1], network[-1]
    raise ModelError(
        f"{type(network).__name__} has no blocks and head",
        fix="give it attributes `blocks` (a ModuleList) and `head`, or make it an nn.Sequential",
    )


def is_stackable(network: nn.Module) -> bool:
    """True where copies of a network can be trained together: without other state or random masks."""
    random = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    return not list(network.buffers()) and not any(isinstance(each, random) for each in network.modules())


def _linear(n_inputs: int, n_outputs: int, variance: float) -> nn.Linear:
    layer = nn.Linear(n_inputs, n_outputs)
    nn.init.normal_(layer.weight, std=math.sqrt(variance / n_inputs))
    nn.init.zeros_(layer.bias)
    return layer


def _build_adapter(source: str, shape: tuple[int, ...], n_classes: int) -> nn.Module:
    name = "stride_adapter_" + hashlib.sha256(source.encode()).hexdigest()[:16]
    try:
        if name not in sys.modules:
            module = types.ModuleType(name)
            exec(compile(source, "<adapter file>", "exec"), module.__dict__)
            sys.modules[name] = module
        make = getattr(sys.modules[name], ADAPTER_FUNCTION, None)
        if not callable(make):
            raise ModelError(
                f"the adapter file does not define `{ADAPTER_FUNCTION}`",
                fix=f"def {ADAPTER_FUNCTION}(shape, n_classes): return torch.nn.Sequential(…)",
            )
        network = make(shape, n_classes)
    except (StrideError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever the user's code raises, SystemExit too
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ModelError(
            f"the adapter file does not load{line}: {type(error).__name__}: {error}",
            fix=f"python FILE.py shows where; it has to define {ADAPTER_FUNCTION}(shape, n_classes)",
        ) from error
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"`{ADAPTER_FUNCTION}` of the adapter file returned {type(network).__name__} (expected a "
            "torch.nn.Module)",
            fix="return the network",
        )
    return network
