"""Plain zarr reads what we write."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from index_format.layout import NUMBERS
from index_format.metadata import (
    ArrayMetadata,
    array_json,
    chunk_file,
    decode_json,
    encode_json,
    group_json,
    parse_array,
    parse_group,
    read_node,
    written_array,
)
from index_format.reader import Index
from index_format.shards import ShardWriter

zarr = pytest.importorskip("zarr")


def test_zarr_reads_every_array_as_we_do(index_path):
    index = Index.open(index_path)
    group = zarr.open_group(str(index_path), mode="r")
    assert group.attrs["stride"] == index.attributes
    assert group["operators"].attrs["stride"] == index.group_attributes("operators")
    count = 0
    for name in [name for part in ("corpus", "design", "operators") for name in index.names(part)]:
        expected = index.array(name)
        array = group[name]
        assert array.shape == expected.shape and array.dtype == expected.dtype
        np.testing.assert_array_equal(array[...], np.asarray(expected))
        count += 1
    assert count == 14


def test_zarr_finds_every_array_by_listing(index_path):
    with warnings.catch_warnings():
        # manifest.json is no Zarr node, and zarr says so
        warnings.filterwarnings("ignore", ".*not recognized as a component.*")
        group = zarr.open_group(str(index_path), mode="r")
        found = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    index = Index.open(index_path)
    assert found == {name for part in ("corpus", "design", "operators") for name in index.names(part)}


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "uint16", "uint64", "float16", "float32", "float64"]
)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (5, 2), (0, 3), (5, 2, 2)])
def test_every_dtype_and_number_of_axes(tmp_path, dtype, shape):
    values = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
    writer = ShardWriter(tmp_path, dtype, shape[1:], shard_bytes=24)
    writer.append(values)
    writer.finish()
    (tmp_path / "zarr.json").write_bytes(array_json(writer.metadata))
    array = zarr.open_array(str(tmp_path), mode="r")
    assert array.dtype == values.dtype
    np.testing.assert_array_equal(array[...], values)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_what_zarr_makes_is_understood_without_it(monkeypatch, dtype):
    group = group_json({"a": [1, {"b": None}]})
    for shape, rows in (((0,), 1), ((7,), 7), ((7,), 3), ((5, 2), 5), ((0, 3), 1), ((5, 2, 2), 2)):
        metadata = ArrayMetadata(shape, dtype, rows)
        document = array_json(metadata)
        assert document == written_array(metadata)
        assert parse_array(decode_json(document)) == metadata  # zarr's own word
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "zarr", None)  # what a missing package looks like to an import
            read_node.cache_clear()
            assert read_node(document) == metadata
            assert parse_group(decode_json(group)) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}}},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]},
        {"data_type": "complex64"},
        {"shape": [7.0]},
        {"shape": [-7]},
        {"zarr_format": 2},
        {"zarr_format": True},
    ],
)
def test_other_documents_are_left_to_zarr(change):
    content = decode_json(array_json(ArrayMetadata((7,), "int64", 7)))
    assert read_node(encode_json({**content, "attributes": {"more": 1}})) == ArrayMetadata((7,), "int64", 7)
    with pytest.raises((ValueError, KeyError)):
        read_node(encode_json({**content, **change}))


def test_groups_that_are_none():
    for content in ([], {"node_type": "array", "zarr_format": 3}):
        with pytest.raises(ValueError):
            parse_group(content)
    assert parse_group({"node_type": "group", "zarr_format": 3}) == {}
    with pytest.raises(ValueError, match="should be an object"):
        parse_group({"node_type": "group", "zarr_format": 3, "attributes": {"stride": 1}})


def test_a_chunk_file_is_a_plain_memory_map(tmp_path):
    writer = ShardWriter(tmp_path, "uint16", (3,), shard_bytes=1 << 20)
    values = np.arange(12, dtype=np.uint16).reshape(4, 3)
    writer.append(values.astype(">u2").astype(np.uint16))
    writer.finish()
    path = chunk_file(tmp_path, 0, 2)
    assert path == tmp_path / "c/0/0"
    np.testing.assert_array_equal(np.memmap(path, "<u2", "r", shape=(4, 3)), values)
    assert writer.metadata == ArrayMetadata((4, 3), "uint16", 4)
