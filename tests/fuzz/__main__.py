"""`python -m tests.fuzz --minutes N [--target NAME]`: random input for as long as that, and what fails.

On stdout one JSON line a target: {target, seed, tries, failures, crashes, seconds, peak_bytes,
slowest_seconds, python, versions, failed}; exit code 1 where something failed. A failure's input (base64)
and traceback are told on stderr, the input in ``failed`` too, of the first ten. A try depends on the target's
name, the seed and its number alone: ``--seed S --first N --tries 1`` repeats it, also one that killed the
process or did not end.

`python -m tests.fuzz --table FILE` prints such lines as the Markdown table of docs/security.md.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import json
import mmap
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.fuzz import known_targets, one_try, prepare

TOLD = 10
PACKAGES = ("stride-attribution", "pyarrow", "zstandard", "numpy", "zarr", "transformers", "tokenizers")
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
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.table:
        print(table([json.loads(line) for line in given.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    if given.worker:
        work(given)
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
    until = began + 60 * given.minutes
    record: dict[str, Any] = {
        "target": name,
        "seed": given.seed,
        "tries": 0,
        "failures": 0,
        "crashes": 0,
    }
    peak, slowest, failed = 0, 0.0, []
    first = given.first
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        with mmap.mmap(file.fileno(), 8) as counter:
            while time.monotonic() < until and (given.tries is None or record["tries"] < given.tries):
                counter[:] = first.to_bytes(8, "little")
                command = _command(
                    name, file.fileno(), first, until - time.monotonic(), given, record["tries"]
                )
                with subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, pass_fds=[file.fileno()]
                ) as worker:
                    assert worker.stdout is not None
                    for line in worker.stdout:
                        said = json.loads(line)
                        if "failure" in said:
                            record["failures"] += 1
                            failed += [said] if len(failed) < TOLD else []
                        else:
                            peak, slowest = (
                                max(peak, said["peak_bytes"]),
                                max(slowest, said["slowest_seconds"]),
                            )
                code = worker.returncode
                last = int.from_bytes(counter[:], "little")
                record["tries"] += last - first
                if code:
                    record["tries"] += 1
                    record["failures"] += 1
                    record["crashes"] += 1
                    crash = {"failure": f"the process ended with {code}", "try": last}
                    print(f"{name}: {crash['failure']} in try {last} of seed {given.seed}", file=sys.stderr)
                    failed += [crash] if len(failed) < TOLD else []
                    last += 1
                first = last
    return record | {
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": peak,
        "slowest_seconds": round(slowest, 3),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "failed": failed,
    }


def _command(
    name: str, descriptor: int, first: int, seconds: float, given: argparse.Namespace, done: int
) -> list[str]:
    """What starts a process that tries a target, from this try on."""
    left = [] if given.tries is None else ["--tries", str(given.tries - done)]
    return [
        sys.executable, "-m", "tests.fuzz", "--worker", f"{name}:{descriptor}", "--seed", str(given.seed),
        "--first", str(first), "--limit", str(given.limit), "--minutes", str(seconds / 60), *left,
    ]  # fmt: skip


def work(given: argparse.Namespace) -> None:
    """Try a target until the time is over, counting in a file that another process reads."""
    name, _, descriptor = given.worker.rpartition(":")
    target = known_targets()[name]
    until = time.monotonic() + 60 * given.minutes
    slowest = 0.0
    prepare(name)

    def late(*_: Any) -> None:
        raise Late(f"takes longer than {given.limit} seconds")

    signal.signal(signal.SIGALRM, late)
    faulthandler.enable()
    with mmap.mmap(int(descriptor), 8) as counter:
        number = given.first
        while time.monotonic() < until and (given.tries is None or number < given.first + given.tries):
            signal.setitimer(signal.ITIMER_REAL, given.limit)
            # where a library does not come back to Python, which alone takes signals
            faulthandler.dump_traceback_later(3 * given.limit, exit=True)
            began = time.perf_counter()
            failure = one_try(target, random.Random(f"{name}:{given.seed}:{number}"))
            slowest = max(slowest, time.perf_counter() - began)
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            if failure is not None:
                tell(name, given.seed, number, *failure)
            number += 1
            counter[:] = number.to_bytes(8, "little")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"peak_bytes": peak, "slowest_seconds": slowest}), flush=True)


def tell(name: str, seed: int, number: int, error: BaseException, inputs: list[bytes]) -> None:
    """A failure, on stdout for the process that waits, on stderr for people."""
    told = {
        "failure": "".join(traceback.format_exception_only(error)).strip()[:2000],
        "try": number,
        "input": [base64.b64encode(data[:_LONGEST_INPUT]).decode() for data in inputs],
    }
    print(json.dumps(told), flush=True)
    print(f"{name}: try {number} of seed {seed} fails", file=sys.stderr)
    traceback.print_exception(error, file=sys.stderr)
    for data in told["input"]:
        print(f"input (base64): {data}", file=sys.stderr)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
