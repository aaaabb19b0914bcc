"""Draw inputs of a classifier as small pictures: images as PNG, rows of a table as bars (SVG)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

_LARGEST = 128  # pixels of a side; larger images are thinned
_COLUMNS = 64  # of a table's row


def thumbnail(values: np.ndarray, low: np.ndarray | float, high: np.ndarray | float) -> str:
    """Draw one input as a ``data:`` address of a picture; empty where it is neither an image nor a row.

    Args:
        values: (H, W), (C, H, W) or (H, W, C) with one or three channels: an image; (F,): a row of a table
        low, high: of an image, the values that are black and white; of a row, (F,): each column's range
    """
    values = np.asarray(values, np.float64)
    if values.ndim == 1:
        return _bars(values, np.asarray(low, np.float64), np.asarray(high, np.float64))
    image = _channels_last(values)
    if image is None:
        return ""
    step = max(1, -(-max(image.shape[:2]) // _LARGEST))
    spread = float(high) - float(low)
    shades = np.clip((image[::step, ::step] - float(low)) / (spread if spread > 0 else 1.0), 0, 1)
    content = png(np.round(255 * shades).astype(np.uint8))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def value_range(inputs: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Find low and high of `thumbnail` over inputs (N, …) that are shown together.

    Pixels that are bytes keep their scale; columns of a table have one each.
    """
    if inputs.ndim == 2:
        return inputs.min(axis=0), inputs.max(axis=0)
    if inputs.dtype == np.uint8 and inputs.max(initial=0) > 127:
        return 0.0, 255.0
    return min(0.0, float(inputs.min(initial=0))), float(inputs.max(initial=0))


def png(pixels: np.ndarray) -> bytes:
    """Write a PNG file of pixels, (H, W, 1) grey or (H, W, 3) red, green, blue; uint8."""
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)  # filter 0: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def _channels_last(values: np.ndarray) -> np.ndarray | None:
    if values.ndim == 2:
        return values[:, :, None]
    if values.ndim == 3 and values.shape[2] in (1, 3):
        return values
    if values.ndim == 3 and values.shape[0] in (1, 3):
        return np.moveaxis(values, 0, 2)
    return None


def _bars(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """Draw a bar a column, as high as the value stands in the column's range."""
    values, low, high = values[:_COLUMNS], low[:_COLUMNS], high[:_COLUMNS]
    spread = np.where(high > low, high - low, 1.0)
    heights = 2 + 58 * np.clip((values - low) / spread, 0, 1)
    bars = "".join(
        f'<rect x="{4 * place}" y="{60 - height:.1f}" width="3" height="{height:.1f}"/>'
        for place, height in enumerate(heights)
    )
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {4 * len(values)} 60" width="64" height="64" '
        f'preserveAspectRatio="none" fill="#4c8dd6">{bars}</svg>'
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}"
