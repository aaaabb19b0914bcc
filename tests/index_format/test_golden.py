"""The bytes of a small index, kept: whoever changes the format sees it here, and raises FORMAT_VERSION."""

from __future__ import annotations

from index_format.layout import FORMAT_VERSION
from index_format.manifest import read_manifest
from index_format.reader import Index
from index_format.verify import verify

GOLDEN = {  # format version → digests of the root and of the operators
    3: (
        "d037d54c2b44eb647b5274df272712d1b9e459139ab102b52b68fe205c8df81a",
        "36a42d8ce14e52353eec733e60ea2774cc386826c31c2fef5b02e7ba6e6c1b6a",
    )
}


def test_the_bytes_are_those_of_this_version(tmp_path, sample):
    sample.build(tmp_path / "run", 6, shard_bytes=256)
    sample.add_operators(tmp_path / "run")
    assert verify(tmp_path / "run") == []
    found = (Index.open(tmp_path / "run").digest, read_manifest(tmp_path / "run/operators")[1])
    assert found == GOLDEN[FORMAT_VERSION]
