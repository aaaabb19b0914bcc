"""An index at a URL or in a zip file: fetched to the cache, compared with its digests, then a local one."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format.durable import sha256_file
from index_format.errors import IndexDamaged, IndexNotFound, IndexReadOnly, IndexUnreachable, StorageFull
from index_format.location import RemotePath, locate
from index_format.manifest import MANIFEST, encode_manifest, read_manifest
from index_format.reader import Index
from index_format.remote import fetch_index
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter
from tests.hub_server import only_hub


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files; notes what was asked for, and fails with `status` where that is set."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.status and re.search(self.server.failing, self.path):
            self.send_error(self.server.status)
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A web server of `tmp_path`, with `url`, `asked`, and `status` of the answers to paths of `failing`."""
    handler = functools.partial(Handler, directory=str(tmp_path))
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked, server.status, server.failing = [], 0, ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where indexes from elsewhere are kept, for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/stride/indexes"


@pytest.fixture
def index_path(tmp_path: Path, sample: Any) -> Path:
    """A whole small index with operators, of several files an array."""
    sample.build(tmp_path / "run.stride", shard_bytes=256)
    sample.add_operators(tmp_path / "run.stride")
    return tmp_path / "run.stride"


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Any]:
    with only_hub(tmp_path / "hub") as hub:
        yield hub


def zipped(path: Path, target: Path, *, inside: str = "") -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path.rglob("*")):
            archive.write(file, inside + file.relative_to(path).as_posix())
    return target


def s3(path: Path, request: pytest.FixtureRequest) -> str:
    """Upload a directory to a server that speaks S3; its URL."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    request.addfinalizer(server.stop)
    host, port = server.get_host_and_port()
    monkeypatch = request.getfixturevalue("monkeypatch")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    there = s3fs.S3FileSystem(skip_instance_cache=True)
    there.mkdir("bucket")
    there.put(f"{path}/", "bucket/data/run.stride/", recursive=True)
    return "s3://bucket/data/run.stride"


@pytest.mark.parametrize(
    "kind", ["zip", "zip of a directory", "http", "memory", "hf", pytest.param("s3", marks=pytest.mark.slow)]
)
def test_everything_is_read_as_from_the_directory(request, kind, index_path, tmp_path, server, read_tree):
    if kind.startswith("zip"):
        inside = "run.stride/" if "directory" in kind else ""
        remote: Any = zipped(index_path, tmp_path / "copy.stride.zip", inside=inside)
    elif kind == "http":
        remote = f"{server.url}/{index_path.name}/"
    elif kind == "s3":
        remote = s3(index_path, request)
    elif kind == "hf":
        pytest.importorskip("huggingface_hub")
        hub = request.getfixturevalue("hub")
        files = read_tree(index_path)
        hub.commit("me/indexes", {f"run.stride/{name}": data for name, data in files.items()})
        remote = "hf://datasets/me/indexes/run.stride"
    else:
        import fsspec

        remote = f"memory://{tmp_path.name}/run.stride"
        fsspec.filesystem("memory").put(f"{index_path}/", f"{tmp_path.name}/run.stride/", recursive=True)
    before = read_tree(index_path)
    here, there = Index.open(index_path), Index.open(remote)
    assert there.path == locate(remote) and there.digest == here.digest
    assert read_tree(fetch_index(locate(remote))) == before == read_tree(index_path)
    assert there.group_attributes("operators") == here.group_attributes("operators")
    assert there.document_text(11) == here.document_text(11) and there.n_bytes == here.n_bytes
    np.testing.assert_array_equal(there.array("corpus/tokens")[:], here.array("corpus/tokens")[:])
    assert verify(remote) == []
    for write in (
        lambda: there.directory,
        lambda: GroupWriter(remote, "operators", "x"),
        lambda: IndexWriter.create(remote, build_key="k"),
    ):
        with pytest.raises(IndexReadOnly, match="cannot be written") as caught:
            write()
        assert caught.value.fix


def test_files_that_are_here_and_right_are_not_fetched_again(index_path, server, cache, sample):
    url = f"{server.url}/{index_path.name}"
    told: list[tuple[int, int]] = []
    home = fetch_index(RemotePath(url), lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[-1][1] == Index.open(index_path).n_bytes
    n_files = len([name for name in server.asked if not name.endswith(MANIFEST)])
    server.asked.clear()
    assert fetch_index(RemotePath(url)) == home
    assert all(name.endswith(MANIFEST) for name in server.asked) and len(server.asked) == 5
    # interrupted, or damaged since: those files alone
    (home / "corpus/tokens/c/0").write_bytes(b"x" * (home / "corpus/tokens/c/0").stat().st_size)
    (home / "design/columns/c/0/0").unlink()
    (home / MANIFEST).unlink()
    server.asked.clear()
    assert fetch_index(RemotePath(url)) == home and verify(home) == []
    fetched = {name.removeprefix(f"/{index_path.name}/") for name in server.asked}
    assert {name for name in fetched if not name.endswith(MANIFEST)} == {
        "corpus/tokens/c/0",
        "design/columns/c/0/0",
    }
    # another index at the same URL has a place of its own; who has the first open keeps it
    held = Index.open(url)
    sample.add_operators(index_path, steps=6, key="again")
    assert Index.open(url).shape("operators/training_log_loss") == (6,)
    assert held.array("operators/training_log_loss").shape == (4,)
    assert len(list(cache.iterdir())) == 2 and n_files > 25


def test_an_interrupted_fetch_goes_on(index_path, server, cache):
    server.status, server.failing = 500, r"design/columns/c"
    with pytest.raises(IndexUnreachable, match="design/columns"):
        Index.open(f"{server.url}/{index_path.name}")
    (home,) = cache.iterdir()
    assert not (home / MANIFEST).exists() and (home / "corpus/tokens/c/0").exists()
    assert not list(home.rglob("*.part"))
    server.status = 0
    server.asked.clear()
    assert verify(f"{server.url}/{index_path.name}") == []
    assert not any("corpus/tokens/c" in name for name in server.asked)


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("kind", ["zip", "http"])
@pytest.mark.parametrize(
    ("words", "damage"),
    [
        ("other content", flip),
        ("is missing", Path.unlink),
        ("should have", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("has more than", lambda path: path.write_bytes(path.read_bytes() * 100_000)),
    ],
)
def test_damage_is_found_on_the_way(kind, words, damage, index_path, tmp_path, server):
    damage(index_path / "corpus/tokens/c/0")
    remote: Any = f"{server.url}/{index_path.name}"
    if kind == "zip":
        remote = zipped(index_path, tmp_path / "copy.stride.zip")
    with pytest.raises(IndexDamaged, match=words) as caught:
        Index.open(remote)
    assert f"{remote}/corpus/tokens/c/0" in caught.value.message and caught.value.fix
    assert [problem.kind for problem in verify(remote)] == ["content"]


@pytest.mark.parametrize("name", ["../../../escape", "/tmp/escape", "corpus/../../escape", "a//b"])
def test_nothing_is_written_outside_the_cache(name, index_path, tmp_path, server, cache):
    (tmp_path / "escape").write_text("mine")
    files, _ = read_manifest(index_path)
    recorded = sha256_file(tmp_path / "escape")
    (index_path / MANIFEST).write_bytes(encode_manifest({**files, name: recorded})[0])
    before = {path for path in tmp_path.rglob("*") if cache not in path.parents}
    with pytest.raises(IndexDamaged, match="no manifest"):
        Index.open(f"{server.url}/{index_path.name}")
    after = {path for path in tmp_path.rglob("*") if cache not in path.parents}
    assert after - before <= {cache, *cache.parents} and (tmp_path / "escape").read_text() == "mine"


def test_damaged_zip_files_and_other_ones(index_path, tmp_path):
    whole = zipped(index_path, tmp_path / "whole.zip").read_bytes()
    (tmp_path / "plain.zip").write_bytes(b"no zip")
    (tmp_path / "cut.zip").write_bytes(whole[:-200])
    for name in ("plain", "cut"):
        with pytest.raises(IndexDamaged, match=f"{name}.zip"):
            Index.open(tmp_path / f"{name}.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/b.txt", "c")
    for name, words in (("other.zip", "is no index"), ("none.zip", "does not exist")):
        with pytest.raises(IndexNotFound, match=words):
            Index.open(tmp_path / name)


def test_what_cannot_be_reached(index_path, server):
    url = f"{server.url}/{index_path.name}"
    with pytest.raises(IndexNotFound, match="is no index") as missing:
        Index.open(f"{server.url}/none.stride")
    assert missing.value.exit_code == 2 and "stride index build" in missing.value.fix
    for status in (403, 500):
        server.status, server.failing = status, ""
        with pytest.raises(IndexUnreachable, match="cannot be read") as caught:
            Index.open(url)
        assert "check the URL" in caught.value.fix
    with pytest.raises(IndexUnreachable) as secret:
        Index.open("http://me:secret@127.0.0.1:9/run.stride")
    assert "secret" not in secret.value.message


def test_a_full_disk_is_told_before_anything_is_fetched(index_path, server, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("index_format.durable.shutil.disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(StorageFull, match="fetching"):
        Index.open(f"{server.url}/{index_path.name}")
