"""What takes long to make is made once, by one process of a test run, and kept for the runs that follow."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import shutil
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "numba", "safetensors")
_STALE = 7 * 24 * 3600  # seconds that what other code has made stays
_WHOLE = ".whole"


@cache
def _code() -> bytes:
    """What decides what is made: all of our code and data, the libraries, the processor, the threads."""
    found = hashlib.sha256()
    for package in ("stride_cli", "index_format"):
        for file in sorted((ROOT / package).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    for name in _LIBRARIES:
        try:
            found.update(f"{name} {version(name)}\0".encode())
        except PackageNotFoundError:
            found.update(f"{name}\0".encode())
    threads = os.environ.get("OMP_NUM_THREADS", "")
    found.update(f"{platform.python_version()} {platform.machine()} {threads}\0".encode())
    return found.digest()


def own_copy(place: Path, to: Path) -> Path:
    """A copy of what is kept, of one's own; copies of its run.stride alone find the copy's model."""
    from index_format.reader import Index
    from stride_cli.remembered import remember

    shutil.copytree(place, to)
    # as building it does: that may have been long ago, and what was built since may be gone again
    remember("places", Index.open(to / "run.stride").attributes["fingerprints"]["model"], str(to / "model"))
    return to


def kept(home: Path, make: Callable[[Path], None]) -> Path:
    """A directory that ``make(directory)`` has filled, by this process or another, now or in an earlier run.

    Its path does not change, so that what it holds may name it. It is everybody's: nobody writes to it.
    """
    key = hashlib.sha256(_code() + inspect.getsource(make).encode()).hexdigest()[:16]
    place = home / f"{make.__name__}-{key}"
    with FileLock(home / f"{make.__name__}.lock"):
        if not (place / _WHOLE).exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            make(place)
            (place / _WHOLE).touch()
        os.utime(place)
        for other in home.glob(f"{make.__name__}-*"):
            if time.time() - other.stat().st_mtime > _STALE:
                shutil.rmtree(other, ignore_errors=True)
    return place
