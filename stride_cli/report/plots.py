"""Draw the plot of an answer: responses of the subsets, measured over recovered."""

from __future__ import annotations

import math

import numpy as np

from stride_cli.report.drawing import Scale, label, svg, ticks_for

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 320, 62, 14, 26, 42
_SMALL = 1e-12


def response_plot(measured: np.ndarray, recovered: np.ndarray) -> str:
    """Plot measured over recovered responses, a dot a subset, with the line on which they agree."""
    values = np.concatenate([measured, recovered])
    unit = float(np.abs(values).max(initial=0.0))
    power = math.floor(math.log10(unit)) if unit > _SMALL else 0
    if -2 < power < 4:  # beyond, plotted in a power of ten, so that ticks are short
        power = 0
    factor = 10.0**power
    across_ticks = ticks_for(*_range(recovered / factor))
    down_ticks = ticks_for(*_range(measured / factor))
    across = Scale(across_ticks[0], across_ticks[-1], _LEFT, _WIDTH - _RIGHT)
    down = Scale(down_ticks[0], down_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    marks = _rules(down_ticks, down) + [
        label(across(tick), _HEIGHT - _BOTTOM + 17, f"{tick:g}", "middle", faint=True)
        for tick in across_ticks
    ]
    low = max(across_ticks[0], down_ticks[0])
    high = min(across_ticks[-1], down_ticks[-1])
    if low < high:
        marks.append(
            f'<line class="ceiling" x1="{across(low):.1f}" y1="{down(low):.1f}" x2="{across(high):.1f}" '
            f'y2="{down(high):.1f}"/>'
        )
    # one path with a point at each subset: a tenth of the size of as many circles
    dots = "".join(
        f"M{across(x / factor):.1f} {down(y / factor):.1f}h0"
        for x, y in zip(recovered, measured, strict=True)
    )
    marks.append(f'<path class="dots" d="{dots}"/>')
    scale = "" if power == 0 else f" / 1e{power}"
    marks.append(label((_LEFT + _WIDTH) / 2, _HEIGHT - 6, f"recovered{scale}", "middle", faint=True))
    marks.append(label(4, 12, f"measured{scale}", "start", faint=True))
    return svg(_HEIGHT, marks, "Measured over recovered responses of the subsets", width=_WIDTH)


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min(initial=0.0)), float(values.max(initial=0.0))


def _rules(ticks: list[float], down: Scale) -> list[str]:
    return [
        f'<line class="{"zero" if tick == 0 else "rule"}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
        f'y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        + label(_LEFT - 8, down(tick) + 4, f"{tick:g}", "end", faint=True)
        for tick in ticks
    ]
