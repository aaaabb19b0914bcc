"""One thing that is wrong with an index, as `verify` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["missing", "extra", "length", "content", "invariant", "maker", "signature"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an index.

    Attributes
    ----------
    path : str        the file, relative to the index; for an invariant or a maker's doing, the array or group
    kind : str        "missing", "extra", "length", "content" (a digest differs), "invariant" (arrays that
                      contradict each other), "maker" (what no build writes, digests right all the same) or
                      "signature" (not what was signed, or not by that key)
    message : str     what was expected and what was found
    """

    path: str
    kind: Kind
    message: str
