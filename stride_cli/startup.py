"""What has to be settled before heavy imports: the garbage collector, compiled kernels, waiting threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_collection() -> Iterator[None]:
    """Within: the garbage collector rests.

    Importing torch and transformers makes some millions of objects that stay. Each time the collector looks
    for cycles it walks over all of them and finds none, which is about an eighth of a cold start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
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
    called right after imports: a cycle that is garbage by then stays.
    """
    if _own_process:
        gc.freeze()


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait, unless the environment says otherwise.

    By default they spin, each on a core of its own. Where other programs want the cores too, that makes two
    threads slower than one; on an idle machine sleeping costs about a tenth. Before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def choose_kernel_cache() -> None:
    """Give numba a directory of the user's own under the system's temporary one, where it would find none.

    numba keeps compiled kernels beside the source, else in the user's cache directory. Where neither can be
    written (a read-only installation run by an account without a home) it refuses to import them at all.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (no home: no error)
    places = [Path(__file__).parent, Path(home)]
    if any(_writable(place) for place in places):
        return
    import tempfile

    owner = os.getuid() if hasattr(os, "getuid") else "user"
    os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"stride-kernels-{owner}"))


def _writable(place: Path) -> bool:
    """Whether a file can be made in the directory, or the directory itself where it is missing."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return os.access(place, os.W_OK)
