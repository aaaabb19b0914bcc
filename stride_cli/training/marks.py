"""What is done along a training: after certain steps, a checkpoint is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Marks:
    """Steps of a training, and what is called with the number of each of them once it is done.

    Attributes
    ----------
    optimizers : list, optional      to train with, for a call that looks at their states; default: its own
    """

    steps: Collection[int]
    call: Callable[[int], None]
    optimizers: list[torch.optim.Optimizer] | None = None

    def passed(self, step: int) -> None:
        """So many steps are done."""
        if step in self.steps:
            self.call(step)


NO_MARKS = Marks((), lambda step: None)
