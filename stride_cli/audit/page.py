"""An audit as one HTML file: what was found, item by item; no network, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stride_cli.audit.formats import sentence
from stride_cli.audit.judge import CONTROLS_IN_WORDS, LEAKED, VERDICTS, Finding
from stride_cli.characters import html_text, page_policy

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --rule: #d1d9e0;
  --card: #f6f8fa; --v0: #a4342b; --v1: #8a6d00; --v2: #6b4fc8; --v3: #59636e; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4af;
  --rule: #30363d; --card: #161b22; --v0: #ff8f85; --v1: #e3c04c; --v2: #b9a2ff; --v3: #9aa4af; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
p { margin: .3rem 0; max-width: 46rem; } .found { font-size: 1.2rem; } .faint { color: var(--faint); }
.tools { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .6rem 0; }
input, select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: .4rem; padding: .3rem .6rem; } input { flex: 1 1 12rem; min-width: 0; }
details { border-bottom: 1px solid var(--rule); padding: .4rem 0; } [hidden] { display: none !important; }
summary { cursor: pointer; display: grid; grid-template-columns: 1rem minmax(0, 1fr) 12rem 7rem; gap: 0 .8rem;
  align-items: baseline; list-style: none; } summary::-webkit-details-marker { display: none; }
summary::before { content: "\\25b8"; color: var(--faint); } [open] > summary::before { content: "\\25be"; }
summary b { overflow-wrap: break-word; min-width: 0; } .q { text-align: right; white-space: nowrap; }
details > :not(summary) { margin-left: 1.8rem; } .v0 { color: var(--v0); } .v1 { color: var(--v1); }
.v2 { color: var(--v2); } .v3 { color: var(--v3); }
blockquote { margin: .4rem 0; padding: .1rem .8rem; border-left: 3px solid var(--rule); white-space: pre-wrap;
  overflow-wrap: break-word; }
@media (max-width: 40rem) { summary { grid-template-columns: 1rem minmax(0, 1fr) auto; }
  summary b { grid-column: 2 / -1; } summary .verdict { grid-column: 2; } .q { grid-column: 3; } }
@media print { .tools { display: none; } }
"""

_SCRIPT = """
const box = document.getElementById("filter"), which = document.getElementById("verdict");
const count = document.getElementById("count"), rows = [...document.querySelectorAll("details")];
const texts = rows.map(row => row.textContent.toLowerCase());
function filter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, at) => {
    const wanted = !which.value || row.dataset.verdict === which.value;
    row.hidden = !wanted || !words.every(word => texts[at].includes(word));
    shown += !row.hidden;
  });
  count.textContent = words.length || which.value ? `${shown} of ${rows.length}` : "";
}
box.addEventListener("input", filter);
which.addEventListener("change", filter);
filter();
"""


def render_page(findings: Sequence[Finding], *, benchmark: str, index_name: str, level: float) -> str:
    """The page as text; the gravest verdicts come first."""
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
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{page_policy(_SCRIPT)}">',
        f"<title>{leaked}: {title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f'<p class="found"><b class="v0">{leaked}</b>: in the corpus, and learnt by the model.</p>',
        f"<p>Of the others {others}.</p>",
        f'<p class="faint">{len(findings):,} items, {controls["count"]:,} controls: '
        f"{CONTROLS_IN_WORDS[controls['kind']]}.</p>",
        f"<p>An item has an effect where its q-value is below {level:g}: among all items reported so, about "
        f"{level:.0%} are expected to be false. An item is present where most of its n-grams occur in the "
        "corpus. The two are separate: a copy that the model did not learn has no effect. What a document "
        "says much the same in other words is reported where it had an effect as well, and is no evidence "
        "without.</p>",
        "<h2>Items</h2>",
        '<div class="tools"><input id="filter" type="search" aria-label="filter" '
        'placeholder="filter by words in items and documents">'
        f'<select id="verdict" aria-label="verdict"><option value="">all verdicts</option>{choices}</select>'
        '<span id="count" class="faint" role="status"></span></div>',
    ]
    for finding in order:
        number = VERDICTS.index(finding.verdict)
        lexical: Mapping[str, Any] = finding.lexical
        parts.append(
            f'<details data-verdict="{number}"><summary><b>{html_text(finding.document.id)}</b>'
            f'<span class="verdict v{number}">{html_text(finding.verdict)}</span>'
            f'<span class="q faint">q = {finding.q:.3g}</span></summary>'
            f"<p>{html_text(sentence(finding))}</p><blockquote>{html_text(finding.document.plain_text)}</blockquote>"
        )
        for name, what in (("", "longest shared run"), ("bm25_", "best by BM25")):
            if lexical[f"{name}document"]:
                parts.append(
                    f'<p class="faint">{what}: {html_text(lexical[f"{name}document"])}, chunk '
                    f"{lexical[f'{name}chunk']}</p><blockquote>{html_text(lexical[f'{name}passage'])}</blockquote>"
                )
        parts.append("</details>")
    return "\n".join([*parts, f"<script>{_SCRIPT}</script></body></html>", ""])
