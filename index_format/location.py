"""The place of an index: a directory, built and mapped there; or a zip file or a URL, fetched to be read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from index_format.errors import IndexReadOnly

# a scheme of two letters or more, so that no drive is one; "zip::https://…" is fsspec's way to chain two
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """The URL of an index, or of something in it: joined and shown as a path is, without its password.

    Attributes
    ----------
    url : str      as it was given, without a slash at its end
    """

    url: str

    def __str__(self) -> str:
        return without_password(self.url)

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        joined = os.fspath(name)
        return self if joined in ("", ".") else RemotePath(f"{self.url}/{joined}")

    @property
    def name(self) -> str:
        """The last part: ``x.stride`` of ``https://host/data/x.stride``."""
        return str(self).rpartition("/")[2]


Location = Path | RemotePath
Given = str | os.PathLike[str] | RemotePath


def without_password(text: str) -> str:
    """Strip user names and passwords from the URLs in a text."""
    return _PASSWORD.sub("", text)


def locate(given: Given) -> Location:
    """Return a URL as a RemotePath, all else, ``file://`` too, as a Path."""
    if isinstance(given, RemotePath):
        return given
    text = os.fspath(given)
    if not isinstance(given, str) or not _URL.match(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return RemotePath(text.rstrip("/"))


def is_elsewhere(where: Location) -> bool:
    """Check for a URL or a zip file: the index is fetched before it is read, and cannot be written."""
    return isinstance(where, RemotePath) or (where.suffix == ".zip" and where.is_file())


def local_directory(given: Given) -> Path:
    """Return the absolute path of an index that is to be written.

    Raises
    ------
    IndexReadOnly      it is a URL, or a zip file
    """
    where = locate(given)
    if isinstance(where, RemotePath):
        raise IndexReadOnly(
            f"index {where} is read over the network, and cannot be written",
            fix="copy the whole directory to a local disk, and name the copy",
        )
    if is_elsewhere(where):
        raise IndexReadOnly(f"index {where} is a zip file, and cannot be written", fix=f"unzip {where} first")
    return Path(os.path.abspath(where))  # noqa: PTH100 (resolve() would follow links)
