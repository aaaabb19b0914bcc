from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index_format import durable
from index_format.durable import Journal
from index_format.errors import IndexBusy, IndexDamaged, IndexExists, IndexIncomplete, StorageFull
from index_format.layout import SHARD_BYTES
from index_format.reader import Index
from index_format.shards import ShardedArray, ShardWriter, map_array
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter

SCRIPT = Path(__file__).with_name("sample_build.py")


def listing(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


# ---- chunk files ----


@given(
    st.sampled_from(["uint8", "uint16", "int64", "float16", "float32", "bool"]),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
    st.lists(st.integers(0, 40), max_size=8),
    st.integers(1, 200),
    st.integers(0, 7),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_appended_rows_come_back(tmp_path_factory, dtype, tail, counts, shard_bytes, reopen_at):
    directory = tmp_path_factory.mktemp("array")
    rng = np.random.default_rng(0)
    writer = ShardWriter(directory, dtype, tail, shard_bytes=shard_bytes)
    everything = np.zeros((0, *tail), dtype)
    for step, count in enumerate(counts):
        rows = (rng.random((count, *tail)) * 200).astype(dtype)
        writer.append(rows)
        everything = np.concatenate([everything, rows])
        if step == reopen_at:  # as a resume does
            writer.sync()
            writer.close()
            writer = ShardWriter(
                directory, dtype, tail, shard_bytes=shard_bytes, length=writer.length, digests=writer.digests
            )
            writer.take_up()
        np.testing.assert_array_equal(np.asarray(writer.view()), everything)
    files = writer.finish()
    for path, length, digest in files:
        assert durable.sha256_file(path) == (length, digest)
    assert sorted(path for path, _, _ in files) == sorted(p for p in directory.rglob("*") if p.is_file())
    found = map_array(directory.parent, directory.name, writer.metadata)
    assert found.shape == everything.shape and found.dtype == everything.dtype
    np.testing.assert_array_equal(np.asarray(found), everything)


@given(st.data(), st.lists(st.integers(1, 9), min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_sharded_array_reads_like_an_array(data, sizes):
    whole = np.arange(sum(sizes) * 3, dtype=np.int32).reshape(-1, 3)
    sharded = ShardedArray(np.split(whole, np.cumsum(sizes)[:-1]))
    n = len(whole)
    rows = st.integers(-n, n - 1)
    key = data.draw(
        st.one_of(
            rows,
            st.slices(n),
            st.lists(rows, max_size=6).map(lambda x: np.array(x, np.int64)),
            st.lists(st.booleans(), min_size=n, max_size=n).map(np.array),
            st.tuples(rows, st.integers(0, 2)),
            st.tuples(st.slices(n), st.integers(0, 2)),
            st.just(Ellipsis),
        )
    )
    np.testing.assert_array_equal(sharded[key], whole[key])
    np.testing.assert_array_equal(np.asarray(sharded), whole)
    np.testing.assert_array_equal(np.asarray(sharded, np.float64), whole.astype(np.float64))
    assert len(sharded) == n and sharded.shape == whole.shape and sharded.nbytes == whole.nbytes
    assert np.array_equal(list(sharded), list(whole))
    for bad in (n, -n - 1, np.array([n])):
        with pytest.raises(IndexError):
            sharded[bad]


# ---- builds ----


def test_a_build_shows_nothing_until_it_is_published(tmp_path, sample):
    path = tmp_path / "deep" / "run.stride"
    with IndexWriter.create(path, build_key="k") as writer:
        assert writer.state is None
        sample.append_documents(writer, 0, 3)
        writer.commit({"documents": 3})
        assert not path.exists() and path.with_name("run.stride.partial").is_dir()
        with pytest.raises(IndexIncomplete, match="not finished"):
            Index.open(path)
        sample.finish(writer, 0, 5, 2)
    assert listing(path.parent) == ["run.stride"]
    assert Index.open(path).n_documents == 5


def test_resumed_is_uninterrupted(tmp_path, sample, read_tree):
    for shard_bytes in (1 << 20, 40):
        whole, broken = tmp_path / f"a{shard_bytes}", tmp_path / f"b{shard_bytes}"
        sample.build(whole, every=30, shard_bytes=shard_bytes)
        with IndexWriter.create(broken, build_key="k", shard_bytes=shard_bytes) as writer:
            sample.append_documents(writer, 0, 10)
            writer.commit({"documents": 10})
            sample.append_documents(writer, 10, 13)  # lost, as never committed
        with IndexWriter.create(broken, build_key="k", shard_bytes=99) as writer:
            assert writer.state == {"documents": 10}
            assert writer.length("corpus/document_offsets") == 11
            assert writer.read("corpus/document_offsets", 0, 1).tolist() == [0]
            sample.append_documents(writer, 10, 20)
            writer.commit({"documents": 20})
        sample.build(broken)
        assert read_tree(whole) == read_tree(broken)


@pytest.mark.parametrize(
    "tear", [lambda b: b[:-1], lambda b: b[:-30], lambda b: b[:-8] + b"~" + b[-7:], lambda b: b + b"\0" * 50]
)
def test_a_torn_or_altered_last_line_of_the_journal_is_ignored(tmp_path, sample, read_tree, tear):
    sample.build(tmp_path / "whole")
    path = tmp_path / "run"
    with IndexWriter.create(path, build_key="k", shard_bytes=1 << 20) as writer:
        for start, stop in ((0, 4), (4, 9)):
            sample.append_documents(writer, start, stop)
            writer.commit({"documents": stop})
    journal = tmp_path / "run.partial" / Journal.NAME
    torn = tear(journal.read_bytes())
    journal.write_bytes(torn)
    with IndexWriter.create(path, build_key="k") as writer:
        assert writer.state == {"documents": 9 if torn.endswith(b"\0") else 4}
    sample.build(path)
    assert read_tree(path) == read_tree(tmp_path / "whole")


def test_committed_data_that_is_gone_is_noticed(tmp_path, sample):
    with IndexWriter.create(tmp_path / "run", build_key="k") as writer:
        sample.append_documents(writer, 0, 9)
        writer.commit({"documents": 9})
    file = tmp_path / "run.partial/data/corpus/tokens/c/0"
    os.truncate(file, 3)
    with pytest.raises(IndexDamaged, match=r"tokens/c/0 should have .* bytes and a digest, has 3"):
        IndexWriter.create(tmp_path / "run", build_key="k")
    file.unlink()
    with pytest.raises(IndexDamaged, match="is missing"):
        IndexWriter.create(tmp_path / "run", build_key="k")
    with IndexWriter.create(tmp_path / "run", build_key="another", overwrite=True) as writer:
        assert writer.state is None


def test_an_unfinished_build_from_other_input_is_kept_until_overwritten(tmp_path, sample):
    with IndexWriter.create(tmp_path / "run", build_key="one") as writer:
        sample.append_documents(writer, 0, 9)
        writer.commit({"documents": 9})
    with pytest.raises(IndexIncomplete) as caught:
        IndexWriter.create(tmp_path / "run", build_key="two")
    assert "--overwrite" in caught.value.fix
    with IndexWriter.create(tmp_path / "run", build_key="one", overwrite=True) as writer:
        assert writer.state == {"documents": 9}  # the same build: overwriting resumes it
    with IndexWriter.create(tmp_path / "run", build_key="two", overwrite=True) as writer:
        assert writer.state is None and writer.length("corpus/tokens") == 0
    assert not (tmp_path / "run.partial").exists()  # nothing committed, nothing left


def test_what_exists_is_not_overwritten_unasked(tmp_path, sample, read_tree):
    path = tmp_path / "run"
    sample.build(path)
    before = read_tree(path)
    with pytest.raises(IndexExists) as caught:
        IndexWriter.create(path, build_key="new")
    assert "--overwrite" in caught.value.fix
    with IndexWriter.create(path, build_key="new", overwrite=True) as writer:
        sample.append_documents(writer, 0, 2)
        writer.commit({"documents": 2})
        assert read_tree(path) == before  # readable until the last moment
        sample.finish(writer, 0, 4, 2)
    assert Index.open(path).n_documents == 4
    assert listing(tmp_path) == ["run"]


def test_what_is_no_index_is_never_overwritten(tmp_path):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1").write_text("…")
    with pytest.raises(IndexExists, match="is no index"):
        IndexWriter.create(precious, build_key="k", overwrite=True)
    with pytest.raises(IndexExists):
        IndexWriter.create(precious, build_key="k")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "notes").write_text("mine")
    with pytest.raises(IndexExists, match="in the way"):
        IndexWriter.create(tmp_path / "other", build_key="k", overwrite=True)
    assert listing(tmp_path / "other.partial") == ["notes"]


def test_two_writers_at_one_path(tmp_path, sample):
    with IndexWriter.create(tmp_path / "run", build_key="k") as first:
        sample.append_documents(first, 0, 2)
        for overwrite in (False, True):
            with pytest.raises(IndexBusy, match=str(os.getpid())):
                IndexWriter.create(tmp_path / "run", build_key="k", overwrite=overwrite)
        sample.append_documents(first, 2, 4)
        first.commit({"documents": 4})
    sample.build(tmp_path / "run", 4)


# ---- appending to an index ----


@pytest.mark.parametrize("shard_bytes", [1 << 20, 64, 16])
def test_extended_is_built_at_once(tmp_path, sample, read_tree, shard_bytes):
    path, whole = tmp_path / "run", tmp_path / "whole"
    sample.build(path, 20, shard_bytes=shard_bytes)
    sample.add_operators(path)
    operators = read_tree(path / "operators")
    before = Index.open(path)
    held = before.array("corpus/tokens")
    with IndexWriter.extend(path, build_key="more") as writer:
        assert writer.state is None and writer.length("corpus/document_offsets") == 21
        sample.append_documents(writer, 20, 25)
        writer.commit({"documents": 25})
        sample.append_documents(writer, 25, 26)
        shared = path / "corpus/tokens/c/0"
        assert shared.stat().st_nlink == (1 if shard_bytes == 1 << 20 else 2)  # full files are linked
    assert verify(path) == []  # untouched so far
    sample.extend(path, 20, 40, key="more")
    assert verify(path) == []
    assert read_tree(path / "operators") == operators
    np.testing.assert_array_equal(np.asarray(held), Index.open(path).array("corpus/tokens")[: len(held)])
    sample.build(whole, 40, shard_bytes=shard_bytes, key="more")
    shutil.rmtree(path / "operators")
    assert read_tree(path) == read_tree(whole)
    assert listing(tmp_path) == ["run", "whole"]
    with pytest.raises(IndexExists, match="already contains"):
        IndexWriter.extend(path, build_key="more")


def test_extending_without_links_and_exchange(tmp_path, sample, read_tree, monkeypatch):
    """A filesystem that has neither hard links nor RENAME_EXCHANGE: copies, and two renames."""

    def refuse(self, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(durable, "_renameat2", lambda *_: errno.EINVAL)
    sample.build(tmp_path / "run", 20, shard_bytes=64)
    sample.add_operators(tmp_path / "run")
    sample.add_operators(tmp_path / "run", steps=6, key="again")
    sample.extend(tmp_path / "run", 20, 40, key="more")
    assert verify(tmp_path / "run") == [] and listing(tmp_path) == ["run"]
    assert Index.open(tmp_path / "run").shape("operators/training_log_loss") == (6,)
    with pytest.raises(IndexExists):
        durable.rename_new(tmp_path / "run", tmp_path / "run")


def test_extending_does_not_launder_damage(tmp_path, sample):
    sample.build(tmp_path / "run", 20, shard_bytes=64)
    last = max((tmp_path / "run/corpus/tokens/c").iterdir(), key=lambda file: int(file.name))
    data = bytearray(last.read_bytes())
    data[0] ^= 1
    last.write_bytes(data)
    with pytest.raises(IndexDamaged, match="other content"):
        IndexWriter.extend(tmp_path / "run", build_key="more")
    assert listing(tmp_path) == ["run"]


def test_extending_waits_for_a_running_stage_and_keeps_an_unfinished_one(tmp_path, sample):
    path = tmp_path / "run"
    sample.build(path, 10)
    with IndexWriter.extend(path, build_key="more") as writer:
        sample.append_documents(writer, 10, 20)
        writer.commit({"documents": 20})
        with GroupWriter(path, "operators", "o") as stage:
            stage.append("operators/gates", np.ones((12, 2)))
            stage.commit({"step": 1})
            stage.scratch_path("checkpoint").write_text("weights")
            with pytest.raises(IndexBusy):
                sample.finish(writer, 10, 20, 10)
    sample.extend(path, 10, 20, key="more")
    with GroupWriter(path, "operators", "o") as stage:
        assert stage.state == {"step": 1} and stage.scratch_path("checkpoint").read_text() == "weights"


# ---- being killed ----


def test_everything_is_synced_before_the_rename(tmp_path, sample, monkeypatch):
    """The publication speaks of files; each, and each directory, must be on disk before it."""
    synced: set[str] = set()
    before_rename: list[set[str]] = []
    rename = durable.rename_new
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(str(Path(f"/proc/self/fd/{fd}").readlink())))

    def record(source, target):
        before_rename.append({str(entry) for entry in [source, *source.rglob("*")]})
        assert before_rename[0] <= synced
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(durable, "rename_new", record)
    sample.build(tmp_path / "run", shard_bytes=64)
    assert len(before_rename[0]) > 50
    assert str(tmp_path) in synced  # and the rename itself, after it


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_killed_at_every_step_of_publication(tmp_path, sample, read_tree, monkeypatch):
    """Stop at each durable operation in turn; the next run completes, with the same bytes."""
    sample.build(tmp_path / "whole", 6, shard_bytes=SHARD_BYTES)
    old = tmp_path / "old"
    sample.build(old, 2, key="old")
    names = ("write_file", "sync_directory", "sync_tree", "rename_new", "exchange")
    originals = {name: getattr(durable, name) for name in names}
    total = 8
    for aside in (False, True):
        # without an exchange only the end differs: the two renames and the clearing up
        for steps in range(total - 8, 60):
            path = tmp_path / f"run{aside}{steps}"
            durable.link_tree(old, path)
            left = [steps]

            def stopping(name, left=left, after=steps % 2):
                def run(*args):
                    if left[0] == 0 and not after:
                        raise Killed
                    originals[name](*args)
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed

                return run

            writer = IndexWriter.create(path, build_key="k", overwrite=True)
            sample.append_documents(writer, 0, 6)
            writer.commit({"documents": 6})
            killed = False
            with monkeypatch.context() as patch:
                if aside:
                    patch.setattr(durable, "_renameat2", lambda *_: errno.ENOSYS)
                for name in names:
                    patch.setattr(durable, name, stopping(name))
                try:
                    sample.finish(writer, 0, 6, 6)
                except Killed:
                    killed = True
                finally:
                    writer._lock.release()  # as the end of the process does; nothing else is tidied
            writer.close()
            if not killed:
                break
            # whoever opens it now sees the old index or the new one
            if path.exists():
                assert read_tree(path) in (read_tree(old), read_tree(tmp_path / "whole"))
            if not path.exists() or read_tree(path) == read_tree(old):
                with IndexWriter.create(path, build_key="k", overwrite=True) as writer:
                    sample.finish(writer, 0, 6, 6)
            else:
                with pytest.raises(IndexExists):
                    IndexWriter.create(path, build_key="k")
            assert read_tree(path) == read_tree(tmp_path / "whole")
            assert not path.with_name(path.name + ".partial").exists()
        assert not killed and steps > 15
        total = steps


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["build", "extend"])
def test_kill_9_at_random_moments_then_resume(tmp_path, sample, read_tree, mode):
    n, every, shard_bytes = 120, 4, 1024
    whole, path = tmp_path / "whole", tmp_path / "run"
    arguments = [str(n), str(every), str(shard_bytes)]
    extra = ["extend"] if mode == "extend" else []
    for target in (whole, path) if extra else ():
        sample.build(target, n // 2, shard_bytes=shard_bytes)
        sample.add_operators(target)
    before = read_tree(path) if extra else None
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}

    def start(target: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(target), *arguments, *extra], env=environment, stderr=-1
        )

    began = time.monotonic()
    with start(whole) as process:
        assert process.wait() == 0
    duration = time.monotonic() - began
    rng = np.random.default_rng()
    kills = 0
    partial = path.with_name("run.partial")
    for _ in range(100):
        # one that is killed while it clears up has published: nothing is left to resume
        if (path / "manifest.json").exists() and read_tree(path) != before:
            break
        with start(path) as process:
            deadline = time.monotonic() + 30
            while not (partial / Journal.NAME).exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            # the dozen first runs are killed, somewhere in a twelfth of the work or so
            delay = rng.uniform(0, duration / 8) if kills < 12 else None
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            if process.wait() > 0:
                message = process.stderr.read().decode()
                raise AssertionError(message)
    assert kills >= 5, "the process was too quick to be killed"
    assert read_tree(path) == read_tree(whole)
    assert verify(path) == []


# ---- a full disk ----


def test_a_full_disk_is_named_and_loses_nothing(small_disk, tmp_path, sample, read_tree):
    disk = small_disk("2m")
    ballast = disk / "ballast"
    sample.build(tmp_path / "whole", 60, shard_bytes=4096)
    path = disk / "run"
    with IndexWriter.create(path, build_key="k", shard_bytes=4096) as writer:
        sample.append_documents(writer, 0, 20)
        writer.commit({"documents": 20})
    failures = 0
    for free_kib in (0, 1, 4, 12, 40, 80, 120, 160, 240):
        # leave so much room and no more: the disk fills up somewhere else each time
        ballast.unlink(missing_ok=True)
        room = shutil.disk_usage(disk).free
        with ballast.open("wb") as file:
            file.write(b"x" * max(0, room - free_kib * 1024))
        try:
            sample.build(path, 60, every=10, shard_bytes=4096)
        except StorageFull as error:
            failures += 1
            assert error.exit_code == 2 and error.errno == errno.ENOSPC and isinstance(error, OSError)
            assert "run" in error.message and "bytes" in error.message and "free" in error.message
            assert "rerun the same command" in error.fix
            assert not path.exists()
        else:
            break
    assert failures >= 3
    ballast.unlink()
    if not path.exists():
        sample.build(path, 60, every=10, shard_bytes=4096)
    assert read_tree(path) == read_tree(tmp_path / "whole")
    assert verify(path) == []


def test_replaced_in_one_step_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    durable.replace_file(file, b"old")
    durable.replace_file(file, b"new")
    assert file.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "file.new").mkdir()  # cannot be written
    with pytest.raises(OSError):
        durable.replace_file(file, b"newer")
    assert file.read_bytes() == b"new"
