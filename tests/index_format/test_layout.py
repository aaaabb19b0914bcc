from __future__ import annotations

import re
from pathlib import Path

import pytest

import index_format
from index_format.layout import (
    ARRAYS,
    ATTRIBUTES,
    FORMAT_VERSION,
    NUMBERS,
    check_arrays,
    check_attributes,
    find_spec,
)

SPEC = Path(index_format.__file__).with_name("SPEC.md").read_text(encoding="utf-8")
JSON_TYPES = {int: "integer", str: "string", dict: "object", type(None): "null"}


def table(header: str) -> list[list[str]]:
    """The cells of the table of SPEC.md whose first column is headed `header`."""
    body = SPEC[SPEC.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def test_spec_and_layout_have_the_same_version_arrays_and_attributes():
    assert SPEC.startswith(f"# The STRIDE index, format version {FORMAT_VERSION}\n")
    assert table("array") == [
        [
            spec.path,
            "any number or bool" if spec.dtypes == NUMBERS else " or ".join(spec.dtypes),
            "any" if spec.shape == ("...",) else f"({', '.join(map(str, spec.shape))})",
            "yes" if spec.required else "no",
            spec.meaning.strip("`"),
        ]
        for spec in ARRAYS.values()
    ]
    assert table("attribute") == [
        [name, " or ".join(JSON_TYPES[t] for t in spec.types), "yes" if spec.required else "no", spec.meaning]
        for name, spec in ATTRIBUTES.items()
    ]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("corpus/tokens", "corpus/tokens"),
        ("operators/training_log_loss", "operators/training_log_*"),
        ("operators/layer8.U-1", "operators/*"),
        ("truth/masks", "truth/*"),
    ],
)
def test_names_find_their_specification(name, path):
    assert find_spec(name).path == path


@pytest.mark.parametrize(
    "name",
    [
        *("", "tokens", "corpus/", "corpus/x", "operators", "operators/", "operators/a/b", "operators/*"),
        *("operators/..", "operators/é", "operators/manifest.json", "operators/zarr.json", "operators/a,b"),
        *("operators/a b", "elsewhere/x", "/corpus/tokens"),
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="the layout has no array"):
        find_spec(name)


def test_missing_arrays_and_other_sizes_and_dtypes_are_named():
    shapes = {
        "corpus/tokens": (20,),
        "corpus/chunk_offsets": (8,),
        "corpus/chunk_document": (7,),
        "corpus/loss_start": (7,),
        "corpus/document_offsets": (4,),
        "corpus/document_id_bytes": (9,),
        "corpus/document_id_offsets": (4,),
        "design/columns": (7, 2),
        "design/row_offsets": (6,),
    }
    dtypes = {name: ARRAYS[name].dtypes[0] for name in shapes}
    assert check_arrays(shapes, dtypes, n_subsets=5, degree=2) == []
    for name in shapes:
        missing = {other: shape for other, shape in shapes.items() if other != name}
        assert check_arrays(missing, dtypes, n_subsets=5, degree=2) == [f"array {name} is missing"]
        if name not in ("corpus/tokens", "corpus/document_id_bytes"):  # these lengths are free
            longer = shapes | {name: (shapes[name][0] + 1, *shapes[name][1:])}
            assert check_arrays(longer, dtypes, n_subsets=5, degree=2)
        wrong = check_arrays(shapes, dtypes | {name: "complex64"}, n_subsets=5, degree=2)
        assert len(wrong) == 1 and wrong[0].startswith(f"{name} should be")
    both = check_arrays({**shapes, "corpus/text_bytes": (3,)}, dtypes, n_subsets=5, degree=2)
    assert "both be present" in both[0]


def test_attributes_are_checked():
    good = {name: spec.types[0]() for name, spec in ATTRIBUTES.items()}
    assert check_attributes(good) == check_attributes({**good, "model_path": None, "extra": 1}) == []
    assert check_attributes({**good, "seed": True}) == ["attribute 'seed' should be int, found True"]
    for name, spec in ATTRIBUTES.items():
        without = {other: value for other, value in good.items() if other != name}
        assert bool(check_attributes(without)) == spec.required
