from __future__ import annotations

import shutil

import numpy as np
import pytest

from index_format.errors import IndexFormatError, IndexIncomplete, IndexNotFound, IndexVersionError
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter


def test_a_whole_index_has_no_problems(index_path):
    calls = []
    assert verify(index_path, progress=lambda done, total: calls.append((done, total))) == []
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.slow
def test_every_flipped_bit_is_found(index_path):
    """In every file, at its ends and at random: verify reports the file, or says there is no such index."""
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
        for kind, damage in (
            ("missing", file.unlink),
            ("length", lambda: file.write_bytes(data[:-1])),  # noqa: B023
            ("length", lambda: file.write_bytes(data + b"\n")),  # noqa: B023
        ):
            damage()
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
    found = {(problem.path, problem.kind) for problem in verify(index_path)}
    assert {("empty", "extra"), *((name, "extra") for name in extra)} <= found
    assert {kind for _, kind in found} == {"extra"}


def test_an_unfinished_stage_is_no_damage(index_path):
    with GroupWriter(index_path, "truth", "t") as writer:
        writer.append("truth/losses", np.ones((3, 2)))
        writer.commit({"subset": 3})
        assert verify(index_path) == []
    assert verify(index_path) == []


def test_a_calibration_without_its_operators_is_found(index_path):
    with GroupWriter(index_path, "calibration", "c") as writer:
        writer.append("calibration/null_losses", np.ones((3, 2)))
        writer.publish({})
    assert verify(index_path) == []
    shutil.rmtree(index_path / "operators")
    assert [(problem.path, problem.kind) for problem in verify(index_path)] == [
        ("operators/manifest.json", "missing")
    ]


def test_what_is_no_index_is_an_error(tmp_path, index_path):
    with pytest.raises(IndexNotFound):
        verify(tmp_path / "nothing")
    with IndexWriter.create(tmp_path / "begun", build_key="k"), pytest.raises(IndexIncomplete):
        verify(tmp_path / "begun")


def test_many_damages_are_all_listed(index_path):
    names = ["corpus/tokens/zarr.json", "design/columns/zarr.json", "operators/zarr.json"]
    for name in names:
        (index_path / name).unlink()
    assert sorted(problem.path for problem in verify(index_path)) == names


def test_another_version_is_not_called_damage(tmp_path, sample, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("index_format.writer.FORMAT_VERSION", 7)
        sample.build(tmp_path / "run")
    with pytest.raises(IndexVersionError):
        verify(tmp_path / "run")


def write_with(path, sample, name, change):
    """An index whose digests are right and whose array `name` is not."""
    with IndexWriter.create(path, build_key="k", shard_bytes=64) as writer:
        sample.append_documents(writer, 0, 12)
        writer.append_row_offsets(sample.N_SUBSETS)
        values = np.array(writer.view(name))
        changed = change(values)
        array = writer._arrays.pop(name)
        array.close()
        shutil.rmtree(array.directory)
        writer.append(name, values if changed is None else changed)
        writer.publish(sample.ATTRIBUTES)


def put(row, value):
    def change(values):
        values[row] = value

    return change


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
        ("design/columns", put((3, 0), 12), "chunk 3 has subsets"),
        ("design/columns", put((3, slice(None)), 1), "chunk 3 has subsets"),
        ("design/row_offsets", put(3, 0), "not the sizes"),
    ],
)
def test_arrays_that_contradict_each_other_are_found(tmp_path, sample, monkeypatch, name, change, words):
    write_with(tmp_path / "run", sample, name, change)
    for rows in (1 << 20, 2):  # in one block, and across blocks
        monkeypatch.setattr("index_format.shards._BLOCK_VALUES", rows)
        problems = verify(tmp_path / "run")
        assert problems and problems[0].path == name and problems[0].kind == "invariant"
        assert words in problems[0].message


def test_columns_whose_transpose_is_another_are_found(tmp_path, sample):
    def move(columns):
        columns[3] = [0, 1, 2] if columns[3, 0] else [9, 10, 11]

    write_with(tmp_path / "run", sample, "design/columns", move)
    assert [problem.path for problem in verify(tmp_path / "run")] == ["design/row_offsets"]


def test_a_loss_mask_of_other_values_is_found(tmp_path, sample):
    with IndexWriter.create(tmp_path / "run", build_key="k") as writer:
        sample.append_documents(writer, 0, 3)
        mask = np.ones(writer.length("corpus/tokens"), np.uint8)
        mask[4] = 2
        writer.append("corpus/loss_mask", mask)
        writer.append_row_offsets(sample.N_SUBSETS)
        writer.publish(sample.ATTRIBUTES)
    assert [problem.message for problem in verify(tmp_path / "run")] == [
        "token 4 has a flag other than 0 and 1"
    ]


def test_coverage_of_more_chunks_than_there_are_is_found(index_path):
    n = Index.open(index_path).n_chunks
    for length, wrong in ((n - 1, 0), (n, 0), (n + 1, 1)):
        with GroupWriter(index_path, "operators", "x") as writer:
            writer.append("operators/seen", np.ones(length, np.uint8))
            writer.publish({})
        assert len(verify(index_path)) == wrong


def test_no_random_garbage_makes_verify_or_open_crash(tmp_path, sample):
    """Bytes of any kind in the JSON files: a named error or a problem, never another exception."""
    sample.build(tmp_path / "run", 3)
    rng = np.random.default_rng()
    for name in ("zarr.json", "manifest.json", "corpus/tokens/zarr.json"):
        file = tmp_path / "run" / name
        data = file.read_bytes()
        garbage = [
            b"",
            b"[]",
            b"null",
            b"{}",
            b"[" * 100_000,
            b"\xff\xfe",
            rng.bytes(50),
            b'{"files": {"a": 1}}',
        ]
        for content in [*garbage, data.replace(b'"', b"'"), data[: len(data) // 2]]:
            file.write_bytes(content)
            with pytest.raises(IndexFormatError):
                Index.open(tmp_path / "run")
            assert verify(tmp_path / "run")
        file.write_bytes(data)
