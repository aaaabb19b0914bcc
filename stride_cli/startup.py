"""What makes a cold start shorter: a resting garbage collector, and a place for compiled kernels."""

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
