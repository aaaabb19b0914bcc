"""Inputs as pictures: the PNG is read back by an independent decoder, a row of a table has bars."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest

from stride_cli.report.thumbnails import thumbnail, value_range


def decoded(address: str) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    kind, content = address.split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(image.open(io.BytesIO(base64.b64decode(content))))


def test_images_of_every_layout() -> None:
    grey = np.arange(12).reshape(3, 4)
    assert decoded(thumbnail(grey, 0, 11)).tolist() == np.round(grey * 255 / 11).tolist()
    colour = np.stack([grey, grey, grey])
    assert decoded(thumbnail(colour, 0, 11)).shape == (3, 4, 3)
    assert (decoded(thumbnail(np.moveaxis(colour, 0, 2), 0, 11)) == decoded(thumbnail(colour, 0, 11))).all()
    assert decoded(thumbnail(np.zeros((300, 20)), 0, 0)).shape == (100, 7)  # thinned; nothing to divide by
    assert thumbnail(np.zeros((4, 5, 6)), 0, 1) == ""


def test_a_row_has_a_bar_a_column() -> None:
    rows = np.array([[0.0, 5.0, 1.0], [10.0, 5.0, 3.0]])
    low, high = value_range(rows)
    drawn = base64.b64decode(thumbnail(rows[1], low, high).split(",")[1]).decode()
    assert re.findall(r'height="([\d.]+)"/>', drawn) == ["60.0", "2.0", "60.0"]
