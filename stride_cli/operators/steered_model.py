"""A model with the spaces that it is steered in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stride_cli.operators.operator_space import OperatorSpace

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.store import Operators


@dataclass(frozen=True)
class SteeredModel:
    """A frozen model, and where and by what bases it is steered.

    It stands here and not with what attributes by it, because fits and measurements need it too.

    Attributes
    ----------
    model : AttributableModel
    spaces : sequence of OperatorSpace      on the model's device
    layer : int                             residual spaces act after this many blocks
    """

    model: AttributableModel
    spaces: Sequence[OperatorSpace]
    layer: int

    @classmethod
    def of(cls, model: AttributableModel, operators: Operators) -> SteeredModel:
        """By fitted operators, whose bases go to the model's device."""
        return cls(model, [space.to(model.device) for space in operators.spaces], operators.layer)
