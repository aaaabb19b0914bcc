"""Measure the memory that processes of this machine can still have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Measure the bytes that can be had without swapping, in this process's container (control group); None
    where the system does not say."""
    free = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    left = [] if free is None else [free]
    for folder, limit, used in _memory_groups(root):
        with contextlib.suppress(OSError, ValueError):
            allowed = (folder / limit).read_text().strip()  # "max", or a huge number: none
            if allowed != "max":
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(cached.get("inactive_file", 0))
                left.append(max(0, int(allowed) - taken))
    return min(left, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Find this process's control groups and those above: folder, file of the limit, file of the use."""
    second, first = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, *(first if controllers else second)
            if folder == top:
                break
