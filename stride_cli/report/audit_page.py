"""Draw an audit as one HTML file: what was found, item by item; no network, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stride_cli.audit.formats import sentence, summary
from stride_cli.audit.judge import LEAKED, NOTHING, PRESENT, UNDECIDED, VERDICTS, Finding
from stride_cli.characters import html_text
from stride_cli.report.drawing import about_page, asset, html_page, provenance

if TYPE_CHECKING:
    from index_format.reader import Index

_MEANS = {
    LEAKED: "a document holds the item, and the model learnt it there",
    PRESENT: "a document holds it, and a test that would have found an effect found none",
    UNDECIDED: "no test could have told; the reason stands with each",
    NOTHING: "no document holds it",
}
_MARKS = {LEAKED: "■", PRESENT: "◧", UNDECIDED: "?", NOTHING: "□"}  # told apart without colours
_SHOWN = 160  # characters of an item in its row


def render_page(findings: Sequence[Finding], *, benchmark: str, index: Index) -> str:
    """Write the page as text; the gravest verdicts come first."""
    counts = Counter(finding.verdict for finding in findings)
    order = sorted(findings, key=lambda each: (VERDICTS.index(each.verdict), 1 if each.q is None else each.q))
    title = f"Audit of {html_text(benchmark)} against {html_text(index.path.name)}"
    number = counts[LEAKED]
    head = f"{number:,} of {len(findings):,} items {'was' if number == 1 else 'were'} leaked and learnt"
    if not number:
        head = f"No item was found to be leaked and learnt, of {len(findings):,}"
    if counts[UNDECIDED]:
        head += f"; {counts[UNDECIDED]:,} {'is' if counts[UNDECIDED] == 1 else 'are'} undecided"
    rows = "".join(
        f'<tr><td class="v{place}">{_MARKS[verdict]} {html_text(verdict)}</td><td>{counts[verdict]:,}</td>'
        f"<td>{html_text(_MEANS[verdict])}</td></tr>"
        for place, verdict in enumerate(VERDICTS)
    )
    choices = "".join(
        f'<option value="{place}">{html_text(verdict)}</option>' for place, verdict in enumerate(VERDICTS)
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="found"><b>{head}.</b></p>',
        f"<table><tbody>{rows}</tbody></table>",
        *(f"<p>{html_text(line)}.</p>" for line in summary(findings)[1:]),
        "<h2>Items</h2>",
        '<div class="tools"><input id="filter" type="search" aria-label="filter" '
        'placeholder="filter by words in items and documents">'
        f'<select id="verdict" aria-label="verdict"><option value="">all verdicts</option>{choices}</select>'
        '<span id="count" class="faint" role="status"></span></div>',
        *map(_item, order),
        about_page(provenance(index)),
    ]
    return html_page(f"{head}: {title}", parts, style=asset("audit.css"), script=asset("filter.js"))


def _item(finding: Finding) -> str:
    number, held = VERDICTS.index(finding.verdict), finding.presence
    text, name = finding.document.plain_text, html_text(finding.document.id)
    first = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    q = f"q = {finding.q:.3g}" if finding.q is not None else ""
    parts = [
        f'<details class="card" data-verdict="{number}"><summary><span><b>{name}</b> '
        f'<span class="faint">{html_text(first)}</span></span>'
        f'<span class="verdict v{number}">{_MARKS[finding.verdict]} {html_text(finding.verdict)}</span>'
        f'<span class="q faint">{q}</span></summary><p>{html_text(sentence(finding))}</p>'
        '<div class="pair"><div><p class="faint">the item</p>'
        f"<blockquote>{html_text(text)}</blockquote></div>"
    ]
    if held["passage"]:
        name = html_text(held["document"])
        said = "the document" if held["found"] else "most like it, and no copy: the document"
        passage = html_text(held["passage"])
        parts.append(f'<div><p class="faint">{said} {name}</p><blockquote>{passage}</blockquote></div>')
    parts.append("</div>")
    if held["differences"]:
        told = "; ".join(_difference(ours, theirs) for ours, theirs in held["differences"][:12])
        parts.append(f"<p>They differ: {told}.</p>")
    return "\n".join([*parts, "</details>"])


def _difference(ours: str, theirs: str) -> str:
    """Put one difference in words: what the item has, and what the document has instead."""
    shown = [f"<i>{html_text(each[:80])}</i>" for each in (ours, theirs)]
    if not theirs:
        return shown[0]
    return f"{shown[0]} → {shown[1]}" if ours else f"+ {shown[1]}"
