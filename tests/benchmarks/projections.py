"""How fast projections are scanned: random codes, against one pass of NumPy over the same bytes.

`pass`: the sum of all codes as 64-bit integers, which is as fast as memory delivers them. `scan`: estimates
of every chunk for so many queries at once; `ratio` is its time by that of the pass, `ratio_per_query` that by
the number of queries. Both take turns, so that other load falls on them alike; the best of each counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from stride_cli.operators.projections import bit_planes, scan
from stride_cli.output import emit
from tests.benchmarks._machine import interleave, machine


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(given.threads)
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (given.chunks, given.bytes), np.uint8)
    step = random.random(given.chunks, np.float32)
    same = {"benchmark": "projections", "chunks": given.chunks, "bytes": given.bytes}
    same |= {"threads": given.threads}
    for queries in given.queries:
        planes, units = bit_planes(random.normal(size=(queries, 8 * given.bytes)).astype(np.float32))
        found = np.empty((queries, given.chunks), np.float32)
        tasks = {
            "pass": codes.view(np.uint64).sum,
            "scan": partial(scan, codes, step, planes, units, found),
        }
        tasks["scan"]()  # compiled
        times, _ = interleave(tasks, given.repeats)
        best = {name: min(seconds) for name, seconds in times.items()}
        ratio = best["scan"] / best["pass"]
        yield {
            **same,
            "queries": queries,
            "pass_seconds": best["pass"],
            "scan_seconds": best["scan"],
            "gigabytes_per_second": codes.nbytes / best["scan"] / 1e9,
            "ratio": ratio,
            "ratio_per_query": ratio / queries,
        } | machine("torch", "numpy", "numba")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks projections", description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    for row in run(parser.parse_args(arguments)):
        emit(row)
