"""A worker of `python -m tests.fuzz --engine atheris`: inputs are led to code that no try has reached yet.

What a target asks of its generator is read from the input that atheris makes, so that whoever changes the
input steers the try. The first failure ends the process; another one is started in its place.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import resource
import sys
import time

_SAID_EVERY = 500  # tries


class Given(random.Random):
    """A generator whose numbers are those of an input; when it ends, those that its digest gives."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        super().__init__(hashlib.sha256(data).hexdigest())

    def getrandbits(self, k: int, /) -> int:
        count = (k + 7) // 8
        piece = self._data[self._at : self._at + count]
        if not k or len(piece) < count:
            return super().getrandbits(k)
        self._at += count
        return int.from_bytes(piece, "little") >> (8 * count - k)

    def random(self) -> float:
        return self.getrandbits(53) / (1 << 53)


def main(name: str, descriptor: int, first: int, seed: int, seconds: float, limit: float) -> None:
    """Try a target for so long; tries are counted in a file that another process reads."""
    import atheris

    with atheris.instrument_imports(include=["stride_cli", "index_format"]):
        from tests.fuzz import known_targets, one_try, prepare
        from tests.fuzz.__main__ import tell

        target = known_targets()[name]
    prepare(name)
    counter = mmap.mmap(descriptor, 8)
    number, slowest = first, 0.0

    def attempt(data: bytes) -> None:
        nonlocal number, slowest
        began = time.perf_counter()
        failure = one_try(target, Given(data))
        slowest = max(slowest, time.perf_counter() - began)
        number += 1
        counter[:] = number.to_bytes(8, "little")
        if failure is not None:
            tell(name, seed, number - 1, *failure)
        if failure is not None or number % _SAID_EVERY == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            print(json.dumps({"peak_bytes": peak, "slowest_seconds": slowest}), flush=True)
        if failure is not None:
            raise failure[0]

    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-timeout={int(limit)}",
        f"-seed={seed + 1 + first}",
        "-rss_limit_mb=8192",
        "-max_len=4096",
        "-print_final_stats=0",
        "-verbosity=0",
        "-exact_artifact_path=/dev/null",  # inputs are told, not left in files
    ]
    atheris.Setup([sys.argv[0], *options], attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    _name, _descriptor, _first, _seed, _seconds, _limit = sys.argv[1:]
    main(_name, int(_descriptor), int(_first), int(_seed), float(_seconds), float(_limit))
