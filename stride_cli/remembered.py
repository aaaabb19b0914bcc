"""Facts about files of this machine, kept by digest in the user's state directory.

They spare the user questions and time. Where nothing can be kept, nothing is remembered.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from index_format.confined import own_directory
from index_format.durable import replace_file

Kind = Literal["code", "places", "corpora", "bases", "bounds"]


def remember(kind: Kind, digest: str, text: str) -> None:
    """Keep a line of text under a digest.

    Parameters
    ----------
    kind : "code" (where a network's file was, which the user named), "places" (where a model or a corpus is),
        "corpora" (files that hold what an index does), "bases" (the model that an adapter was given with),
        "bounds" (an index whose numbers point inside it)
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
