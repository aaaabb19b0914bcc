"""A small server that speaks the hub's protocol, for its real client: repositories of datasets, in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Hub:
    """What the server has.

    Attributes
    ----------
    revisions : repository → commit → file → bytes; the last is main
    asked : of (method, path)       in order
    """

    url: str = ""
    revisions: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Add files to a repository, which is made where there is none; the commit."""
        commits = self.revisions.setdefault(repository, {})
        before = commits[list(commits)[-1]] if commits else {}
        sha = hashlib.sha1(f"{repository}{len(commits)}".encode()).hexdigest()
        commits[sha] = before | files
        return sha


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: bytes | Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def _find(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision; None once it is said that there are none."""
        commits = self.hub.revisions.get(repository)
        if commits is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        revision = unquote(revision)
        if revision != "main" and revision not in commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        self.sha = list(commits)[-1] if revision == "main" else revision
        return commits[self.sha]

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, method in _ROUTES:
            if found := re.fullmatch(pattern, path):
                method(self, **found.groupdict())
                return
        self._refuse(404, "EntryNotFound", "Entry not found")

    do_GET = do_HEAD = do_POST = _answer

    def info(self, repository: str, revision: str | None = None) -> None:
        files = self._find(repository, revision or "main")
        if files is not None:
            siblings = [{"rfilename": name} for name in files]
            self._send(200, {"id": repository, "sha": self.sha, "siblings": siblings, "tags": []})

    def tree(self, repository: str, revision: str, path: str | None = None) -> None:
        files = self._find(repository, revision)
        if files is None:
            return
        below = f"{unquote(path or '')}/".lstrip("/")
        found = [self._entry(name, data) for name, data in files.items() if name.startswith(below)]
        folders = {name[: place.end()] for name in files for place in re.finditer(r"[^/]+(?=/)", name)}
        found += [
            {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            for name in folders
            if name.startswith(below)
        ]
        if "recursive=true" not in urlsplit(self.path).query.lower():
            found = [entry for entry in found if "/" not in entry["path"][len(below) :]]
        self._send(200, found)

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def paths_info(self, repository: str, revision: str) -> None:
        files = self._find(repository, revision)
        if files is None:
            return
        text = self.body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else re.findall(r"paths=([^&]*)", text)
        found = []
        for name in map(unquote, asked):
            if name in files:
                found.append(self._entry(name, files[name]))
            elif any(other.startswith(f"{name}/") for other in files):
                found.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
        self._send(200, found)

    def resolve(self, repository: str, revision: str, path: str) -> None:
        files = self._find(repository, revision)
        if files is None:
            return
        data = files.get(unquote(path))
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": self.sha}
        self._send(200, data, **headers)


_NAME, _REVISION = r"(?P<repository>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (rf"/api/datasets/{_NAME}", _Handler.info),
    (rf"/api/datasets/{_NAME}/revision/{_REVISION}", _Handler.info),
    (rf"/api/datasets/{_NAME}/tree/{_REVISION}(/(?P<path>.*))?", _Handler.tree),
    (rf"/api/datasets/{_NAME}/paths-info/{_REVISION}", _Handler.paths_info),
    (rf"/datasets/{_NAME}/resolve/{_REVISION}/(?P<path>.*)", _Handler.resolve),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a port of its own, for as long as the context lasts."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def only_hub(cache: Any) -> Iterator[Hub]:
    """`serving`, and huggingface_hub and datasets know no other hub than this one, nor another cache."""
    import huggingface_hub
    from huggingface_hub import constants

    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        huggingface_hub.close_session()
        try:
            import datasets
        except ImportError:
            pass
        else:
            patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
            patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
            patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False, raising=False)
        yield hub
        huggingface_hub.close_session()
