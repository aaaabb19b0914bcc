"""Many queries at once on one index, and many prompts in one process: whose memory is it, and does it grow?

`--processes` queries start together (forks of one interpreter that has imported what they import, as
tests/prepared.py; each opens the index itself). When all have answered and none has ended, what each maps of
the index is read from /proc: resident bytes (RSS) count a page in every process that has it, proportional
bytes (PSS) share it out. Then one process answers `--prompts` different prompts, reading `--read` chunks for
each; its own (anonymous) memory is read after every tenth of them.

One record a part. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from index_format.reader import Index
from stride_cli.output import emit
from tests.benchmarks._machine import machine, resident
from tests.prepared import Prepared

_EACH = (
    800 << 20
)  # bytes that a process may take of its own, before it shares any with the one it is forked of
_SPARE = 3 << 30  # left to others


class Asker:
    """`stride query -`: a process that answers line by line, and stays."""

    def __init__(self, prepared: Prepared, index: Path, log: Any, read: int | None = None) -> None:
        theirs, self._prompts = os.pipe()
        answers, ours = os.pipe()
        line = f"query - --json --top 3 --index {shlex.quote(str(index))}"
        line += "" if read is None else f" --read {read}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STRIDE_NO_PROGRESS": "1"}
        self._process = prepared.start(
            ["stride", *shlex.split(line)], env=environment, stdin=theirs, stdout=ours, stderr=log
        )
        os.close(theirs)
        os.close(ours)
        self._answers = os.fdopen(answers, encoding="utf-8")
        self.pid = self._process.pid

    def send(self, prompt: str) -> None:
        os.write(self._prompts, f"{prompt}\n".encode())

    def answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, f"the query ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """Let it end; an error where it failed."""
        os.close(self._prompts)
        self._answers.close()
        code = self._process.wait()
        assert code == 0, f"a query ended with {code}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks load", description=__doc__)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument(
        "--read", type=int, default=2, help="0: as recovered; as many as a query would is slow"
    )
    parser.add_argument("--prompt", default="The French Revolution began in")
    for record in run(parser.parse_args(arguments)):
        emit(record)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sizes = f"--processes {given.processes} --prompts {given.prompts} --read {given.read}"
    about = {"command": f"python -m tests.benchmarks load --index {given.index} {sizes}"}
    about |= machine("torch", "transformers", "numpy")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        prepared = Prepared(Path(folder))
        try:
            assert prepared.forks, "memory is read from /proc, and processes are forked: Linux only"
            yield at_once(prepared, given, log) | about
            yield one_after_another(prepared, given, log) | about
        finally:
            prepared.close()


def at_once(prepared: Prepared, given: argparse.Namespace, log: Any) -> dict[str, Any]:
    """Queries side by side; what each has of the index in memory, and what that is in all."""
    needed, there = given.processes * _EACH + _SPARE, available()
    assert needed < there, (
        f"{needed:,} bytes of memory are needed, {there:,} are available: fewer --processes"
    )
    with ExitStack() as ending:
        askers = []
        for _ in range(given.processes):
            askers.append(Asker(prepared, given.index, log))
            ending.callback(askers[-1].close)
        began = time.perf_counter()
        for asker in askers:
            asker.send(given.prompt)
        hits = {json.dumps([hit["document"] for hit in asker.answer()["hits"]]) for asker in askers}
        seconds = time.perf_counter() - began
        assert len(hits) == 1, f"answers differ: {hits}"
        found = [mapped(asker.pid, given.index) for asker in askers]
        own = [resident(asker.pid)["anonymous"] for asker in askers]
        shared_out = [whole(asker.pid)["Pss"] for asker in askers]
    rss, pss = ([each[kind] for each in found] for kind in ("Rss", "Pss"))
    return {
        "benchmark": "load",
        "what": "queries at once",
        "processes": given.processes,
        "index_bytes": Index.open(given.index).n_bytes,
        "mapped_rss_bytes": {"one": round(statistics.median(rss)), "all": sum(rss)},
        "mapped_pss_bytes": {"one": round(statistics.median(pss)), "all": sum(pss)},
        # 1: one copy for all; as many as there are processes: a copy for each
        "copies": sum(pss) / statistics.median(rss),
        "private_bytes_of_index": sum(each["Private_Dirty"] for each in found),
        "anonymous_bytes_of_one": round(statistics.median(own)),
        "pss_bytes": {"one": round(statistics.median(shared_out)), "all": sum(shared_out)},
        "wall_seconds": seconds,
    }


def one_after_another(prepared: Prepared, given: argparse.Namespace, log: Any) -> dict[str, Any]:
    """Different prompts to one process, and its memory meanwhile."""
    step = max(1, given.prompts // 10)
    marks: dict[int, dict[str, int]] = {}
    began = time.perf_counter()
    with ExitStack() as ending:
        asker = Asker(prepared, given.index, log, given.read)
        ending.callback(asker.close)
        for number in range(1, given.prompts + 1):
            asker.send(f"{given.prompt} {number}")
            asker.answer()
            if number % step == 0:
                marks[number] = resident(asker.pid)
    first, last = (marks[place]["anonymous"] for place in (min(marks), max(marks)))
    return {
        "benchmark": "load",
        "what": "prompts in one process",
        "prompts": given.prompts,
        "read": given.read,
        "anonymous_bytes": {str(number): found["anonymous"] for number, found in marks.items()},
        "mapped_bytes": {str(number): found["mapped"] for number, found in marks.items()},
        "ratio": last / first,
        "bytes_a_prompt": (last - first) / max(1, max(marks) - min(marks)),
        "wall_seconds_a_prompt": (time.perf_counter() - began) / given.prompts,
    }


def mapped(process: int, below: Path) -> Counter[str]:
    """Bytes of files below a directory that a process has mapped: Rss, Pss, Private_Dirty and others."""
    home = f"{below.resolve()}/"
    found: Counter[str] = Counter()
    inside = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):  # a mapping begins: addresses, permissions, offset, device, inode, path
            inside = " ".join(rest[4:]).startswith(home)
        elif inside and rest[-1] == "kB":
            found[key[:-1]] += int(rest[0]) << 10
    return found


def whole(process: int) -> dict[str, int]:
    """Bytes of all that a process has: Rss, Pss, …"""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def available() -> int:
    """Bytes of memory that new processes can have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
