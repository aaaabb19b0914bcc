"""Two fits compared: arrays to the bit; what was measured with them to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# of the group: its attributes, and the digests of what it holds
_ABOUT = {"zarr.json", "manifest.json"}


def contents(path: Path) -> dict[str, bytes]:
    """Every file below, by its path from there."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_same_fit(folder: Path, other: Path) -> None:
    """Two directories of operators hold the same files, arrays and settings.

    How far steps agree is measured by torch's forward pass; an eigendecomposition finds the directions that
    projections have in common. Their last bits depend, now and then, on where a process has its arrays.
    Gates, bases and projections do not.
    """
    files = [
        {path.relative_to(each) for path in each.rglob("*") if path.is_file()} for each in (folder, other)
    ]
    assert files[0] == files[1]
    for name in files[0]:
        one, another = (folder / name).read_bytes(), (other / name).read_bytes()
        if str(name).startswith("projection_common/c/"):
            values = [np.frombuffer(each, np.float32) for each in (one, another)]
            np.testing.assert_allclose(*values, atol=1e-5)
        elif str(name) not in _ABOUT and not str(name).startswith("projection_common_values/c/"):
            assert one == another, name
    attributes = [json.loads((each / "zarr.json").read_text())["attributes"] for each in (folder, other)]
    _assert_close(*attributes)


def _assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _assert_close(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each, value in zip(found, expected, strict=True):
            _assert_close(each, value)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found == expected
