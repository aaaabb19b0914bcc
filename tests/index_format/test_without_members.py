"""An index of a large design has no row_members: they are twice as large, and follow from it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from index_format import layout
from index_format.design import build_rows
from index_format.errors import IndexDamaged
from index_format.reader import Index
from index_format.verify import verify
from stride_cli.corpus.export import subset_records
from stride_cli.operators.designs import Designs
from tests.index_format.sample_build import N_SUBSETS, build, extend


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index that is taken for one of a large design."""
    monkeypatch.setattr(layout, "MOST_MEMBERS", 20)
    build(tmp_path / "large")
    return Index.open(tmp_path / "large")


def test_it_is_whole_and_says_so_by_its_version(large: Index, tmp_path: Path) -> None:
    assert not large.has("design/row_members")
    assert large.attributes["format_version"] == layout.WITHOUT_MEMBERS
    large.check_bounds()
    assert verify(large.directory) == []
    offsets, _ = build_rows(np.asarray(large.array("design/columns")), N_SUBSETS)
    np.testing.assert_array_equal(large.array("design/row_offsets"), offsets)


def test_a_small_design_has_them_and_must(
    large: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    build(tmp_path / "small")
    small = Index.open(tmp_path / "small")
    assert small.has("design/row_members") and small.attributes["format_version"] == 1
    with pytest.raises(IndexDamaged, match="array design/row_members is missing"):
        Index.open(large.path)


def test_subsets_are_exported_all_the_same(large: Index) -> None:
    offsets, members = build_rows(np.asarray(large.array("design/columns")), N_SUBSETS)
    expected = [members[first:last].tolist() for first, last in itertools.pairwise(offsets)]
    assert [record["chunks"] for record in subset_records(large)] == expected
    design = Designs.of(large)
    assert design.rows is None
    np.testing.assert_array_equal(design.row_sizes, np.diff(offsets))


def test_an_append_makes_a_large_design_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "grown", 10)
    assert Index.open(tmp_path / "grown").has("design/row_members")
    monkeypatch.setattr(layout, "MOST_MEMBERS", 70)
    extend(tmp_path / "grown", 10, 30, key="more")
    extend(tmp_path / "grown", 30, 35, key="still more")  # and goes on from one
    grown = Index.open(tmp_path / "grown")
    assert not grown.has("design/row_members") and grown.attributes["format_version"] == 2
    assert verify(grown.directory) == [] and grown.n_documents == 35
