"""Tables of leaks and look-alikes: what the audit finds and calls leaked, what checkers of n-grams find."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.figures import Record, figure, markdown, pick

MATRIX, NULL = "suites/audit_matrix", "suites/audit_null"
COPIES = ("verbatim", "upper", "title", "spaces", "marks", "forms")
COPIES += ("wrapped", "question", "answer", "reworded")
ALIKE = ("instruction", "template", "topic")
MODELS = {"scratch": "from scratch", "tuned": "fine-tuned"}


def _of(found: Sequence[Record], count: str, every: str = "items") -> str:
    total = sum(each.get(every, 0) for each in found)
    return f"{sum(each.get(count, 0) for each in found)} of {total}" if total else ""


def matrix() -> str:
    """Items found, and called leaked, by what the corpus holds of them; over corpora and forms of items."""
    head = ["the corpus holds", "found", "by 8-grams", "by 13-grams"]
    words = ("leaked and learnt", "of those by heart")
    head += [f"{word}, {name}" for name in MODELS.values() for word in words]
    groups = [("learnt", copy, f"{copy}, trained on") for copy in COPIES]
    groups += [("unseen", None, "a copy, not trained on")]
    groups += [("look-alike", copy, f"a look-alike: {copy}") for copy in ALIKE]
    groups += [("absent", None, "nothing")]
    lines = [head]
    for state, copy, label in groups:
        wanted = {"state": state} | ({"copy": copy} if copy is not None else {})
        audits = [pick(MATRIX, model=model, controls="absent", **wanted) for model in MODELS]
        plain = [_of(pick(MATRIX, model=f"{n}-grams:0", **wanted), "found") for n in (8, 13)]
        cells = [_of([*audits[0], *audits[1]], "found"), *plain]
        for own in audits:
            by_heart = _of(own, "by heart, leaked", "by heart") if copy in COPIES else ""
            cells += [_of(own, "leaked and learnt"), by_heart]
        lines.append([label, *cells])
    return markdown(lines)


def null() -> str:
    """Shares of p-values of items that are in the corpus and were not trained on."""
    lines = [["corpus, model", "controls", "items", "p ≤ .01", "≤ .05", "≤ .5", "distance", "discoveries"]]
    for each in pick(NULL, table="null"):
        below = [figure(each["below"][level], 3) for level in ("0.01", "0.05", "0.5")]
        limit = 1.36 * (1 / each["items"] + 1 / each["count"]) ** 0.5  # Kolmogorov, Smirnov: two samples
        distance = f"{figure(each['distance'], 3)} ({figure(limit, 3)})"
        false = f"{each['fifties_with_discoveries']} of {each['fifties']}"
        controls = f"{each['controls']}, {each['count']:,}"
        label = f"{each['corpus']}, {MODELS[each['model']]}"
        label += f"; items as {each['form']}" if each.get("form", each["corpus"]) != each["corpus"] else ""
        lines.append([label, controls, f"{each['items']:,}", *below, distance, false])
    return markdown(lines)
