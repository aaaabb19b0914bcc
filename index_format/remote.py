"""Fetching an index from a URL or a zip file, by fsspec, to the user's cache directory.

Files go to ``<cache>/stride/indexes/<digest of its manifests>``. Each is written beside its place, compared
with its manifest, then renamed: what is there is right, and is not fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from index_format.confined import is_sound, own_directory, wrote
from index_format.durable import make_directory, replace_file, require_space, sha256_file, storage
from index_format.errors import (
    RESTORE,
    ExtraMissing,
    IndexDamaged,
    IndexFormatError,
    IndexNotFound,
    IndexReadOnly,
    IndexUnreachable,
)
from index_format.layout import STAGE_GROUPS
from index_format.location import Location, without_password
from index_format.manifest import DOCUMENT_BYTES, MANIFEST, Files, parse_manifest

Progress = Callable[[int, int], None]  # (bytes that are here, bytes in all)
_AT_ONCE = 4  # with more new connections at once a small server drops some
_CONNECT_SECONDS, _SILENT_SECONDS = 20, 60  # of an HTTP server


def fetch_index(where: Location, progress: Progress | None = None) -> Path:
    """Fetch an index, or what of it is not here yet, and return the directory that it is in.

    Parameters
    ----------
    where : a URL that fsspec reads (``https://…``, ``s3://…``, ``hf://…``), or the path of a zip file
    progress : callable      called as files arrive

    Raises
    ------
    IndexDamaged          a file is missing, or is not what its manifest records
    IndexUnreachable      there is no answer, or the server refuses
    ExtraMissing          a package that reads such URLs is not installed
    IndexReadOnly         this user has no cache directory
    StorageFull           the disk is full; what is complete is not fetched again
    """
    source = _Source.open(where)
    # 1. the manifests say what belongs to the index, and name the place that it is kept at
    manifests = source.read_manifests()
    files: Files = {}
    for name, data in manifests.items():
        prefix = name.removesuffix(MANIFEST)
        named, _ = parse_manifest(data, where / name)
        files.update({prefix + path: recorded for path, recorded in named.items()})
    home = _cache_directory(manifests)
    # 2. what is not here yet, a few files at once
    missing = [name for name, recorded in files.items() if not _is_here(home, name, *recorded)]
    total = sum(length for length, _ in files.values())
    done = total - sum(files[name][0] for name in missing)
    require_space(home, total - done, what=f"fetching {where}")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for length in pool.map(lambda name: source.fetch(name, home / name, *files[name]), missing):
            done += length
            if progress is not None:
                progress(done, total)
    wrote(home, ((name, files[name][1]) for name in missing))
    # 3. the manifests last: without them a directory is no index
    for name, data in manifests.items():
        if not (home / name).is_file():
            replace_file(home / name, data)
    return home


def _cache_directory(manifests: dict[str, bytes]) -> Path:
    """Make the directory, this user's alone, that an index with these manifests is kept in."""
    import platformdirs

    digest = hashlib.sha256(b"".join(manifests[name] for name in sorted(manifests))).hexdigest()
    home = Path(platformdirs.user_cache_dir("stride", appauthor=False), "indexes")
    if not home.is_absolute() or not own_directory(home) or not own_directory(home / digest[:32]):
        raise IndexReadOnly(
            f"{home} cannot be written, and an index from elsewhere is kept there",
            fix="set XDG_CACHE_HOME to a directory of yours, or copy the index to this machine",
        )
    return home / digest[:32]


def _is_here(home: Path, name: str, length: int, sha256: str) -> bool:
    """Check that a file was fetched before, and is what its manifest records."""
    try:
        with (home / name).open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != length:
                return False
            content = mmap(file.fileno(), 0, access=ACCESS_READ) if length else b""
            return is_sound(status, memoryview(content), sha256)
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class _Source:
    """A filesystem of fsspec, and the directory in it that holds the index."""

    where: Location
    filesystem: Any
    root: str

    @classmethod
    def open(cls, where: Location) -> _Source:
        with _told(where):
            import fsspec

            if isinstance(where, Path):
                archive = fsspec.filesystem("zip", fo=str(where), skip_instance_cache=True)
                tops = archive.ls("", detail=False)
                inside = not archive.exists(MANIFEST) and len(tops) == 1
                return cls(where, archive, tops[0].strip("/") if inside else "")
            options: dict[str, Any] = {}
            if where.url.lower().startswith(("http://", "https://")):
                import aiohttp

                # aiohttp's own limit is five minutes for a whole file, however large
                patience = aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
                )
                options["client_kwargs"] = {"timeout": patience}
            return cls(where, *fsspec.url_to_fs(where.url, **options))

    def read_manifests(self) -> dict[str, bytes]:
        """Read the root's manifest, and those of the stages that there are; name -> content."""
        found: dict[str, bytes] = {}
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch, "document")
            for name in (MANIFEST, *(f"{group}/{MANIFEST}" for group in STAGE_GROUPS)):
                try:
                    self._get(name, target, DOCUMENT_BYTES)
                except FileNotFoundError:
                    continue
                except IndexUnreachable as error:
                    # where nobody may list, S3 and some web servers forbid what is not there
                    if not found or not _is_forbidden(error.__cause__):
                        raise
                    continue
                found[name] = target.read_bytes()
        if MANIFEST not in found:
            raise IndexNotFound(
                f"{self.where} is no index: there is no {self.where / MANIFEST}",
                fix="give the URL of the directory that stride index build made",
            )
        return found

    def fetch(self, name: str, target: Path, length: int, sha256: str) -> int:
        """Fetch one file, compare it with its manifest, then rename it to its place; return its length."""
        where = self.where / name
        fresh = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            make_directory(target.parent)
            self._get(name, fresh, length)
            found = sha256_file(fresh)
            if found[0] != length:
                raise IndexDamaged(f"{where} should have {length:,} bytes, has {found[0]:,}", fix=RESTORE)
            if found[1] != sha256:
                raise IndexDamaged(f"{where} has other content than the manifest records", fix=RESTORE)
            fresh.replace(target)
        except IndexFormatError:
            raise
        except FileNotFoundError:
            raise IndexDamaged(f"{where} is missing", fix=RESTORE) from None
        except (OSError, ValueError) as error:  # a name that no file can have, beside others
            raise IndexDamaged(f"{where} cannot be kept: {error}", fix=RESTORE) from None
        finally:
            with contextlib.suppress(OSError, ValueError):
                fresh.unlink()
        return length

    def _get(self, name: str, target: Path, most: int) -> None:
        """Copy a file; IndexDamaged as soon as it has more than `most` bytes."""
        from fsspec.callbacks import Callback

        where = self.where / name

        def bounded(_size: int | None, value: int, **_: Any) -> None:
            if value > most:
                raise IndexDamaged(f"{where} has more than {most:,} bytes", fix=RESTORE)

        path = f"{self.root.rstrip('/')}/{name}" if self.root else name
        with storage(target, most), _told(where):
            self.filesystem.get_file(path, str(target), callback=Callback(hooks={"bounded": bounded}))


@contextlib.contextmanager
def _told(where: Location) -> Iterator[None]:
    """Turn what a library raises into an error that names the URL; FileNotFoundError stays."""
    try:
        yield
    except (IndexFormatError, FileNotFoundError):
        raise
    except (zipfile.BadZipFile, zlib.error) as error:
        raise IndexDamaged(f"{where} is damaged: {error}", fix=RESTORE) from error
    except ImportError as error:
        in_extra = re.match(r"(zip::)?(https?|s3a?)://", str(where), re.IGNORECASE)
        remedy = "pip install 'stride-attribution[remote]'" if in_extra else "install it: fsspec needs it"
        raise ExtraMissing(
            f"{where} needs a Python package that is not installed: {error}", fix=remedy
        ) from error
    except Exception as error:  # every kind of URL is read by a library with errors of its own
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = without_password(" ".join(str(error).split())) or type(error).__name__
        raise IndexUnreachable(
            f"{where} cannot be read: {said}", fix="check the URL, the network, and whether you may read it"
        ) from error


def _is_forbidden(error: BaseException | None) -> bool:
    return isinstance(error, PermissionError) or getattr(error, "status", None) == 403
