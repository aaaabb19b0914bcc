from __future__ import annotations

import json

import numpy as np
import pytest

from index_format.durable import sha256_file
from index_format.errors import IndexDamaged, IndexIncomplete, IndexNotFound, IndexVersionError, StageMissing
from index_format.layout import FORMAT_VERSION
from index_format.manifest import encode_json, encode_manifest, read_manifest
from index_format.reader import Index
from index_format.writer import IndexWriter


def test_documents_chunks_and_arrays_are_read_as_written(index_path, sample):
    index = Index.open(index_path)
    assert (index.n_documents, index.n_subsets, index.degree, index.seed) == (30, 12, 3, 5)
    assert index.path == index_path and index.attributes["fingerprints"]["model"] == "m0"
    chunk = tokens = 0
    for number in range(30):
        name, text, chunks = sample.document(number)
        assert index.document_id(number) == name and index.document_text(number) == text
        assert list(index.document_chunks(number)) == list(range(chunk, chunk + len(chunks)))
        for expected in chunks:
            found = index.chunk_tokens(chunk)
            assert found.dtype == np.uint16
            np.testing.assert_array_equal(found, expected)
            assert index.chunk_documents(np.array([[chunk]])).tolist() == [[number]]
            chunk += 1
            tokens += len(expected)
    assert (index.n_chunks, index.n_tokens) == (chunk, tokens)
    assert index.array("design/columns").shape == index.shape("design/columns") == (chunk, 3)
    np.testing.assert_array_equal(np.concatenate(index.shards("corpus/tokens")), index.array("corpus/tokens"))
    for call in (index.chunk_tokens, index.document_id, index.document_text, index.document_chunks):
        for number in (-1, 10_000):
            with pytest.raises(IndexError, match=str(number)):
                call(number)


def test_nothing_read_can_be_written(index_path):
    index = Index.open(index_path)
    for piece in (*index.shards("corpus/tokens"), index.array("corpus/tokens")[0:1]):
        with pytest.raises(ValueError, match="read-only"):
            piece[0] = 1
    with pytest.raises(TypeError):
        index.attributes["seed"] = 3
    index.group_attributes("operators")["layer"] = 99
    assert index.group_attributes("operators")["layer"] == 2


def test_optional_arrays_and_stages(tmp_path, sample):
    with IndexWriter.create(tmp_path / "run", build_key="k") as writer:
        original = writer.append_strings
        writer.append_strings = lambda prefix, values: prefix == "corpus/text" or original(prefix, values)
        sample.finish(writer, 0, 5, 5)
    index = Index.open(tmp_path / "run")
    assert index.has("corpus") and index.has("corpus/tokens") and not index.has("corpus/text_bytes")
    assert not index.has("operators") and not index.has("operators/gates") and not index.has("truth")
    assert index.document_text(0) is None
    with pytest.raises(StageMissing, match="no array corpus/text_bytes"):
        index.array("corpus/text_bytes")
    with pytest.raises(ValueError, match="no array 'corpus/txet'"):
        index.array("corpus/txet")
    with pytest.raises(StageMissing) as caught:
        index.array("operators/gates")
    assert caught.value.fix == f"stride train --index {tmp_path / 'run'}" and caught.value.exit_code == 2
    sample.add_operators(tmp_path / "run")
    assert index.has("operators/gates") and not index.has("operators/U")  # seen by an index already open
    with pytest.raises(StageMissing, match="operators/U"):
        index.array("operators/U")


def test_other_things_than_indexes_are_named(tmp_path):
    with pytest.raises(IndexNotFound, match="does not exist"):
        Index.open(tmp_path / "nothing")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("{}")
    for name in ("directory", "file"):
        with pytest.raises(IndexNotFound, match="is no index") as caught:
            Index.open(tmp_path / name)
        assert caught.value.exit_code == 2
    for content in ({"zarr_format": 3, "node_type": "group"}, {"attributes": []}, []):
        (tmp_path / "directory/zarr.json").write_text(json.dumps(content))
        with pytest.raises(IndexNotFound, match="no STRIDE index"):
            Index.open(tmp_path / "directory")
    with IndexWriter.create(tmp_path / "begun", build_key="k"), pytest.raises(IndexIncomplete) as begun:
        Index.open(tmp_path / "begun")
    assert "resumes" in begun.value.fix and begun.value.exit_code == 3


def rewrite(path, change, name="zarr.json"):
    """Change a JSON file and make the manifest agree, as a hostile maker could."""
    content = json.loads((path / name).read_bytes())
    change(content)
    (path / name).write_bytes(encode_json(content))
    files, _ = read_manifest(path)
    files[name] = sha256_file(path / name)
    (path / "manifest.json").write_bytes(encode_manifest(files)[0])


def test_a_version_of_a_later_release_is_refused(index_path):
    later = FORMAT_VERSION + 1
    rewrite(index_path, lambda root: root["attributes"]["stride"].update(format_version=later))
    with pytest.raises(IndexVersionError, match=f"format version {later}, this release reads 1 to"):
        Index.open(index_path)


ROOT, TOKENS = "zarr.json", "corpus/tokens/zarr.json"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (ROOT, lambda c: c["attributes"]["stride"].pop("seed"), "'seed' is missing"),
        (ROOT, lambda c: c["attributes"]["stride"].update(n_subsets=13), "design/row_offsets should have"),
        (ROOT, lambda c: c["attributes"].pop("stride"), "no format version"),
        (TOKENS, lambda c: c.update(shape=[1]), "not an array that STRIDE writes"),
        (TOKENS, lambda c: c.pop("node_type"), "tokens is missing"),
        ("corpus/loss_start/zarr.json", lambda c: c.update(data_type="uint32"), "loss_start should be int32"),
    ],
)
def test_metadata_that_contradicts_the_layout_is_refused(tmp_path, sample, name, change, words):
    sample.build(tmp_path / "run")
    rewrite(tmp_path / "run", change, name)
    with pytest.raises(IndexDamaged, match=words):
        Index.open(tmp_path / "run")


@pytest.mark.parametrize(("file", "kept"), [("manifest.json", 0), ("gates/c/0/0", -2)])
def test_a_damaged_stage_does_not_hinder_its_repair(index_path, sample, file, kept):
    path = index_path / "operators" / file
    path.write_bytes(path.read_bytes()[:kept] + b"{}")
    index = Index.open(index_path)
    assert len(index.array("corpus/tokens"))
    with pytest.raises(IndexDamaged) as caught:
        np.asarray(index.array("operators/gates"))
    assert f"stride train --index {index_path} --overwrite" in caught.value.fix
    sample.add_operators(index_path)
    assert Index.open(index_path).group_attributes("operators")["layer"] == 2
