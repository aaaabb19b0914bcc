"""An index read from a zip file, a web server, S3 and zarr's stores: as from its directory, never written."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format import places
from index_format.errors import (
    IndexDamaged,
    IndexNotFound,
    IndexReadOnly,
    IndexUnreachable,
    IndexVersionError,
    StageMissing,
)
from index_format.location import RemotePath, local_directory, locate
from index_format.reader import Index
from index_format.shards import ShardedArray
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter

KINDS = ["zip", "zip of a directory", "http", "http without ranges", "fsspec memory", "zarr", "obstore"]
WHOLE, PARTS = 4 << 20, 256


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files; with ranges, as web servers do, unless the server was told not to."""

    server: Any

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        if self.server.status:
            self.send_error(self.server.status)
            return
        path = Path(self.translate_path(self.path))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
        if not self.server.ranges or found is None or not path.is_file():
            super().do_GET()
            return
        start, last = map(int, found.groups())
        data = path.read_bytes()[start : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """serve(directory, ranges=True) → a running server, with `url`, `asked`, `status` (of every answer)."""
    running = []

    def start(directory: Path, *, ranges: bool = True) -> Any:
        handler = functools.partial(Handler, directory=str(directory))
        server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.ranges, server.asked, server.status = ranges, [], 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def zipped(path: Path, target: Path, *, inside: str = "") -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path.rglob("*")):
            archive.write(file, inside + file.relative_to(path).as_posix())
    return target


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The address of a server that speaks S3."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Uploads a directory; its URL."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def upload(path: Path) -> str:
        name = f"bucket-{abs(hash(str(path)))}"
        there = s3fs.S3FileSystem(skip_instance_cache=True)
        there.mkdir(name)
        there.put(f"{path}/", f"{name}/data/run.stride/", recursive=True)
        return f"s3://{name}/data/run.stride"

    return upload


@pytest.fixture
def remote(
    request: pytest.FixtureRequest, index_path: Path, tmp_path: Path, serve: Callable[..., Any]
) -> Any:
    """What `Index.open` takes for a copy of the index at `index_path`, of the kind that the test asks for."""
    kind = request.param
    if kind.startswith("zip"):
        inside = "run.stride/" if "directory" in kind else ""
        return zipped(index_path, tmp_path / "run.stride.zip", inside=inside)
    if kind.startswith("http"):
        return f"{serve(index_path.parent, ranges='without' not in kind).url}/{index_path.name}/"
    if kind == "s3":
        return request.getfixturevalue("s3")(index_path)
    files = {
        file.relative_to(index_path).as_posix(): file for file in index_path.rglob("*") if file.is_file()
    }
    if kind == "fsspec memory":
        import fsspec

        place = f"memory://{tmp_path.name}/run.stride"
        for name, file in files.items():
            fsspec.filesystem("memory").pipe(f"{tmp_path.name}/run.stride/{name}", file.read_bytes())
        return place
    if kind == "zarr":
        from zarr.core.buffer.cpu import Buffer
        from zarr.storage import MemoryStore

        return MemoryStore({name: Buffer.from_bytes(file.read_bytes()) for name, file in files.items()})
    obstore = pytest.importorskip("obstore.store")
    from zarr.storage import ObjectStore

    return ObjectStore(obstore.LocalStore(str(index_path)))


@pytest.fixture(params=[WHOLE, PARTS], ids=["fetched whole", "fetched in parts"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Up to how many bytes are fetched whole: all of a small index, or hardly anything of it."""
    monkeypatch.setattr(places, "_SMALL_BYTES", request.param)
    monkeypatch.setattr(places, "_PIECE_BYTES", request.param)
    return request.param


def all_of(index: Index) -> dict[str, np.ndarray]:
    groups = [group for group in ("corpus", "design", "operators") if index.has(group)]
    return {name: np.asarray(index.array(name)) for group in groups for name in index.names(group)}


@pytest.mark.parametrize("remote", KINDS, indirect=True)
@pytest.mark.usefixtures("small")
def test_everything_is_read_as_from_the_directory(remote, index_path, read_tree):
    read_everything(remote, index_path, read_tree)


@pytest.mark.slow
@pytest.mark.parametrize(("index_path", "small"), [(1 << 20, WHOLE), (256, PARTS)], indirect=True)
@pytest.mark.parametrize("remote", ["s3"], indirect=True)
@pytest.mark.usefixtures("small")
def test_everything_is_read_from_s3(remote, index_path, read_tree):
    """What speaks S3 here takes long to answer: files that are fetched whole, and parts of many."""
    read_everything(remote, index_path, read_tree)


def read_everything(remote, index_path, read_tree):
    before = read_tree(index_path)
    here, there = Index.open(index_path), Index.open(remote)
    assert there.attributes == here.attributes and there.digest == here.digest
    assert there.group_attributes("operators") == here.group_attributes("operators")
    assert there.has("operators/gates") and not there.has("operators/U") and not there.has("truth")
    for document in (29, 0, 13):  # single rows before anything has been read whole
        assert there.document_id(document) == here.document_id(document)
        assert there.document_text(document) == here.document_text(document)
        for chunk in there.document_chunks(document):
            np.testing.assert_array_equal(there.chunk_tokens(chunk), here.chunk_tokens(chunk))
    some = np.array([[3, 0], [here.n_chunks - 1, 3]])
    np.testing.assert_array_equal(there.chunk_documents(some), here.chunk_documents(some))
    expected, found = all_of(here), all_of(there)
    assert expected.keys() == found.keys() and len(found) == 14
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape == there.shape(name)
        np.testing.assert_array_equal(found[name], values)
        np.testing.assert_array_equal(np.concatenate(there.shards(name)), values)
        assert not any(shard.flags.writeable for shard in there.shards(name))
    picks: list[Callable[[int], Any]] = [
        lambda n: slice(1, 4),
        lambda n: slice(None, None, -2),
        lambda n: np.array([2, 0, -1]),
        lambda n: np.arange(n) % 3 == 1,
    ]
    for pick in picks:  # each from an index that has read nothing yet
        there = Index.open(remote)
        for name, values in expected.items():
            rows = pick(len(values))
            np.testing.assert_array_equal(there.array(name)[rows], values[rows])
    assert verify(remote) == []
    assert read_tree(index_path) == before


def test_only_what_is_needed_is_fetched(tmp_path, sample, serve, monkeypatch):
    """Opening asks for no array; a passage of a large text is a range of it."""
    monkeypatch.setattr(places, "_SMALL_BYTES", 32)
    sample.build(tmp_path / "run.stride")
    server = serve(tmp_path)
    index = Index.open(f"{server.url}/run.stride")
    assert not any("/c/" in path for path, _ in server.asked)
    assert (
        len(server.asked) == 17
    )  # the attributes, the manifest, 15 zarr.json: each once, but the root's twice
    server.asked.clear()
    text = index.document_text(11)
    assert text == sample.document(11)[1] != ""
    length = f"{len(text.encode())}"
    asked = {path.partition("/corpus/")[2]: wanted for path, wanted in server.asked}
    assert asked.keys() == {"text_offsets/c/0", "text_bytes/c/0"}
    first, last = map(int, asked["text_bytes/c/0"].removeprefix("bytes=").split("-"))
    assert str(last - first + 1) == length and asked["text_offsets/c/0"] == "bytes=88-103"
    # what has been read whole is kept
    tokens = index.array("corpus/tokens")
    assert isinstance(tokens, ShardedArray)
    whole = np.asarray(tokens)
    server.asked.clear()
    np.testing.assert_array_equal(index.array("corpus/tokens")[:], whole)
    assert server.asked == []


def test_a_zip_is_one_by_its_content_too(index_path, tmp_path):
    other = zipped(index_path, tmp_path / "download")
    assert Index.open(other).digest == Index.open(index_path).digest
    (tmp_path / "plain.zip").write_bytes(b"no zip")
    (tmp_path / "note").write_text("no zip")
    cut = tmp_path / "cut.zip"
    cut.write_bytes(other.read_bytes()[:-200])
    for path in (tmp_path / "plain.zip", cut):
        with pytest.raises(IndexDamaged, match=re.escape(str(path))):
            Index.open(path)
    with pytest.raises(IndexNotFound, match="is no index"):
        Index.open(tmp_path / "note")
    with pytest.raises(IndexNotFound, match="does not exist"):
        Index.open(tmp_path / "none.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/b.txt", "c")
    with pytest.raises(IndexNotFound, match="is no index"):
        Index.open(tmp_path / "other.zip")


def test_a_file_url_is_the_directory_it_names(index_path):
    index = Index.open(f"file://{index_path}")
    assert isinstance(index.shards("corpus/tokens")[0], np.memmap)
    assert index.path == index.directory == index_path
    assert local_directory(f"file://{index_path}") == index_path


# ---- what is wrong with it ----


@pytest.mark.parametrize("kind", ["zip", "http", "http without ranges", "fsspec memory"])
def test_damage_is_found_when_it_is_read(request, kind, index_path, tmp_path, serve):
    """A changed byte, a missing and a cut chunk file: by whoever reads it, with its URL, and by verify."""
    find_damage(request, kind, index_path, tmp_path, serve)


@pytest.mark.slow
@pytest.mark.parametrize("index_path", [256], indirect=True)
def test_damage_is_found_in_s3(request, index_path, tmp_path, serve):
    find_damage(request, "s3", index_path, tmp_path, serve)


def find_damage(request, kind, index_path, tmp_path, serve):
    def copy(change: Callable[[Path], None], number: int) -> Any:
        """A damaged copy, of the kind."""
        damaged = tmp_path / f"damaged-{number}"
        shutil.copytree(index_path, damaged)
        change(damaged / "corpus/tokens/c/0")
        if kind == "zip":
            return zipped(damaged, tmp_path / f"damaged-{number}.zip")
        if kind.startswith("http"):
            return f"{serve(tmp_path, ranges='without' not in kind).url}/damaged-{number}"
        if kind == "s3":
            return request.getfixturevalue("s3")(damaged)
        import fsspec

        place = f"{tmp_path.name}-{number}/run.stride"
        for file in damaged.rglob("*"):
            if file.is_file():
                fsspec.filesystem("memory").pipe(f"{place}/{file.relative_to(damaged)}", file.read_bytes())
        return f"memory://{place}"

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)

    changes = {
        "content": flip,
        "missing": Path.unlink,
        "length": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    }
    words = {"content": "other content", "missing": "is missing", "length": "should have"}
    for number, (damage, change) in enumerate(changes.items()):
        where = copy(change, number)
        index = Index.open(where)  # nothing is asked of chunk files before they are needed
        with pytest.raises(IndexDamaged, match=words[damage]) as caught:
            np.asarray(index.array("corpus/tokens"))
        assert f"{locate(where)}/corpus/tokens/c/0" in caught.value.message and caught.value.fix
        assert [(p.path, p.kind) for p in verify(where)] == [("corpus/tokens/c/0", damage)]


def test_parts_that_end_early_are_noticed(tmp_path, sample, serve, monkeypatch):
    monkeypatch.setattr(places, "_SMALL_BYTES", 32)
    sample.build(tmp_path / "run.stride")
    index = Index.open(f"{serve(tmp_path).url}/run.stride")
    os.truncate(tmp_path / "run.stride/corpus/text_bytes/c/0", 10)
    with pytest.raises(IndexDamaged, match=r"text_bytes/c/0 should have .* bytes, has"):
        index.document_text(11)


def test_a_zip_whose_own_checksum_fails(index_path, tmp_path):
    path = zipped(index_path, tmp_path / "run.stride.zip")
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("corpus/tokens/c/0")
        at = entry.header_offset + 30 + len(entry.filename) + 4
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(IndexDamaged, match="corpus/tokens/c/0"):
        np.asarray(Index.open(path).array("corpus/tokens"))
    assert [(p.path, p.kind) for p in verify(path)] == [("corpus/tokens/c/0", "content")]


def test_extra_files_in_a_zip_are_found(index_path, tmp_path):
    (index_path / "corpus/note").write_text("x")
    (index_path / "operators/note").write_text("x")
    path = zipped(index_path, tmp_path / "run.zip")
    found = {(p.path, p.kind) for p in verify(path)}
    assert found == {("corpus/note", "extra"), ("operators/note", "extra")}


@pytest.mark.parametrize("name", ["zarr.json", "manifest.json", "corpus/tokens/zarr.json"])
def test_metadata_that_are_missing_or_changed(index_path, serve, name):
    url = f"{serve(index_path.parent).url}/{index_path.name}"
    data = (index_path / name).read_bytes()
    (index_path / name).write_bytes(data.replace(b"uint16", b"uint32").replace(b"length", b"hength") + b" ")
    with pytest.raises(IndexDamaged) as caught:
        Index.open(url)
    assert f"{url}/{name}" in caught.value.message
    (index_path / name).unlink()
    with pytest.raises(IndexDamaged, match="is missing") as caught:
        Index.open(url)
    assert f"{url}/{name}" in caught.value.message
    assert [(p.path, p.kind) for p in verify(url) if p.path == name] == [(name, "missing")]


def test_a_url_with_no_index(tmp_path, serve):
    server = serve(tmp_path)
    for look in (Index.open, verify):
        with pytest.raises(IndexNotFound) as caught:
            look(f"{server.url}/x.stride")
        assert f"{server.url}/x.stride is no index" in caught.value.message and caught.value.exit_code == 2
    (tmp_path / "zarr.json").write_text("<html>")
    with pytest.raises(IndexDamaged, match="is no JSON"):
        Index.open(server.url)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(IndexNotFound, match="no STRIDE index"):
        Index.open(server.url)
    (tmp_path / "zarr.json").write_text(
        '{"attributes": {"stride": {"format_version": 3}}, "zarr_format": 3, "node_type": "group"}'
    )
    with pytest.raises(IndexVersionError, match=re.escape(server.url)):
        Index.open(server.url)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_server_that_refuses(index_path, serve, status):
    server = serve(index_path.parent)
    url = f"{server.url}/{index_path.name}"
    index = Index.open(url)
    server.status = status
    for look in (
        lambda: Index.open(url),
        lambda: np.asarray(index.array("corpus/tokens")),
        lambda: verify(url),
    ):
        with pytest.raises(IndexUnreachable) as caught:
            look()
        assert url in caught.value.message and str(status) in caught.value.message
        assert caught.value.fix and caught.value.exit_code == 2
    if status == 403:  # as S3 answers for what is not there to those who may not list
        assert not index.has("truth")
        with pytest.raises(StageMissing, match="has no truth yet"):
            index.names("truth")
    else:
        with pytest.raises(IndexUnreachable):
            index.has("truth")


def test_no_server_and_no_network(index_path, serve):
    server = serve(index_path.parent)
    index = Index.open(f"{server.url}/{index_path.name}")
    server.shutdown()
    server.server_close()
    with pytest.raises(
        IndexUnreachable, match=re.escape(f"{server.url}/{index_path.name}/corpus/tokens/c/0")
    ):
        np.asarray(index.array("corpus/tokens"))
    for url in (f"{server.url}/x.stride", "https://no.such.host.invalid/x.stride"):
        with pytest.raises(IndexUnreachable, match=re.escape(url)):
            Index.open(url)


@pytest.mark.parametrize(
    ("package", "url"), [("aiohttp", "https://host/x.stride"), ("s3fs", "s3://bucket/x.stride")]
)
def test_a_missing_package_is_named_with_its_extra(package, url):
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"  # what a missing package looks like to an import
        "from index_format.errors import ExtraMissing\n"
        "from index_format.reader import Index\n"
        "try:\n"
        f"    Index.open({url!r})\n"
        "except ExtraMissing as error:\n"
        "    print(error.message, error.fix, error.exit_code, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, fix, exit_code = done.stdout.splitlines()
    assert url in message and fix == "pip install 'stride-attribution[remote]'" and exit_code == "2"


def test_a_url_of_an_unknown_kind():
    with pytest.raises(IndexUnreachable, match="ftpx://host/x cannot be read"):
        Index.open("ftpx://host/x")


def test_passwords_are_not_shown(index_path, serve):
    server = serve(index_path.parent)
    secret = server.url.replace("://", "://me:secret@")
    path = Index.open(f"{secret}/{index_path.name}").path
    assert isinstance(path, RemotePath) and str(path) == f"{server.url}/{index_path.name}"
    assert path.name == index_path.name and path.url.startswith(secret)
    server.status = 500
    for url in (f"{secret}/x", "http://me:secret@no.such.host.invalid/x"):
        with pytest.raises(IndexUnreachable) as caught:
            Index.open(url)
        assert "secret" not in caught.value.message


# ---- nothing is written to it ----


@pytest.mark.parametrize(
    "where", ["https://host/run.stride", "s3://bucket/run.stride", "memory://run.stride", "run.stride.zip"]
)
def test_writers_refuse(where, index_path, tmp_path, monkeypatch, sample):
    monkeypatch.chdir(tmp_path)
    zipped(index_path, tmp_path / "run.stride.zip")
    before = sorted(tmp_path.rglob("*"))
    for begin in (
        lambda: IndexWriter.create(where, build_key="k"),
        lambda: IndexWriter.create(where, build_key="k", overwrite=True),
        lambda: IndexWriter.extend(where, build_key="k2"),
        lambda: GroupWriter(where, "operators", "o"),
        lambda: local_directory(where),
    ):
        with pytest.raises(IndexReadOnly, match="cannot be written") as caught:
            begin()
        assert where in caught.value.message and caught.value.fix and caught.value.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_kept_beside_an_index_needs_a_directory(index_path, tmp_path, serve):
    url = f"{serve(index_path.parent).url}/{index_path.name}"
    for where in (url, zipped(index_path, tmp_path / "download")):
        with pytest.raises(IndexReadOnly, match="cannot be written"):
            _ = Index.open(where).directory
    with pytest.raises(StageMissing) as caught:
        Index.open(url).array("truth/losses")
    assert (
        caught.value.fix == "stride evaluate truth on the directory that this is a copy of, and copy it again"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://host/a/x.stride/", RemotePath("https://host/a/x.stride")),
        ("s3://bucket/x", RemotePath("s3://bucket/x")),
        ("zip::https://host/x.zip", RemotePath("zip::https://host/x.zip")),
        ("x.stride", Path("x.stride")),
        ("/a/b:c/d", Path("/a/b:c/d")),
        ("C:/x", Path("C:/x")),
        ("file:///a%20b/x.stride", Path("/a b/x.stride")),
        (Path("https:/host"), Path("https:/host")),
        (RemotePath("s3://b"), RemotePath("s3://b")),
    ],
)
def test_paths_and_urls_are_told_apart(given, expected):
    assert locate(given) == expected
