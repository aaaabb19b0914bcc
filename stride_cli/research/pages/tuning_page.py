"""A sweep as one HTML file: the choice, and a plot for every setting; no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from stride_cli.characters import html_text
from stride_cli.report.drawing import WIDTH, Scale, label, svg, ticks_for
from stride_cli.research.pages.drawing import page

_NAMES = ("space", "layer", "damping", "rank", "subsets", "degree", "lambda_ratio")
_TITLES = {"subsets": "K, subsets", "degree": "d, subsets of a chunk", "lambda_ratio": "λ / λ_max"}
_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62, 24, 16, 34, 240


def tuning_page(trials: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """Render the page as text.

    Parameters
    ----------
    trials : ``stride.trial/1`` records
    result : the ``stride.tune/1``
    """
    judged = (
        "how well recovered influences predict the losses of models retrained on random subsets"
        if result["criterion"] != "continued"
        else "how well recovered influences predict the losses after the model was trained further on random "
        "halves of the corpus: a stand-in for retraining, to rank settings by, no LDS"
    )
    score, gain = result["score"], result["gain"]
    written = result["written"].replace("\n", ", ") or "the settings before"
    parts = [
        f'<p class="faint">{result["trials"]} trials, {result["queries"]} queries, {result["responses"]} '
        "subsets. Bars: one standard error over queries.</p>",
        f"<p>Score: {judged}. Spearman’s ρ over subsets, mean over queries.</p>",
        f"<p>Chosen: <b>{html_text(written)}</b>, score "
        f"{score['mean']:.3f} ± {score['se']:.3f}, {gain['mean']:+.3f} ± {gain['se']:.3f} on the settings "
        "before.</p>",
    ]
    good = [trial for trial in trials if trial["score"] is not None]
    for name in _NAMES:
        points = _points(good, name)
        if len({value for value, *_ in points}) > 1:
            parts.append(f"<h2>{_TITLES.get(name, name)}</h2>" + _plot(points, name, result[name]))
    failed = [trial for trial in trials if trial["score"] is None]
    parts += [f"<p>Trial {trial['trial']} failed: {html_text(trial['error'])}</p>" for trial in failed]
    return page(f"Settings for {result['index']}", parts)


def _points(trials: Sequence[Mapping[str, Any]], name: str) -> list[tuple[Any, float, float]]:
    """List (value, score, standard error) of every trial; of every λ of the best trial for λ."""
    if name == "lambda_ratio":
        best = [trial for trial in trials if trial["best"]][-1:]
        return [(entry[name], entry["score"], entry["se"]) for trial in best for entry in trial["lambdas"]]
    return [
        ("default" if trial[name] is None else trial[name], trial["score"], trial["se"]) for trial in trials
    ]


def _plot(points: Sequence[tuple[Any, float, float]], name: str, chosen: Any) -> str:
    """Plot scores over the values, evenly spaced; the chosen value in another colour."""
    values = sorted({value for value, *_ in points}, key=lambda value: (isinstance(value, str), value))
    points = [(value, score, error if isfinite(error) else 0.0) for value, score, error in points]
    low = min(score - error for _, score, error in points)
    high = max(score + error for _, score, error in points)
    ticks = ticks_for(low, high)
    down = Scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    across = Scale(-0.5, len(values) - 0.5, _LEFT, WIDTH - _RIGHT)
    marks = []
    for tick in ticks:
        marks.append(
            f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down(tick):.1f}" '
            f'y2="{down(tick):.1f}"/>'
        )
        marks.append(label(_LEFT - 8, down(tick) + 4, f"{tick:g}", "end", faint=True))
    wanted = "default" if chosen is None else chosen
    for place, value in enumerate(values):
        own = [point for point in points if point[0] == value]
        colour = "var(--c1)" if value == wanted else "var(--c0)"
        text = value if isinstance(value, str) else f"{value:g}"
        marks.append(label(across(place), _HEIGHT - _BOTTOM + 18, text, "middle", faint=value != wanted))
        for number, (_, score, error) in enumerate(own):
            x = across(place + (number - (len(own) - 1) / 2) * min(0.06, 0.8 / len(own)))
            marks.append(
                f"<g><title>{html_text(text)}: {score:.3f} ± {error:.3f}</title>"
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{down(score - error):.1f}" '
                f'y2="{down(score + error):.1f}" style="stroke:{colour};stroke-opacity:.5"/>'
                f'<circle cx="{x:.1f}" cy="{down(score):.1f}" r="3.5" style="fill:{colour}"/></g>'
            )
    return svg(_HEIGHT, marks, f"Score over {_TITLES.get(name, name)}")
