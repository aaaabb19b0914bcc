"""The bytes of a tiny index, kept: whoever changes the format sees it here, and raises FORMAT_VERSION."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from index_format.design import build_columns
from index_format.layout import FORMAT_VERSION
from index_format.manifest import read_manifest
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import GroupWriter, IndexWriter

GOLDEN = {
    3: {
        "root": "8f7a20efbe44fcfc9f85c2eaf7c496dc49775e13274d6ab2407be590a879fc24",
        "operators": "fa71e12620f26ec45dd26085048b07e3b902b33c2d8e6f06d3d859f6a363e94d",
        "files": [
            "corpus/chunk_document/c/0",
            "corpus/chunk_offsets/c/0",
            "corpus/document_id_bytes/c/0",
            "corpus/document_id_offsets/c/0",
            "corpus/document_offsets/c/0",
            "corpus/loss_start/c/0",
            "corpus/text_bytes/c/0",
            "corpus/text_offsets/c/0",
            "corpus/tokens/c/0",
            "corpus/tokens/c/1",
            "design/columns/c/0/0",
            "design/row_offsets/c/0",
            "design/row_offsets/c/1",
            "operators/gates/c/0/0",
        ],
    }
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    with IndexWriter.create(path, build_key="golden", shard_bytes=32) as writer:
        writer.append("corpus/tokens", np.arange(20, dtype=np.uint16))
        writer.append("corpus/chunk_offsets", np.array([0, 8, 11, 20]))
        writer.append("corpus/chunk_document", np.array([0, 0, 1]))
        writer.append("corpus/loss_start", np.array([1, 1, 4], np.int32))
        writer.append("corpus/document_offsets", np.array([0, 2, 3]))
        writer.append_strings("corpus/document_id", ["a", "ß"])
        writer.append_strings("corpus/text", ["", "Εν αρχή"])
        writer.append("design/columns", build_columns(0, 3, n_subsets=4, degree=2, seed=1))
        writer.append_row_offsets(4)
        fingerprints = {"corpus": "0", "tokenizer": "1", "model": "2"}
        writer.publish(
            {
                "seed": 1,
                "n_subsets": 4,
                "degree": 2,
                "design": "regular",
                "block_size": 9,
                "fingerprints": fingerprints,
            }
        )
    with GroupWriter(path, "operators", "golden") as stage:
        stage.append("operators/gates", np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2))
        stage.publish({"space": "residual", "damping": 0.1})
    return path


def test_the_bytes_are_those_of_this_version(tiny):
    found = {
        "root": Index.open(tiny).digest,
        "operators": read_manifest(tiny / "operators")[1],
        "files": sorted(file.relative_to(tiny).as_posix() for file in tiny.rglob("c/**/*") if file.is_file()),
    }
    assert verify(tiny) == []
    assert found == GOLDEN[FORMAT_VERSION]
