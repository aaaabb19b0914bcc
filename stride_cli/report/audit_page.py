"""Draw an audit as one HTML file: what was found, item by item; no network, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stride_cli.audit.formats import sentence
from stride_cli.audit.judge import CONTROLS_IN_WORDS, LEAKED, VERDICTS, Finding
from stride_cli.characters import html_text
from stride_cli.report.drawing import asset, html_page


def render_page(findings: Sequence[Finding], *, benchmark: str, index_name: str, level: float) -> str:
    """Write the page as text; the gravest verdicts come first."""
    counts = Counter(finding.verdict for finding in findings)
    order = sorted(findings, key=lambda finding: (VERDICTS.index(finding.verdict), finding.q))
    title = f"Audit of {html_text(benchmark)} against {html_text(index_name)}"
    controls = max((finding.controls for finding in findings), key=lambda each: each["count"])
    leaked = f"{counts[LEAKED]:,} of {len(findings):,} leaked"
    others = "; ".join(f"{counts[verdict]:,} {html_text(verdict)}" for verdict in VERDICTS[1:])
    choices = "".join(
        f'<option value="{number}">{html_text(verdict)}</option>' for number, verdict in enumerate(VERDICTS)
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="found"><b class="v0">{leaked}</b>: in the corpus, and learnt by the model.</p>',
        f"<p>Of the others {others}.</p>",
        f'<p class="faint">{len(findings):,} items, {controls["count"]:,} controls: '
        f"{CONTROLS_IN_WORDS[controls['kind']]}.</p>",
        f"<p>An item has an effect where its q-value is below {level:g}: among all items reported so, about "
        f"{level:.0%} are expected to be false. An item is present where most of its n-grams occur in the "
        "corpus. The two are separate: a copy that the model did not learn has no effect. Paraphrases count "
        "only if they also had an effect.</p>",
        "<h2>Items</h2>",
        '<div class="tools"><input id="filter" type="search" aria-label="filter" '
        'placeholder="filter by words in items and documents">'
        f'<select id="verdict" aria-label="verdict"><option value="">all verdicts</option>{choices}</select>'
        '<span id="count" class="faint" role="status"></span></div>',
        *map(_item, order),
    ]
    return html_page(f"{leaked}: {title}", parts, style=asset("audit.css"), script=asset("filter.js"))


def _item(finding: Finding) -> str:
    number, lexical = VERDICTS.index(finding.verdict), finding.lexical
    parts = [
        f'<details class="card" data-verdict="{number}"><summary><b>{html_text(finding.document.id)}</b>'
        f'<span class="verdict v{number}">{html_text(finding.verdict)}</span>'
        f'<span class="q faint">q = {finding.q:.3g}</span></summary><p>{html_text(sentence(finding))}</p>'
        f"<blockquote>{html_text(finding.document.plain_text)}</blockquote>"
    ]
    passages = [
        ("longest shared run", lexical["document"], lexical["chunk"], lexical["passage"]),
        ("best by BM25", lexical["bm25_document"], lexical["bm25_chunk"], lexical["bm25_passage"]),
    ]
    parts += [
        f'<p class="faint">{what}: {html_text(document)}, chunk {chunk}</p>'
        f"<blockquote>{html_text(passage)}</blockquote>"
        for what, document, chunk, passage in passages
        if document
    ]
    return "\n".join([*parts, "</details>"])
