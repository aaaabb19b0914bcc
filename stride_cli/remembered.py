"""Files found again: paths as an index records them, and facts kept by digest in the user's state directory.

A recorded path begins with ``./`` or ``../`` and starts from the index's own directory, so that both can be
moved together. Any other is taken as it stands: a hub id, and the absolute paths of earlier versions.

Kept facts spare the user questions and time. Where nothing can be kept, nothing is remembered.
"""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path
from typing import Literal

from index_format.confined import own_directory
from index_format.durable import replace_file
from index_format.location import Location

Kind = Literal["code", "places", "corpora", "bases", "bounds", "secrets"]


def remember(kind: Kind, digest: str, text: str) -> None:
    """Keep a line of text under a digest.

    Parameters
    ----------
    kind : "code" (where a network's file was, which the user named), "places" (where a model or a corpus is),
        "corpora" (files that hold what an index does), "bases" (the model that an adapter was given with),
        "bounds" (an index whose numbers point inside it), "secrets" (of this user's servers)
    digest : SHA-256 in hex
    """
    place = state_directory(kind)
    if place is not None and own_directory(place):
        with contextlib.suppress(OSError):  # a full disk is no reason to fail
            replace_file(place / digest, (text + "\n").encode())


def recall(kind: Kind, digest: str) -> str | None:
    """Return the text kept under a digest; None where there is none."""
    place = state_directory(kind)
    if place is None or not place.is_dir() or not own_directory(place):
        return None
    try:
        return (place / digest).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError):
        return None


def state_directory(name: str) -> Path | None:
    """Return a directory of the user's state, made or not; None where there is no home."""
    import platformdirs

    home = Path(platformdirs.user_state_dir("stride", appauthor=False))
    return home / name if home.is_absolute() else None  # "~/…" where there is none


def recorded_path(path: str | Path, index: str | Path) -> str:
    """Return a path, or a glob, as the index at `index` records it.

    Directories on the way are resolved, so that ``..`` leads where it seems to; the last name is kept, also
    where it is a link.
    """
    relative = os.path.relpath(_real(path), _real(index))
    return relative if relative.startswith(os.pardir) else os.path.join(os.curdir, relative)  # noqa: PTH118


def find_recorded(recorded: str, index: Location) -> str | None:
    """Find a recorded path (or glob) on this machine; None where nothing is there, as beside a URL."""
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
