"""What is done along a training: after certain steps, a checkpoint is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """Steps of a training, and what is called with the number of each of them once it is done."""

    steps: Collection[int]
    call: Callable[[int], None]

    def passed(self, step: int) -> None:
        """So many steps are done."""
        if step in self.steps:
            self.call(step)


NO_MARKS = Marks((), lambda step: None)
