"""What the tests of `tests.fuzz` try it with: one try succeeds, one fails, one does not end, one crashes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from tests.fuzz import trying


def _itself(r: random.Random) -> None:
    # told apart by the generator's state, which depends on the number of the try alone
    number = next(
        number for number in range(4) if random.Random(f"itself:0:{number}").getstate() == r.getstate()
    )
    if number == 1:
        trying(b"data")
        raise ValueError("escaped")
    if number == 2:
        time.sleep(5)
    if number == 3:
        os._exit(7)


def __getattr__(name: str) -> dict[str, Callable[[random.Random], None]]:
    if name != "TARGETS":
        raise AttributeError(name)
    return {"itself": _itself} if os.environ.get("STRIDE_FUZZ_ITSELF") else {}
