"""Running servers of this user: a small file each in the state directory, which only this user can read.

It says where the server is, its token and what it serves, so that `stride query` finds it. Light to import.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.confined import own_directory
from index_format.durable import replace_file
from stride_cli import __version__
from stride_cli.remembered import state_directory

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath


@dataclass(frozen=True)
class ServedPlace:
    """An index that is served, and how it was opened; what a query has to ask for to be answered by it."""

    name: str
    index: str
    model: str | None
    device: str
    dtype: str

    @classmethod
    def of(cls, name: str, place: WorkspacePath) -> ServedPlace:
        model = place.model
        if model is not None and Path(model).expanduser().exists():
            model = str(Path(model).expanduser().resolve())
        where = place.index
        index = str(where.resolve()) if isinstance(where, Path) else where.url
        return cls(name, index, model, place.device, place.dtype)

    def like(self, other: ServedPlace) -> bool:
        """Whether the two are one index, opened in the same way."""
        return asdict(self) | {"name": ""} == asdict(other) | {"name": ""}


@dataclass(frozen=True)
class Presence:
    """A running server."""

    pid: int
    host: str
    port: int
    token: str
    version: str
    places: tuple[ServedPlace, ...]

    @property
    def file(self) -> Path | None:
        """Where it is told; None where this user has no state directory."""
        folder = _folder()
        return None if folder is None else folder / f"{self.pid}-{self.port}.json"

    def tell(self) -> bool:
        """Write the file; whether that could be done."""
        folder, file = _folder(), self.file
        if folder is None or file is None or not own_directory(folder):
            return False
        try:
            folder.chmod(0o700)
            with _private():
                replace_file(file, json.dumps(asdict(self)).encode())
            file.chmod(0o600)
        except OSError:
            return False
        return True

    def forget(self) -> None:
        """Remove the file, if it is still this server's."""
        if self.file is not None and _read(self.file) == self:
            with contextlib.suppress(OSError):
                self.file.unlink()


def running(place: ServedPlace) -> Iterator[tuple[Presence, ServedPlace]]:
    """The servers of this version that serve a place. Files of processes that are gone are removed."""
    folder = _folder()
    if folder is None or not folder.is_dir() or not own_directory(folder):
        return
    for file in sorted(folder.glob("*.json")):
        found = _read(file)
        if found is None or not _lives(found.pid):
            with contextlib.suppress(OSError):
                file.unlink()
            continue
        if found.version == __version__:
            for served in found.places:
                if served.like(place):
                    yield found, served


def _read(file: Path) -> Presence | None:
    """What a file tells; None where it is none that a server has written."""
    try:
        told: Any = json.loads(file.read_text(encoding="utf-8"))
        places = tuple(ServedPlace(**place) for place in told.pop("places"))
        found = Presence(**told, places=places)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    kinds = (found.pid, int), (found.port, int), (found.host, str), (found.token, str)
    return found if all(isinstance(value, kind) for value, kind in kinds) else None


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return False  # somebody else's by now
    return True


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Within: files that are made are this user's alone from the beginning."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _folder() -> Path | None:
    return state_directory("servers")
