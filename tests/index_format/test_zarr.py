"""Plain zarr reads an index; our zarr.json are the documents that zarr-python writes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from index_format.layout import NUMBERS
from index_format.manifest import (
    ArrayMetadata,
    array_json,
    decode_json,
    encode_json,
    group_json,
    parse_array,
    parse_group,
)
from index_format.reader import Index

zarr = pytest.importorskip("zarr")


def test_zarr_reads_every_array_as_we_do(index_path):
    index = Index.open(index_path)
    with warnings.catch_warnings():
        # manifest.json is no Zarr node, and zarr says so
        warnings.filterwarnings("ignore", ".*not recognized as a component.*")
        group = zarr.open_group(str(index_path), mode="r")
        found = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert group.attrs["stride"] == index.attributes
    assert group["operators"].attrs["stride"] == index.group_attributes("operators")
    assert found == {name for part in ("corpus", "design", "operators") for name in index.names(part)}
    for name in found:
        expected = index.array(name)
        assert group[name].shape == expected.shape and group[name].dtype == expected.dtype
        np.testing.assert_array_equal(group[name][...], np.asarray(expected))


def canonical(document) -> bytes:
    """A zarr.json of zarr-python in sorted keys, without members that only say that there is nothing."""
    content = decode_json(document.to_bytes())
    for name in ("storage_transformers", "dimension_names", "consolidated_metadata"):
        if not content.get(name):
            content.pop(name, None)
    return encode_json(content)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(
    ("shape", "rows"), [((0,), 1), ((7,), 7), ((7,), 3), ((5, 2), 5), ((0, 3), 1), ((5, 2, 2), 2)]
)
def test_documents_are_those_of_zarr_python(dtype, shape, rows):
    written: dict = {}
    zarr.create_array(
        zarr.storage.MemoryStore(written),
        shape=shape,
        chunks=(rows, *shape[1:]),
        dtype=dtype,
        filters=None,
        compressors=None,
        serializer=zarr.codecs.BytesCodec(endian="little" if np.dtype(dtype).itemsize > 1 else None),
        fill_value=0,
        zarr_format=3,
    )
    metadata = ArrayMetadata(shape, dtype, rows)
    assert array_json(metadata) == canonical(written["zarr.json"])
    assert parse_array(array_json(metadata)) == metadata


def test_groups_are_those_of_zarr_python():
    attributes = {"a": [1, {"b": None}], "ü": 0.5}
    written: dict = {}
    zarr.create_group(zarr.storage.MemoryStore(written), attributes={"stride": attributes}, zarr_format=3)
    assert group_json(attributes) == canonical(written["zarr.json"])
    assert parse_group(group_json(attributes)) == attributes and parse_group(group_json()) == {}
    assert parse_array(group_json()) is None
