"""One thing that is wrong with an index, as `verify` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["missing", "extra", "length", "content", "invariant"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an index.

    Attributes
    ----------
    path : str        the file, relative to the index; for an invariant, the array or group
    kind : str        "missing", "extra", "length", "content" (a digest differs) or "invariant" (arrays
                      contradict each other)
    message : str     what was expected and what was found
    """

    path: str
    kind: Kind
    message: str
