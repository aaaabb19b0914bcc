from __future__ import annotations

import shutil

import numpy as np
import pytest

from index_format.errors import IndexFormatError
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import IndexWriter


def test_a_whole_index_has_no_problems(index_path):
    calls = []
    assert verify(index_path, progress=lambda done, total: calls.append((done, total))) == []
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.slow
def test_every_flipped_bit_is_found(index_path):
    """In every file, at its ends and at random: verify reports the file, and it alone."""
    rng = np.random.default_rng()
    files = [file for file in index_path.rglob("*") if file.is_file()]
    assert {"manifest.json", "zarr.json", "0"} <= {file.name for file in files}
    for file in files:
        data = file.read_bytes()
        for offset in {0, len(data) - 1, *rng.integers(0, len(data), 4).tolist()}:
            flipped = bytearray(data)
            flipped[offset] ^= 1 << int(rng.integers(8))
            file.write_bytes(flipped)
            problems = verify(index_path)
            name = file.relative_to(index_path).as_posix()
            assert [problem.path for problem in problems] == [name], f"{name} at {offset}"
            assert problems[0].kind == "content"
        file.write_bytes(data)
    assert verify(index_path) == []


def test_every_missing_cut_and_grown_file_is_found(index_path):
    for file in [file for file in index_path.rglob("*") if file.is_file()]:
        data = file.read_bytes()
        name = file.relative_to(index_path).as_posix()
        for kind, damaged in (("missing", None), ("length", data[:-1]), ("length", data + b"\n")):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            found = [(problem.path, problem.kind) for problem in verify(index_path)]
            if file.name == "manifest.json" and kind == "length":
                kind = "content"  # nothing records the manifest's length but itself
            assert found == [(name, kind)]
            file.write_bytes(data)


def test_extra_files_and_directories_are_found(index_path):
    extra = ["note.txt", "corpus/tokens/c/99", "operators/old", "design/.hidden", "operators.partial"]
    for name in extra:
        (index_path / name).write_text("x")
    (index_path / "empty").mkdir()
    (index_path / "signature.json").write_text("{}")  # of earlier releases: left alone
    found = {(problem.path, problem.kind) for problem in verify(index_path)}
    assert found == {("empty", "extra"), *((name, "extra") for name in extra)}


def put(row, value):
    def change(values):
        values[row] = value

    return change


def move_to_another_subset(columns):
    columns[3] = [0, 1, 2] if columns[3, 0] else [9, 10, 11]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("corpus/chunk_offsets", put(0, 1), "should go from 0"),
        ("corpus/chunk_offsets", put(-1, 9999), "should go from 0 to"),
        ("corpus/chunk_offsets", put(3, 9999), "fall after entry 3"),
        ("corpus/document_offsets", put(4, 0), "fall after entry 3"),
        ("corpus/document_id_offsets", put(2, 0), "fall after entry 1"),
        ("corpus/text_offsets", put(-1, 3), "should go from 0 to"),
        ("corpus/chunk_document", put(5, 11), "chunk 5 has another document"),
        ("corpus/loss_start", put(2, 0), "chunk 2 starts outside"),
        ("corpus/loss_start", put(2, 7), "chunk 2 starts outside"),
        ("corpus/loss_mask", put(4, 2), "token 4 has a flag other than 0 and 1"),
        ("design/columns", put((3, 0), 12), "chunk 3 has subsets"),
        ("design/columns", put((3, slice(None)), 1), "chunk 3 has subsets"),
        ("design/columns", move_to_another_subset, "not the sizes"),
        ("design/row_offsets", put(3, 0), "not the sizes"),
    ],
)
def test_arrays_that_contradict_each_other_are_found(tmp_path, sample, monkeypatch, name, change, words):
    """In an index whose digests are right, in one block and across blocks."""
    with IndexWriter.create(tmp_path / "run", build_key="k", shard_bytes=64) as writer:
        sample.append_documents(writer, 0, 12)
        writer.append("corpus/loss_mask", np.ones(writer.length("corpus/tokens"), np.uint8))
        writer.append_row_offsets(sample.N_SUBSETS)
        values = np.array(writer.view(name))
        change(values)
        array = writer._arrays.pop(name)
        array.close()
        shutil.rmtree(array.directory)
        writer.append(name, values)
        writer.publish(sample.ATTRIBUTES)
    for block in (1 << 20, 2):
        monkeypatch.setattr("index_format.shards._BLOCK_VALUES", block)
        problems = verify(tmp_path / "run")
        where = "design/row_offsets" if words == "not the sizes" else name
        assert problems and problems[0].path == where and problems[0].kind == "invariant"
        assert words in problems[0].message


def test_no_random_garbage_makes_verify_or_open_crash(tmp_path, sample):
    """Bytes of any kind in the JSON files: a named error or a problem, never another exception."""
    sample.build(tmp_path / "run", 3)
    noise = np.random.default_rng().bytes(50)
    garbage = [b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff\xfe", noise, b'{"files": {"a": 1}}']
    for name in ("zarr.json", "manifest.json", "corpus/tokens/zarr.json"):
        file = tmp_path / "run" / name
        data = file.read_bytes()
        for content in [*garbage, data.replace(b'"', b"'"), data[: len(data) // 2]]:
            file.write_bytes(content)
            with pytest.raises(IndexFormatError):
                Index.open(tmp_path / "run")
            assert verify(tmp_path / "run")
        file.write_bytes(data)
