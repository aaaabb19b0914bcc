"""Memory that is free, on machines and in containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stride_cli.parallel import available_bytes


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc/meminfo")
def test_available_bytes():
    free = available_bytes()
    assert free is not None and 1 << 20 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, 1024),
        ("0::/job", {"job/memory.max": "max\n", "job/memory.current": "5"}, 1024),
        ("0::/job", {"job/memory.max": "500", "job/memory.current": "300",
                     "job/memory.stat": "inactive_file 40\n"}, 240),
        ("0::/a/b", {"a/memory.max": "100", "a/memory.current": "150", "a/memory.stat": "anon 1"}, 0),
        # a container that sees its own group at the top, under another name
        ("0::/docker/x", {"memory.max": "600", "memory.current": "100", "memory.stat": ""}, 500),
        ("8:pids:/x\n4:cpu,memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "700",
         "memory/x/memory.usage_in_bytes": "100", "memory/x/memory.stat": "cache 9"}, 600),
    ],
)  # fmt: skip
def test_a_containers_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2 kB\nMemAvailable: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == expected
    assert available_bytes(tmp_path / "nothing") is None
