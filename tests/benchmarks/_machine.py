"""What a record says about the machine, and time that other load does not enter."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, load, Python, and the versions of the packages that a measurement depends on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_1_minute": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def interleave(
    tasks: Mapping[str, Callable[[], Any]], repeats: int, *, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run every task in turn, `repeats` times over, so that other load falls on all of them alike.

    Parameters
    ----------
    clock : processor time of this process by default (all of its threads): what others do enters it little

    Returns
    -------
    seconds : dict      task → its times, in order
    results : dict      task → what it returned last
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = clock()
            results[name] = task()
            seconds[name].append(clock() - began)
    return seconds, results


def resident(process: int | None = None) -> dict[str, int]:
    """Bytes of a process (this one) in memory now: its own (``anonymous``), and pages of mapped files."""
    found = {}
    for line in Path("/proc", str(process or "self"), "status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("RssAnon", "RssFile"):
            found[{"RssAnon": "anonymous", "RssFile": "mapped"}[key]] = int(value.split()[0]) * 1024
    return found


@contextmanager
def watched_memory() -> Iterator[dict[str, float]]:
    """Within: memory is sampled; afterwards the yielded dict has ``before_megabytes`` and ``peak_megabytes``,
    the latter above the former; anonymous pages only."""
    found: dict[str, float] = {}
    before = peak = resident()["anonymous"]
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, resident()["anonymous"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found |= {"before_megabytes": before / 1e6, "peak_megabytes": (peak - before) / 1e6}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
