"""Paths as an index records them: from its own directory, so that both can be moved together.

A recorded path begins with ``./`` or ``../``. Whatever begins otherwise is taken as it stands: a hub id, and
the absolute paths that earlier versions recorded.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from index_format.location import Location


def recorded_path(path: str | Path, index: str | Path) -> str:
    """Return a path, or a glob, as the index at `index` records it.

    Directories on the way are resolved, so that ``..`` leads where it seems to; the last name is kept, also
    where it is a link.
    """
    relative = os.path.relpath(_real(path), _real(index))
    return relative if relative.startswith(os.pardir) else os.path.join(os.curdir, relative)  # noqa: PTH118


def find_recorded(recorded: str, index: Location) -> str | None:
    """Find a recorded path (or glob) on this machine; None where nothing is there.

    Parameters
    ----------
    index : path of the index, also of a zip file in its place; beside a URL there is nothing
    """
    return next((place for place in recorded_places(recorded, index) if _exists(place)), None)


def recorded_places(recorded: str, index: Location) -> list[str]:
    """List the places of a recorded path, the likeliest first."""
    if not recorded.startswith(os.curdir):
        return [recorded]
    # a link to an index leads to what is beside the index, or else beside the link
    bases = [index.resolve(), index.absolute()] if isinstance(index, Path) else []
    return list(dict.fromkeys(os.path.normpath(base / recorded) for base in bases))


def _real(path: str | Path) -> Path:
    path = Path(path).expanduser().absolute()
    return path.resolve() if path.name in ("", os.pardir) else path.parent.resolve() / path.name


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists() or any(True for _ in glob.iglob(path))  # noqa: PTH207
