from __future__ import annotations

import re
from pathlib import Path

import pytest

import index_format
from index_format.layout import ARRAYS, ATTRIBUTES, FORMAT_VERSION, NUMBERS, find_spec

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
