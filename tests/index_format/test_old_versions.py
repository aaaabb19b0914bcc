"""Indexes of earlier releases, kept here: they open, verify, and grow into the present version.

Written by release 782db94: version 1 with design/row_members and operators, version 2 without members.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from index_format.layout import FORMAT_VERSION
from index_format.reader import Index
from index_format.verify import verify

OLD = Path(__file__).with_name("old")


@pytest.mark.parametrize("version", [1, 2])
def test_old_indexes_open_verify_and_grow(version, tmp_path, sample, read_tree):
    old, grown, whole = tmp_path / "old", tmp_path / "grown", tmp_path / "whole"
    shutil.unpack_archive(OLD / f"version-{version}.stride.zip", old)
    index = Index.open(old)
    index.check_bounds()
    assert verify(old) == [] and index.attributes["format_version"] == version
    assert index.has("design/row_members") == index.has("operators") == (version == 1)
    for document in range(6):
        name, text, chunks = sample.document(document)
        assert (index.document_id(document), index.document_text(document)) == (name, text)
        for chunk, expected in zip(index.document_chunks(document), chunks, strict=True):
            np.testing.assert_array_equal(index.chunk_tokens(chunk), expected)
    # a damaged byte of what is not read any more is damage all the same
    shutil.copytree(old, grown)
    offsets = grown / "design/row_offsets/c/0"
    offsets.write_bytes(bytes([offsets.read_bytes()[0] ^ 1]) + offsets.read_bytes()[1:])
    assert [problem.path for problem in verify(grown)] == ["design/row_offsets/c/0"]
    shutil.rmtree(grown)
    shutil.copytree(old, grown)
    sample.extend(grown, 6, 12, key="more")
    sample.build(whole, 12, shard_bytes=index.attributes["shard_bytes"], key="more")
    shutil.rmtree(grown / "operators", ignore_errors=True)
    assert read_tree(grown) == read_tree(whole)
    assert Index.open(grown).attributes["format_version"] == FORMAT_VERSION
