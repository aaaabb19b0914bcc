"""Tables of leaks in other words: whom the audit calls leaked, what search says, what fewer controls find."""

from __future__ import annotations

from statistics import fmean

from tests.benchmarks.figures import Record, figure, markdown, pick

LEAKS = "suites/leaks"
FORMS = ("copy", "edit", "rewritten", "held back")


def _of(found: list[Record], count: str, every: str) -> str:
    return f"{sum(each[count] for each in found)} of {sum(each[every] for each in found)}"


def audit() -> str:
    """Problems called leaked, of how many, by kind of planting and form of the copies; by rate and in all."""
    rates = sorted({record["rate"] for record in pick(LEAKS, table="audit")})
    lines = [["called leaked", *(f"r = {rate:g} %" for rate in rates), "all"]]
    groups = [(kind, form) for kind in ("trained", "untrained") for form in FORMS]
    for kind, form in [*groups, ("absent", "")]:
        found = pick(LEAKS, table="audit", kind=kind, form=form)
        cells = [[each for each in found if each["rate"] == rate] for rate in rates]
        label = f"{kind}, {form}" if form else kind
        lines.append([label, *(_of(own, "called_leaked", "problems") for own in [*cells, found])])
    return markdown(lines)


def search() -> str:
    """What a search engine flags of trained and untrained problems, and how well it orders them."""
    lines = [["search", "flags of trained", "flags of untrained", "AUROC trained / untrained"]]
    for method in dict.fromkeys(record["method"] for record in pick(LEAKS, table="search")):
        found = pick(LEAKS, table="search", method=method)
        flagged = [_of(found, f"{kind}_flagged", kind) for kind in ("trained", "untrained")]
        # of all pairs of a cell together
        pairs = [each["trained"] * each["untrained"] for each in found]
        above = sum(n * each["trained_above"] for n, each in zip(pairs, found, strict=True)) / sum(pairs)
        lines.append([method, *flagged, figure(above, 2)])
    return markdown(lines)


def power() -> str:
    """Share of trained problems found, and of discoveries that are false, by number of controls."""
    found = pick(LEAKS, table="power")
    counts = sorted({record["controls"] for record in found})
    lines = [["controls", *(str(count) for count in counts)]]
    for field, what in (("trained_found", "found"), ("false_discovery_rate", "false discoveries")):
        for statistic in dict.fromkeys(record["statistic"] for record in found):
            own = [
                [each[field] for each in found if (each["statistic"], each["controls"]) == (statistic, count)]
                for count in counts
            ]
            lines.append([f"{what}, {statistic} (%)", *(f"{100 * fmean(values):.1f}" for values in own)])
    return markdown(lines)
