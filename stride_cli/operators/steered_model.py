"""A model with the spaces that it is steered in and, once these have gates, its operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from index_format.errors import IndexMismatch
from stride_cli.models.muon import multiplies_bf16
from stride_cli.operators.device_memory import chunks_at_once, tokens_at_once
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.saving import save_atomically
from stride_cli.operators.spaces import reads_input, space_from_arrays

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.layer_spaces import LayerMatrixSpace
    from stride_cli.operators.store import Operators


_WIDE = 512  # d_model from which on layers are multiplied in bfloat16


class _Bfloat16Products(TorchFunctionMode):
    """Within: factors of linear layers are rounded to bfloat16, sums and all else stay in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear or kwargs or args[0].dtype != torch.float32:
            return function(*args, **(kwargs or {}))
        read, weight, bias = (*args, None)[:3]
        found: torch.Tensor = function(read.bfloat16(), weight.bfloat16()).float()
        return found if bias is None else found + bias


@dataclass(frozen=True)
class SteeredModel:
    """A frozen model, and where and by what it is steered.

    Attributes
    ----------
    model : AttributableModel
    spaces : sequence of OperatorSpace      on the model's device
    layer : int                             residual spaces act after this many blocks
    fitted : Operators or None              gates of K subsets in these spaces; None while they are fitted
    averaged : bool                         chunks' tokens count as on average over training
                                            (`initial_residuals.average_residuals`)
    normalized : float                      chunks' gradients are divided by their lengths to this power
    fitting : bool                          many chunks are passed over: products may be in bfloat16
    """

    model: AttributableModel
    spaces: Sequence[OperatorSpace]
    layer: int
    fitted: Operators | None = None
    averaged: bool = False
    normalized: float = 0.0
    fitting: bool = False

    @classmethod
    def of(cls, model: AttributableModel, operators: Operators) -> SteeredModel:
        """Steer a model by fitted operators, whose bases go to its device; IndexMismatch where these act at
        other linear layers than are steered now."""
        device = model.device
        spaces = [space if space.is_on(device) else space.to(device) for space in operators.spaces]
        own = cls(model, spaces, operators.layer, operators, operators.averaged, operators.normalized)
        inside = own.layer_space
        if inside and len(inside.matrices) != (count := len(model.linear_layers(inside.which))):
            found = f"the operators act at {len(inside.matrices)} linear layers (expected {count})"
            raise IndexMismatch(found, fix="fit them again: stride train --overwrite")
        return own

    @property
    def operators(self) -> Operators:
        """The fitted operators; only asked of a model that has some."""
        assert self.fitted is not None
        return self.fitted

    @property
    def layer_space(self) -> LayerMatrixSpace | None:
        """The one of the spaces that acts at linear layers inside the blocks, if there is one."""
        return next(
            (cast("LayerMatrixSpace", space) for space in self.spaces if space.site == "layers"), None
        )

    @property
    def rounds(self) -> bool:
        """True where linear layers multiply in bfloat16: in a fit of a language model, if no format was asked
        for, layers are wide enough, and the processor is faster so."""
        model = self.model
        plain = model.device.type == "cpu" and model.dtype == torch.float32 and model.spec.dtype == "auto"
        # a sure classifier's losses would be lost to rounding
        wide = self.fitting and plain and not model.classes and model.d_model >= _WIDE
        return wide and multiplies_bf16(model.device)

    def products(self) -> AbstractContextManager[object]:
        """Within: linear layers multiply as `rounds` says."""
        return _Bfloat16Products() if self.rounds else nullcontext()

    @property
    def gate_size(self) -> int:
        """p summed over the spaces."""
        return sum(space.gate_size for space in self.spaces)

    @cached_property
    def first_block(self) -> int:
        """Blocks that run unsteered: those before the first with a steered layer inside, `layer` at most."""
        steered = set(self.model.linear_layers(self.layer_space.which)) if self.layer_space else set()
        blocks = zip(range(self.layer), self.model.blocks, strict=False)
        return next((number for number, block in blocks if steered & set(block.modules())), self.layer)

    @property
    def tokens_at_once(self) -> int:
        """Padded tokens of a batch whose gate gradients are taken."""
        return tokens_at_once(self.model, self.spaces, self.layer)

    @property
    def chunks_at_once(self) -> int:
        """Chunks whose gate gradients are held together."""
        return chunks_at_once(self.model.device, self.gate_size)

    def entry_states(
        self, ids: torch.Tensor, *, with_inputs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run to where a steered continuation starts: the residual stream (B, T, d) after the `first_block`
        blocks, and the input of the first block, where a space reads it (or `with_inputs`). Without
        gradients."""
        start = self.first_block
        with torch.no_grad():
            hidden = self.model.hidden(ids, start)
            if not (with_inputs or reads_input(self.spaces)):
                return hidden, None
            return hidden, hidden.detach() if start == 0 else self.model.hidden(ids, 0)


def keep_spaces(steered: SteeredModel, path: Path) -> None:
    """Write the bases that `kept_spaces` reads, and how chunks count."""
    spaces = [
        (space.name, {key: torch.from_numpy(value) for key, value in space.arrays().items()})
        for space in steered.spaces
    ]
    about = {"layer": steered.layer, "averaged": steered.averaged, "normalized": steered.normalized}
    save_atomically({"spaces": spaces, **about}, path)


def kept_spaces(model: AttributableModel, path: Path) -> SteeredModel:
    """Read what `keep_spaces` wrote, for the same model."""
    state = torch.load(path, weights_only=True)
    spaces = [
        space_from_arrays(name, {key: value.numpy() for key, value in arrays.items()})
        for name, arrays in state.pop("spaces")
    ]
    return SteeredModel(model, [space.to(model.device).requires_grad_(False) for space in spaces], **state)
