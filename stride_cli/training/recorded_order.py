"""Record the order in which a trainer's loader draws its examples."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from stride_cli.output import note


class RecordedOrder:
    """Stands for a sampler, and keeps what it draws.

    Attributes
    ----------
    epoch : int             the pass that is drawn next
    drawn : dict            pass → numbers of examples; of one begun again, the last time. Of those that are
                            over until they are written
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epoch = 0
        self.drawn: dict[int, array[int]] = {}

    @classmethod
    def of(cls, loader: Any) -> RecordedOrder | None:
        """Take the place of a loader's sampler; None where it has none."""
        holder: Any = getattr(loader, "batch_sampler", None)
        while hasattr(holder, "batch_sampler"):  # accelerate's shards of it
            holder = holder.batch_sampler
        if not hasattr(holder, "sampler"):
            note("warning: the order of the examples is not recorded: the trainer's loader has no sampler")
            return None
        made = cls(getattr(holder.sampler, "_sampler", holder.sampler))
        holder.sampler = made
        return made

    def __iter__(self) -> Iterator[int]:
        numbers = array("q")
        self.drawn[self.epoch] = numbers
        for number in self._sampler:
            numbers.append(int(number))
            yield number

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)
