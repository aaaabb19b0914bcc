from __future__ import annotations

import io

import pytest

from stride_cli.corpus.parquet_pages import DICTIONARY, pages, row_groups
from tests.fuzz.targets.readers import tables

parquet = pytest.importorskip("pyarrow.parquet")


def test_pages_add_up_to_what_the_metadata_state() -> None:
    """Of every type, codec, encoding and version of pages that the readers are tried with."""
    for table in tables():
        file = io.BytesIO(table)
        metadata = parquet.ParquetFile(file).metadata
        groups = row_groups(file)
        assert [group.rows for group in groups] == [
            metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)
        ]
        for number, group in enumerate(groups):
            assert len(group.columns) == metadata.num_columns
            for place, (begin, n_bytes) in enumerate(group.columns):
                stated = metadata.row_group(number).column(place)
                found = list(pages(file, begin, n_bytes))
                assert n_bytes == stated.total_compressed_size
                assert sum(page.values for page in found if page.kind != DICTIONARY) == stated.num_values
                assert any(page.kind == DICTIONARY for page in found) == stated.has_dictionary_page
                # that of the metadata counts the headers too
                size = sum(page.size for page in found)
                assert size < stated.total_uncompressed_size < size + 200 * len(found)


def test_every_cut_of_the_metadata_is_noticed() -> None:
    table = tables()[0]
    size = int.from_bytes(table[-8:-4], "little")
    for cut in range(1, size):
        shorter = table[: -8 - cut] + (size - cut).to_bytes(4, "little") + b"PAR1"
        with pytest.raises(ValueError, match="metadata"):
            row_groups(io.BytesIO(shorter))
    with pytest.raises(ValueError, match="longer than the file"):
        row_groups(io.BytesIO(b"PAR1" + (1 << 20).to_bytes(4, "little") + b"PAR1"))
