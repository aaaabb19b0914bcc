"""A small server that speaks the hub's protocol, for its real client: repositories of datasets, in memory."""

from __future__ import annotations

import base64
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

TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """What the server has.

    Attributes
    ----------
    revisions : repository → commit → file → bytes; the last is main
    asked : of (method, path)       in order
    failures : int                  so many of the next downloads break off
    """

    url: str = ""
    revisions: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    failures: int = 0

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Add files to a repository, which is made where there is none; the commit."""
        before = self.files(repository) if self.revisions.get(repository) else {}
        sha = hashlib.sha1(f"{repository}{len(self.revisions.get(repository, {}))}".encode()).hexdigest()
        self.revisions.setdefault(repository, {})[sha] = before | files
        return sha

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        commits = self.revisions[repository]
        return commits[list(commits)[-1] if revision == "main" else revision]


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
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        self.body = self._chunks() if chunked else self.rfile.read(length)
        writes = self.command in ("POST", "PUT") and "paths-info" not in path
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/upload/" not in path:
            self._refuse(401, "", "Invalid username or password.")
            return
        for pattern, method in _ROUTES:
            if found := re.fullmatch(pattern, path):
                method(self, **found.groupdict())
                return
        self._refuse(404, "EntryNotFound", "Entry not found")

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    # ---- reading ----

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
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if self.command == "GET" and self.hub.failures:
            self.hub.failures -= 1
            self._refuse(403, "", "Forbidden")
            return
        self._send(206 if begin else 200, data[int(begin[1]) if begin else 0 :], **headers)

    # ---- writing ----

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.revisions:
            self._send(409, {"error": "exists", "url": f"{self.hub.url}/datasets/{name}"})
            return
        self.hub.commit(name, {".gitattributes": b""})
        self._send(200, {"url": f"{self.hub.url}/datasets/{name}", "name": name})

    def preupload(self, repository: str, revision: str) -> None:
        """Files of more than 1,000 bytes go by LFS, as large ones do."""
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["size"] > 1000 else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for each in json.loads(self.body)["files"]
        ]
        self._send(200, {"files": files})

    def batch(self, repository: str) -> None:
        objects = []
        for each in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/upload/{each['oid']}", "header": {}}}
            objects.append(each if each["oid"] in self.hub.uploads else {**each, "actions": upload})
        self._send(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.uploads[oid] = self.body
        self._send(200, {})

    def add_commit(self, repository: str, revision: str) -> None:
        files = dict(self.hub.files(repository))
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
        sha = self.hub.commit(repository, {})
        self.hub.revisions[repository][sha] = files
        url = f"{self.hub.url}/datasets/{repository}/commit/{sha}"
        self._send(200, {"commitOid": sha, "commitUrl": url, "success": True})

    def whoami(self) -> None:
        self._send(200, {"name": "me", "type": "user", "orgs": []})

    def accepted(self) -> None:
        self._send(200, {})


_NAME, _REVISION = r"(?P<repository>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (rf"/api/datasets/{_NAME}", _Handler.info),
    (rf"/api/datasets/{_NAME}/revision/{_REVISION}", _Handler.info),
    (rf"/api/datasets/{_NAME}/tree/{_REVISION}(/(?P<path>.*))?", _Handler.tree),
    (rf"/api/datasets/{_NAME}/paths-info/{_REVISION}", _Handler.paths_info),
    (rf"/datasets/{_NAME}/resolve/{_REVISION}/(?P<path>.*)", _Handler.resolve),
    (r"/api/repos/create", _Handler.create),
    (rf"/api/datasets/{_NAME}/preupload/{_REVISION}", _Handler.preupload),
    (rf"/datasets/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/upload/(?P<oid>\w+)", _Handler.upload),
    (rf"/api/datasets/{_NAME}/commit/{_REVISION}", _Handler.add_commit),
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/validate-yaml", _Handler.accepted),
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
        patch.setenv("HF_TOKEN", TOKEN)
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
