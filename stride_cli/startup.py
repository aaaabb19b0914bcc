"""Settle what must be settled before heavy imports: garbage collector, compiled kernels, idle threads."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from index_format.confined import own_directory
from stride_cli.interrupts import at_once


@contextmanager
def without_collection() -> Iterator[None]:
    """Within: the garbage collector rests, and Ctrl-C ends the process at once (`interrupts.at_once`).

    Importing torch and transformers makes some millions of objects that stay. Each time the collector looks
    for cycles it walks over all of them and finds none, which is about an eighth of a cold start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with at_once():
            yield
    finally:
        if was_on:
            gc.enable()


_own_process = False


def own_process() -> None:
    """Say that nobody else's objects live in this process: it runs one command of `stride`."""
    global _own_process
    _own_process = True


def keep_imported() -> None:
    """Take all objects there are out of the collector's sight, where the process is `own_process`.

    It would walk over all that was imported when it is switched on again, once for each generation. To be
    called right after imports: a cycle that is garbage by then stays until the process ends.
    """
    if _own_process:
        gc.freeze()
        atexit.unregister(_thaw)
        atexit.register(_thaw)


def _thaw() -> None:
    """Let triton's objects be collected at the end: nanobind reports them as leaked. All take a second."""
    if "triton" in sys.modules:
        gc.unfreeze()


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait, unless the environment says otherwise.

    By default they spin, each on a core of its own. Where other programs want the cores too, that makes two
    threads slower than one; on an idle machine sleeping costs about a tenth. Before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@cache
def kernel_cache() -> Path | None:
    """Find the directory of compiled kernels, made where it is missing; None where none can be made.

    In the user's cache directory, never beside the source: pip removes what it has installed and nothing
    else, and a directory that stays behind in site-packages hides the next installation. Each version of this
    package, Python and numba has its own, and so has each processor that shares a home. An account without a
    home gets one under the system's temporary directory. ``NUMBA_CACHE_DIR`` goes before all of that.
    """
    import hashlib
    import platform
    from importlib.metadata import version

    import platformdirs
    from llvmlite import binding

    from stride_cli.version import __version__

    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    features = hashlib.sha256(binding.get_host_cpu_features().flatten().encode()).hexdigest()[:8]
    processor = f"{binding.get_host_cpu_name()}.{features}"
    name = f"{__version__}-python{platform.python_version()}-numba{version('numba')}-{processor}"
    home = Path(platformdirs.user_cache_dir("stride", appauthor=False), "kernels")
    if home.is_absolute() and own_directory(home / name):  # "~/…" where there is no home
        return home / name
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    shared = Path(tempfile.gettempdir(), f"stride-kernels-{owner}")
    return shared / name if own_directory(shared) and own_directory(shared / name) else None


def _find_by_content(function: Callable[..., Any], place: Path) -> None:
    """Let numba know a function's file by its content.

    numba looks for what it has compiled by the path of the source, and each environment has its own, which
    would compile all kernels anew. So they are of a copy of the source, whose place is named by its text and
    by what numba does not look at: the files whose kernels it calls, and numbers from other files.
    """
    import hashlib

    own = Path(function.__code__.co_filename)
    digests: dict[bytes, None] = {}
    try:
        for each in (function, *(kernel.py_func for kernel in _called_kernels(function))):
            names = {name: each.__globals__.get(name) for name in each.__code__.co_names}
            fixed = [item for item in names.items() if isinstance(item[1], int | float | str | tuple)]
            digests.setdefault(_digest_of_file(each.__code__.co_filename))
            digests.setdefault(hashlib.sha256(repr(sorted(fixed)).encode()).digest())
            digests.setdefault(hashlib.sha256(each.__module__.encode()).digest())  # kept code imports it
        copy = place / "sources" / hashlib.sha256(b"".join(digests)).hexdigest()[:16] / own.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as fresh:
                fresh.write(own.read_bytes())
            Path(fresh.name).replace(copy)
    except OSError:  # typed in, or in a zip file, or the disk is full
        return
    function.__code__ = function.__code__.replace(co_filename=str(copy))


@cache
def _digest_of_file(path: str) -> bytes:
    """Hash a file (SHA-256), once for all its kernels."""
    import hashlib

    return hashlib.sha256(Path(path).read_bytes()).digest()


def _called_kernels(function: Callable[..., Any]) -> Iterator[Any]:
    """Find the compiled functions that a function could call: of its module, and of modules named there."""
    from numba.core.registry import CPUDispatcher

    package = function.__module__.partition(".")[0]
    waiting, seen = [function.__globals__], set()
    while waiting:
        names = waiting.pop()
        if id(names) in seen:
            continue
        seen.add(id(names))
        for value in list(names.values()):
            if isinstance(value, CPUDispatcher):
                waiting.append(value.py_func.__globals__)
                yield value
            elif (
                isinstance(value, ModuleType)
                and value.__name__.partition(".")[0] == package
                and any(isinstance(each, CPUDispatcher) for each in vars(value).values())
            ):
                waiting.append(vars(value))


def compiled(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`numba.njit` that leaves the interpreter to others meanwhile; compiled once, kept in `kernel_cache`.

    Parameters
    ----------
    options :       of `numba.njit`, such as ``parallel=True``
    """
    if function is None:
        return partial(compiled, **options)
    import numba

    place = kernel_cache()
    if place is not None:
        _find_by_content(function, place)
    elsewhere = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(place or "")  # read while a function is decorated, and never again
    try:
        return numba.njit(nogil=True, cache=place is not None, **options)(function)
    finally:
        numba.config.CACHE_DIR = elsewhere
