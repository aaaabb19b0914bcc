"""`python -m tests.fuzz --minutes N [--target NAME]`: random input for as long as that, and what fails.

On stdout one JSON line a target: {target, seed, tries, failures, crashes, seconds, peak_bytes,
slowest_seconds, python, versions, failed}; exit code 1 where something failed. A failure's input (base64)
and traceback are told on stderr, the input in ``failed`` too, of the first ten. A try depends on the target's
name, the seed and its number alone: ``--seed S --first N --tries 1`` repeats it, also one that killed the
process or did not end.

`python -m tests.fuzz --table FILE` prints such lines as the Markdown table of SECURITY.md.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import faulthandler
import json
import multiprocessing
import os
import platform
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.fuzz import known_targets, one_try, prepare

TOLD = 10
PACKAGES = ("stride-attribution", "pyarrow", "zstandard", "numpy", "zarr", "transformers", "tokenizers")
_FORK = multiprocessing.get_context("fork")
_LONGEST_INPUT = 1 << 16  # bytes of a failure's input that are told


class Late(Exception):
    """A try takes longer than it may."""


def main(arguments: Sequence[str]) -> int:
    known = known_targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target [1]")
    parser.add_argument("--target", action="append", choices=sorted(known), help="default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first try [0]")
    parser.add_argument("--tries", type=int, default=None, help="at most so many")
    parser.add_argument("--limit", type=float, default=10.0, metavar="SECONDS", help="of one try [10]")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show records, and run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        print(table([json.loads(line) for line in given.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    failed = False
    for name in given.target or sorted(known):
        record = run(name, given)
        print(json.dumps(record), flush=True)
        failed |= record["failures"] > 0
    return 1 if failed else 0


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Records of runs, those of a target together, as a Markdown table."""
    rows = [
        "| target | runs | tries | failures | crashes | hours | slowest try | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({record["target"] for record in records}):
        own = [record for record in records if record["target"] == name]
        tries, failures, crashes = (
            sum(record[what] for record in own) for what in ("tries", "failures", "crashes")
        )
        hours = sum(record["seconds"] for record in own) / 3600
        slowest = max(record["slowest_seconds"] for record in own)
        peak = max(record["peak_bytes"] for record in own) / 1e6
        rows.append(
            f"| `{name}` | {len(own)} | {tries:,} | {failures:,} | {crashes:,} | {hours:.2f} "
            f"| {slowest:.1f} s | {peak:,.0f} MB |"
        )
    return "\n".join(rows)


def run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Try a target in a process of its own, and in another where that is killed; its record."""
    began = time.monotonic()
    stop = sys.maxsize if given.tries is None else given.first + given.tries
    shared = _FORK.Array("d", [given.first, 0.0, 0.0])  # next try, peak bytes, seconds of the slowest
    failed: list[dict[str, Any]] = []
    crashes = 0
    while time.monotonic() < began + 60 * given.minutes and shared[0] < stop:
        here, there = _FORK.Pipe(duplex=False)
        until = began + 60 * given.minutes
        worker = _FORK.Process(target=work, args=(name, given, until, stop, shared, there))
        worker.start()
        there.close()
        with contextlib.suppress(EOFError):
            while True:
                failed.append(here.recv())
        worker.join()
        if worker.exitcode:
            crashes += 1
            failed.append({"failure": f"the process ended with {worker.exitcode}", "try": int(shared[0])})
            print(f"{name}: try {shared[0]:.0f} of seed {given.seed} ended the process", file=sys.stderr)
            shared[0] += 1
    return {
        "target": name,
        "seed": given.seed,
        "tries": int(shared[0]) - given.first,
        "failures": len(failed),
        "crashes": crashes,
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": int(shared[1]),
        "slowest_seconds": round(shared[2], 3),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "failed": failed[:TOLD],
    }


def work(name: str, given: argparse.Namespace, until: float, stop: int, shared: Any, told: Any) -> None:
    """Try a target until the time is over; what fails is told to the process that waits."""

    def late(*_: Any) -> None:
        raise Late(f"takes longer than {given.limit} seconds")

    target = known_targets()[name]
    prepare(name)
    signal.signal(signal.SIGALRM, late)
    faulthandler.enable()
    while time.monotonic() < until and shared[0] < stop:
        number = int(shared[0])
        signal.setitimer(signal.ITIMER_REAL, given.limit)
        # where a library does not come back to Python, which alone takes signals
        faulthandler.dump_traceback_later(3 * given.limit, exit=True)
        began = time.perf_counter()
        failure = one_try(target, random.Random(f"{name}:{given.seed}:{number}"))
        shared[2] = max(shared[2], time.perf_counter() - began)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        if failure is not None:
            told.send(tell(name, given.seed, number, *failure))
        shared[1] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        shared[0] += 1


def tell(name: str, seed: int, number: int, error: BaseException, inputs: list[bytes]) -> dict[str, Any]:
    """Tell a failure on stderr; what its record says of it."""
    given = [base64.b64encode(data[:_LONGEST_INPUT]).decode() for data in inputs]
    print(f"{name}: try {number} of seed {seed} fails", file=sys.stderr)
    traceback.print_exception(error, file=sys.stderr)
    for data in given:
        print(f"input (base64): {data}", file=sys.stderr)
    message = "".join(traceback.format_exception_only(error)).strip()[:2000]
    return {"failure": message, "try": number, "input": given}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
