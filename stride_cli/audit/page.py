"""An audit as one HTML file: what was found, item by item; no script, no network, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stride_cli.audit.formats import sentence
from stride_cli.audit.judge import CONTROLS_IN_WORDS, VERDICTS, Finding
from stride_cli.characters import html_text

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --rule: #d1d9e0;
  --v0: #a4342b; --v1: #8a6d00; --v2: #6b4fc8; --v3: #59636e; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4af;
  --rule: #30363d; --v0: #ff8f85; --v1: #e3c04c; --v2: #b9a2ff; --v3: #9aa4af; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } p { margin: .3rem 0; max-width: 46rem; }
.faint { color: var(--faint); } details { border-bottom: 1px solid var(--rule); padding: .4rem 0; }
summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: baseline; }
summary b { min-width: 11rem; overflow-wrap: anywhere; } .v0 { color: var(--v0); } .v1 { color: var(--v1); }
.v2 { color: var(--v2); } .v3 { color: var(--v3); }
blockquote { margin: .4rem 0; padding: .1rem .8rem; border-left: 3px solid var(--rule); white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""


def render_page(findings: Sequence[Finding], *, benchmark: str, index_name: str, level: float) -> str:
    """The page as text; the gravest verdicts come first."""
    counts = Counter(finding.verdict for finding in findings)
    order = sorted(findings, key=lambda finding: (VERDICTS.index(finding.verdict), finding.q))
    title = f"Audit of {html_text(benchmark)} against {html_text(index_name)}"
    controls = max((finding.controls for finding in findings), key=lambda each: each["count"])
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f'<p class="faint">{len(findings):,} items, {controls["count"]:,} controls: '
        f"{CONTROLS_IN_WORDS[controls['kind']]}.</p>",
        "<p>" + "; ".join(f"{counts[verdict]:,} {html_text(verdict)}" for verdict in VERDICTS) + ".</p>",
        f"<p>An item has an effect where its q-value is below {level:g}: among all items reported so, about "
        f"{level:.0%} are expected to be false. An item is present where most of its n-grams occur in the "
        "corpus. The two are separate: a copy that the model did not learn has no effect.</p>",
    ]
    for finding in order:
        number = VERDICTS.index(finding.verdict)
        lexical: Mapping[str, Any] = finding.lexical
        parts.append(
            f'<details><summary><b>{html_text(finding.document.id)}</b><span class="v{number}">'
            f'{html_text(finding.verdict)}</span><span class="faint">q = {finding.q:.3g}</span></summary>'
            f"<p>{html_text(sentence(finding))}</p><blockquote>{html_text(finding.document.plain_text)}</blockquote>"
        )
        for name, what in (("", "longest shared run"), ("bm25_", "best by BM25")):
            if lexical[f"{name}document"]:
                parts.append(
                    f'<p class="faint">{what}: {html_text(lexical[f"{name}document"])}, chunk '
                    f"{lexical[f'{name}chunk']}</p><blockquote>{html_text(lexical[f'{name}passage'])}</blockquote>"
                )
        parts.append("</details>")
    return "\n".join([*parts, "</body></html>", ""])
