"""What it costs a query that files of its index are compared with their digests when they are first touched.

Whole `stride query` processes in turn: with nothing remembered of the index (every file is read and
digested), with what the first one has remembered, and without looking (`Soundness.check` does nothing).
Processor and wall seconds, and their ratios to "without", round by round: median and range. Files are in the
system's cache, and compiled kernels are there, throughout. Each process also says how long it was in
`Soundness.check` and in `Index.check_bounds`, whose share of the whole is free of what else the machine does;
``both`` adds them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from index_format.reader import Index
from stride_cli.output import emit
from stride_cli.startup import kernel_cache
from tests.benchmarks._machine import machine

_QUERY = """
import atexit, json, sys, time
from index_format import reader, soundness
looks = sys.argv.pop(1) == "look"
spent = {"check": 0.0, "check_wall": 0.0, "bounds": 0.0, "bounds_wall": 0.0, "digested_bytes": 0}
def timed(function, name):
    def call(*arguments):
        began, wall = time.process_time(), time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] += time.process_time() - began
            spent[name + "_wall"] += time.perf_counter() - wall
    return call
digest = soundness.hashlib.sha256
class Counted:
    @staticmethod
    def sha256(content=b""):
        spent["digested_bytes"] += len(content)
        return digest(content)
soundness.hashlib = Counted
check = soundness.Soundness.check if looks else lambda *arguments: None
soundness.Soundness.check = timed(check, "check")
reader.Index.check_bounds = timed(reader.Index.check_bounds, "bounds")
atexit.register(lambda: print("spent", json.dumps(spent), file=sys.stderr))
from stride_cli.__main__ import main
sys.argv[0] = "stride"
main()
"""
VARIANTS = ("without", "remembered", "nothing remembered")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks checks", description=__doc__)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--prompt", default="The French Revolution began in")
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args(arguments)
    emit(run(given.index, given.prompt, given.repeats) | machine("torch", "transformers", "numpy"))


def run(index: Path, prompt: str, repeats: int) -> dict[str, Any]:
    """The record; `index` exists and has operators."""
    opened = Index.open(index)
    opened.group_attributes("operators")
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="stride-checks-") as folder:
        kept = Path(folder, "kept")
        _ask(index, prompt, kept)  # remembers, and compiles what is not compiled yet
        for number in range(repeats):
            # each round begins with another one: what else the machine does falls on all alike
            for variant in (*VARIANTS[number % 3 :], *VARIANTS[: number % 3]):
                home = kept if variant == "remembered" else Path(folder, f"{variant}-{number}")
                rounds[variant].append(_ask(index, prompt, home, looks=variant != "without"))
    record: dict[str, Any] = {
        "benchmark": "checks",
        "command": f"python -m tests.benchmarks checks --index {index} --repeats {repeats}",
        "index_bytes": opened.n_bytes,
        "repeats": repeats,
        "digested_bytes": {
            name: max(each["digested_bytes"] for each in found) for name, found in rounds.items()
        },
    }
    base = rounds["without"]
    for clock in ("processor", "wall"):
        suffix = "" if clock == "processor" else "_wall"
        record[f"{clock}_seconds"] = {
            name: statistics.median(each[clock] for each in found) for name, found in rounds.items()
        }
        record[f"{clock}_ratio"] = {
            name: _spread(
                [ours[clock] / plain[clock] for ours, plain in zip(rounds[name], base, strict=True)]
            )
            for name in VARIANTS[1:]
        }
        record[f"{clock}_share"] = {
            name: {
                what: _spread([sum(each[key + suffix] for key in keys) / each[clock] for each in found])
                for what, keys in (
                    ("check", ["check"]),
                    ("bounds", ["bounds"]),
                    ("both", ["check", "bounds"]),
                )
            }
            for name, found in rounds.items()
        }
    digested = [
        each["digested_bytes"] / each["check"] for each in rounds["nothing remembered"] if each["check"]
    ]
    record["digested_bytes_a_second"] = statistics.median(digested) if digested else None
    return record


def _ask(index: Path, prompt: str, home: Path, *, looks: bool = True) -> dict[str, float]:
    """One query in a process of its own, which remembers there: what it took, and of that the checks."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "NUMBA_CACHE_DIR": str(kernel_cache() or ""),
        "STRIDE_NO_PROGRESS": "1",
    }
    command = [
        sys.executable,
        "-c",
        _QUERY,
        "look" if looks else "no",
        "query",
        prompt,
        "--index",
        str(index),
        "--json",
    ]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-1000:]
    told = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("spent "))
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor": processor, "wall": wall, **json.loads(told.removeprefix("spent "))}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
