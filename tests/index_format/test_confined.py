"""An index that somebody has prepared: nothing outside it is read or written, and nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from index_format.confined import is_inside
from index_format.durable import Journal
from index_format.errors import IndexDamaged, IndexExists, IndexFormatError
from index_format.layout import FORMAT_VERSION
from index_format.manifest import MANIFEST, encode_json, encode_manifest, read_manifest
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter
from tests.same_fit import contents

SECRET = b"a line that nobody may lose\n"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's files, outside."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_bytes(SECRET)
    (folder / "c").mkdir()
    (folder / "c/0").write_bytes(SECRET)
    return folder


def unharmed(victim: Path) -> bool:
    return contents(victim) == {"thesis.txt": SECRET, "c/0": SECRET}


def begin(path: Path, key: str = "k") -> GroupWriter:
    return GroupWriter(path, "operators", key, overwrite=True)


def append_gates(writer: GroupWriter) -> None:
    writer.append("operators/gates", np.arange(48, dtype=np.float32).reshape(12, 4))


def strange(kind: str, at: Path, victim: Path) -> None:
    """Something that is neither a directory nor a plain file."""
    at.parent.mkdir(parents=True, exist_ok=True)
    if at.is_dir() and not at.is_symlink():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    if kind == "link":
        at.symlink_to(victim)
    elif kind == "link to a file":
        at.symlink_to(victim / "thesis.txt")
    elif kind == "fifo":
        os.mkfifo(at)
    else:
        at.symlink_to("/dev/zero")


KINDS = ("link", "link to a file", "fifo", "device")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place", ["data", "data/gates/c", "data/gates/c/0", "journal.jsonl", "lock", "scratch/x"]
)
def test_an_unfinished_stage(tmp_path: Path, sample, victim: Path, place: str, kind: str) -> None:
    """A resume deletes what no commit names: it must not follow a link to somebody's files."""
    path = tmp_path / "run.stride"
    sample.build(path)
    with begin(path) as writer:
        append_gates(writer)
        writer.commit({"done": 1})
    assert verify(path) == []
    strange(kind, path / "operators.partial" / place, victim)
    for key in ("k", "another"):
        with pytest.raises((IndexDamaged, IndexExists)) as refused:
            begin(path, key)
        assert refused.value.fix
    assert unharmed(victim)


def test_the_unfinished_directory_itself(tmp_path: Path, sample, victim: Path) -> None:
    path = tmp_path / "run.stride"
    sample.build(path)
    for kind in KINDS:
        strange(kind, path / "operators.partial", victim)
        with pytest.raises((IndexDamaged, IndexExists)):
            begin(path)
        strange(kind, tmp_path / "new.stride.partial", victim)
        with pytest.raises((IndexDamaged, IndexExists)):
            IndexWriter.create(tmp_path / "new.stride", build_key="k", overwrite=True)
    assert unharmed(victim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["corpus", "corpus/tokens/c", "corpus/tokens/c/0", "zarr.json", MANIFEST])
def test_reading_and_extending(tmp_path: Path, sample, victim: Path, place: str, kind: str) -> None:
    path = tmp_path / "run.stride"
    sample.build(path)
    strange(kind, path / place, victim)
    for use in (
        lambda: Index.open(path).array("corpus/tokens"),
        lambda: IndexWriter.extend(path, build_key="more"),
    ):
        with pytest.raises(IndexFormatError) as refused:
            use()
        assert refused.value.fix
    with contextlib.suppress(IndexFormatError):
        assert verify(path)
    assert unharmed(victim)


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "../../victim/thesis.txt", "corpus/../../victim/thesis.txt", "a//b", "", "a\0b", "\ud800"],
)
def test_names_in_a_manifest(tmp_path: Path, sample, victim: Path, name: str) -> None:
    path = tmp_path / "run.stride"
    sample.build(path)
    files, _ = read_manifest(path)
    (path / MANIFEST).write_bytes(encode_manifest({**files, name: (28, "0" * 64)})[0])
    with pytest.raises(IndexDamaged, match="no manifest"):
        Index.open(path)
    assert [problem.path for problem in verify(path)] == [MANIFEST]
    assert not is_inside(name)


ARRAYS = {"operators/gates": ["float32", [4], 12]}
COMMIT = {"kind": "commit", "arrays": ARRAYS, "sealed": {}, "state": {}}


@pytest.mark.parametrize(
    "commit",
    [
        {"arrays": {"operators//tmp/x": ["float32", [4], 12]}},
        {"arrays": {"operators/../../victim": ["float32", [4], 12]}},
        {"arrays": {"corpus/tokens": ["uint16", [], 12]}},
        {"arrays": {"operators/gates": ["float32", [-1], 12]}},
        {"arrays": {"operators/gates": ["float32", [4], 1 << 80]}},
        {"sealed": {"operators/gates": {"../0": "x"}}},
        {"kind": "header"},
    ],
)
def test_entries_of_a_journal(tmp_path: Path, sample, victim: Path, commit: dict) -> None:
    path = tmp_path / "run.stride"
    sample.build(path)
    header = {"kind": "header", "format_version": FORMAT_VERSION, "build_key": "k"}
    header |= {"extends": None, "shard_bytes": 4096}
    partial = path / "operators.partial"
    (partial / "data").mkdir(parents=True)
    with (partial / Journal.NAME).open("wb") as file:
        for entry in (header, {**COMMIT, **commit}):
            body = json.dumps(entry).encode()
            file.write(b"%08x %s\n" % (zlib.crc32(body), body))
    for key in ("k", "another"):
        with pytest.raises(IndexDamaged, match=r"not what a build writes") as refused:
            begin(path, key)
        assert str(partial) in str(refused.value.fix)
    assert unharmed(victim)


def test_full_files_need_the_digests_that_a_commit_records(tmp_path: Path, sample) -> None:
    sample.build(tmp_path / "run.stride")
    journal = tmp_path / "run.stride/operators.partial" / Journal.NAME
    with GroupWriter(tmp_path / "run.stride", "operators", "k", shard_bytes=64) as writer:
        append_gates(writer)
        writer.commit({"done": 1})
    header, commit = Journal(journal).entries
    journal.unlink()
    forged = Journal(journal)
    forged.write(header)
    forged.write({**commit, "sealed": {}})
    with pytest.raises(IndexDamaged, match="bytes and a digest"):
        begin(tmp_path / "run.stride")


def test_what_was_written_before_an_interruption_is_compared(tmp_path: Path, sample) -> None:
    path = tmp_path / "run.stride"
    sample.build(path)
    with begin(path) as writer:
        append_gates(writer)
        writer.commit({"done": 1})
    file = path / "operators.partial/data/gates/c/0/0"
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    with pytest.raises(IndexDamaged, match="other content than an unfinished build"):
        GroupWriter(path, "operators", "k")
    data[7] ^= 1
    file.write_bytes(data)
    with GroupWriter(path, "operators", "k") as writer:
        writer.publish({})
    assert verify(path) == []


ARRAY = "corpus/chunk_document/zarr.json"


@pytest.mark.parametrize(
    "change",
    [
        *({"shape": shape} for shape in ([-1], [10**30], [True], ["12"], [], [12, 0], [1] * 60, None)),
        {"shape": [12] + [1 << 20] * 7},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 70]}}},
        {"chunk_grid": []},
        {"data_type": "object"},
        {"node_type": ["array"]},
    ],
)
def test_absurd_arrays_are_refused_before_anything_is_made(tmp_path: Path, sample, change: dict) -> None:
    """With digests that fit: a hostile maker writes these too."""
    path = tmp_path / "run.stride"
    sample.build(path)
    data = encode_json({**json.loads((path / ARRAY).read_bytes()), **change})
    (path / ARRAY).write_bytes(data)
    files, _ = read_manifest(path)
    entry = (len(data), sha256(data).hexdigest())
    (path / MANIFEST).write_bytes(encode_manifest({**files, ARRAY: entry})[0])
    with pytest.raises(IndexDamaged) as refused:
        Index.open(path)
    assert refused.value.fix
    assert [problem.kind for problem in verify(path)] == ["invariant"]
