"""Answers as one HTML file: a gallery of queries without network or server, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from stride_cli.characters import html_text, page_policy, shortened
from stride_cli.recovery.passages import matching_spans
from stride_cli.report.contents import ShownAnswer, ShownHit, prominence
from stride_cli.report.drawing import STYLE, write_whole
from stride_cli.report.explanation import BELOW_THE_LINE, found_of, line_at, odds, score
from stride_cli.report.plots import concentration_plot, response_plot

_OPEN = 3  # so many queries of a gallery are shown unfolded
_CONTEXT = 240  # characters shown on either side of a passage; the rest of the chunk unfolds

_PAGE_STYLE = (
    STYLE
    + """
:root { --carry: #fff3c4; --word: #7a4d00; --token: #d8ecff; --card: #f6f8fa; --warn: #b35900; }
@media (prefers-color-scheme: dark) { :root { --carry: #3d3312; --word: #ffd479; --token: #10304f;
  --card: #161b22; --warn: #ffa657; } }
body { max-width: 60rem; overflow-wrap: break-word; }
h1 { margin-bottom: .2rem; } h2 { margin: 1.6rem 0 .2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
.contents { white-space: normal; } .contents td, .contents th { text-align: left; vertical-align: top; }
.verdict { font-weight: 600; } .clear { color: var(--c2); } .weak, .guessing { color: var(--warn); }
a { color: var(--c0); } .tools { position: sticky; top: 0; background: var(--paper); padding: .6rem 0;
  display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; border-bottom: 1px solid var(--rule);
  z-index: 1; }
input, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: .4rem; padding: .3rem .6rem; } input { flex: 1 1 12rem; min-width: 0; }
button { cursor: pointer; }
article { border: 1px solid var(--rule); border-radius: .6rem; margin: 1rem 0; scroll-margin-top: 4rem; }
article > details > summary { padding: .8rem 1rem; cursor: pointer; }
article > details > div { padding: 0 1rem 1rem; }
.said { display: inline; font-size: 1.1rem; font-weight: 400; white-space: pre-wrap; }
.said b { font-weight: 600; color: var(--c2); }
.token { background: var(--token); border-radius: .2rem; box-shadow: inset -1px 0 var(--paper); }
.hit { border-top: 1px solid var(--rule); padding: .7rem 0; }
.top { display: flex; flex-wrap: wrap; gap: .1rem .8rem; align-items: baseline; }
.top .name { font-weight: 600; } .bar { display: block; height: .45rem; border-radius: .2rem; margin: .3rem 0;
  min-width: 2px; } .supports { background: var(--c2); } .opposes { background: var(--c3); }
.text { white-space: pre-wrap; margin: .3rem 0; max-width: none; }
mark { background: var(--carry); color: inherit; border-radius: .2rem; padding: .05rem 0; }
mark u, .text u { color: var(--word); font-weight: 600; text-decoration: none; }
.line { border-top: 2px dashed var(--rule); color: var(--faint); margin: .6rem 0 0; padding-top: .2rem; }
.flag { color: var(--warn); } ul.caveats { padding-left: 1.2rem; margin: .3rem 0; }
ul.caveats li { color: var(--warn); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .3rem 0; }
dd { margin: 0; } dt { color: var(--faint); } [hidden] { display: none !important; }
.pictured { display: grid; grid-template-columns: 4.5rem 1fr; gap: 0 .8rem; align-items: start; }
.thumb { width: 4.5rem; height: 4.5rem; object-fit: contain; image-rendering: pixelated;
  border: 1px solid var(--rule); border-radius: .3rem; background: var(--card); }
.thumb.supports { border: 2px solid var(--c2); } .thumb.opposes { border: 2px solid var(--c3); }
svg .dots { stroke: var(--c0); stroke-width: 4; stroke-linecap: round; stroke-opacity: .55; fill: none; }
svg .curve { stroke: var(--c0); stroke-width: 2; fill: none; }
@media (max-width: 30rem) { article { scroll-margin-top: 7rem; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: .3rem; } .contents tr:first-child { display: none; }
  .contents tr { border-bottom: 1px solid var(--rule); } .contents tr, .contents td { display: block; }
  .contents td { border: 0; padding: .1rem 0; } .contents td[data-name]::before { color: var(--faint);
  content: attr(data-name) ": "; } }
@media print { .tools { display: none; } article { break-inside: avoid; } }
"""
)

_SCRIPT = """
const box = document.getElementById("filter"), count = document.getElementById("count");
const cards = [...document.querySelectorAll("article")];
const texts = cards.map(card => card.textContent.toLowerCase());
function filter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  cards.forEach((card, at) => {
    const hit = words.every(word => texts[at].includes(word));
    card.hidden = !hit;
    const row = document.querySelector(`[data-for="${card.id}"]`);
    if (row) row.hidden = !hit;
    shown += hit;
  });
  count.textContent = words.length ? `${shown} of ${cards.length}` : "";
}
function fold(open) { cards.forEach(card => { card.firstElementChild.open = open; }); }
function follow() {
  const card = document.getElementById(location.hash.slice(1));
  if (card && cards.includes(card)) { card.firstElementChild.open = true; card.scrollIntoView(); }
}
box.addEventListener("input", filter);
document.getElementById("unfold").addEventListener("click", () => fold(true));
document.getElementById("fold").addEventListener("click", () => fold(false));
addEventListener("hashchange", follow);
filter();
follow();
"""


def write_report(path: Path, answers: Sequence[ShownAnswer], *, title: str) -> None:
    """Write the page at `path`, whole or not at all."""
    write_whole(path, render_report(answers, title=title))


def render_report(answers: Sequence[ShownAnswer], *, title: str) -> str:
    """The page as text.

    Parameters
    ----------
    answers : one or more
    title : str      for the head of the page
    """
    queries = f"{len(answers):,} " + ("query" if len(answers) == 1 else "queries")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{page_policy(_SCRIPT)}">',
        '<link rel="icon" href="data:,">',
        f"<title>{html_text(title)}</title><style>{_PAGE_STYLE}</style></head><body>",
        f"<h1>{html_text(title)}</h1>",
        f'<p class="faint">{queries}. Which training documents made the model say this? A document supports '
        "a response if training on it lowers the response’s loss, and opposes it if training on it raises "
        f"the loss. {_unit(answers)} A share is the part of all influence on the response.</p>",
        f'<p class="faint">{_legend(answers)}</p>',
        '<div class="tools"><input id="filter" type="search" aria-label="filter" '
        'placeholder="filter by words in prompts and documents">'
        '<span id="count" class="faint" role="status"></span>'
        '<button id="unfold" type="button">unfold all</button>'
        '<button id="fold" type="button">fold all</button></div>',
    ]
    if len(answers) > 1:
        parts.append(_contents(answers))
    parts += [_card(number, answer) for number, answer in enumerate(answers, 1)]
    return "\n".join([*parts, f"<script>{_SCRIPT}</script></body></html>", ""])


def _legend(answers: Sequence[ShownAnswer]) -> str:
    parts = []
    if any(scored for answer in answers for _, scored in answer.pieces):
        parts.append('<span class="token">Scored tokens</span> are those whose loss is attributed.')
    hits = [hit for answer in answers for hit in (*answer.supporters, *answer.opposers)]
    measured = [hit.held is not None for hit in hits if hit.span[1]]
    if any(measured):
        parts.append(
            "<mark>Highlighted</mark> is the sentence that carries more of a chunk’s influence than any "
            "other: its tokens have most in common with the query’s gradient."
        )
    elif measured:
        parts.append("<mark>Highlighted</mark> is the sentence of a chunk most like the query.")
    if measured:
        parts.append('<span class="text"><u>Words</u></span> are shared with the query.')
    return " ".join(parts)


def _contents(answers: Sequence[ShownAnswer]) -> str:
    """What was asked, what the model said, and what may be concluded, a row a query."""
    judged = any(answer.record.get("verdict") for answer in answers)
    names = ["query", "the model said", *(["verdict"] if judged else []), "strongest document", "share"]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for number, (answer, hit) in enumerate(zip(answers, prominence(answers), strict=True), 1):
        prompt = shortened(answer.record["prompt"].strip() or "…", 70)
        said = shortened(answer.record["response"].strip() or "…", 70)
        strongest = "–" if hit is None else html_text(shortened(hit.document, 40))
        if hit is not None and hit.sign == "opposes":
            strongest += " (opposes)"
        cells = [f'<a href="#q{number}">{html_text(prompt)}</a>', html_text(said)]
        cells += [_verdict(answer) or "–"] if judged else []
        cells += [strongest, "–" if hit is None else _percent(hit.share)]
        row = "".join(
            f"<td{f' data-name={chr(34)}{name}{chr(34)}' if place else ''}>{cell}</td>"
            for place, (name, cell) in enumerate(zip(names, cells, strict=True))
        )
        rows.append(f'<tr data-for="q{number}">{row}</tr>')
    return f'<h2>Overview</h2><div class="wide"><table class="contents">{"".join(rows)}</table></div>'


def _verdict(answer: ShownAnswer) -> str:
    """The word of the verdict; empty where there is none."""
    word = answer.record.get("verdict")
    return f'<span class="verdict {html_text(word)}">{html_text(word)}</span>' if word else ""


def _card(number: int, answer: ShownAnswer) -> str:
    record = answer.record
    response = "".join(
        f'<span class="token">{html_text(piece)}</span>' if scored else html_text(piece)
        for piece, scored in answer.pieces
    )
    origin = "the model’s own continuation" if record["generated"] else "a given response"
    tokens = record["scored_tokens"]
    about = f"{origin}, {tokens} scored token{'' if tokens == 1 else 's'}"
    each = "" if tokens == 1 else " a token"
    if answer.picture or any("label" in hit for hit in record["hits"]):
        about, each = "the model’s own prediction" if record["generated"] else "a given class", ""
    comparison = record.get("comparison")
    if comparison:
        about = f"{origin}; {html_text(odds(comparison))}"
    elif record["loss"] is not None:
        about += f", probability {math.exp(-record['loss']):.2g}{each}"
    if record.get("template") == "chat":
        about += ", asked in the chat template"
    if "id" in record:
        about = f"{html_text(str(record['id']))}: {about}"
    if comparison:
        response += f'</b><br><span class="faint">rather than</span> <b>{html_text(record["instead"])}'
    caveats = "".join(f"<li>{html_text(caveat)}</li>" for caveat in answer.caveats)
    verdict = f"{found}: " if (found := _verdict(answer)) else ""
    hits = [*answer.supporters, *answer.opposers]
    largest = max((abs(hit.influence or 0.0) for hit in hits), default=0.0)
    return "\n".join(
        [
            f'<article id="q{number}"><details{" open" if number <= _OPEN else ""}>',
            f'<summary><h2 class="said">{html_text(record["prompt"])}<b>{response}</b></h2><br>'
            f'{verdict}<span class="faint">{about}</span></summary><div>',
            _thumb(answer.picture, "the query’s input", "") if answer.picture else "",
            f"<p>{html_text(answer.explanation)}</p>",
            f'<ul class="caveats">{caveats}</ul>' if caveats else "",
            _hits("Documents that support this", answer.supporters, answer, largest),
            _hits("Documents that oppose this", answer.opposers, answer, largest),
            _plots(answer),
            _certificate(answer),
            "</div></details></article>",
        ]
    )


def _hits(title: str, hits: Sequence[ShownHit], answer: ShownAnswer, largest: float) -> str:
    if not hits:
        return ""
    parts = [f"<h3>{title}</h3>"]
    parted = line_at([hit.above_line for hit in hits]) if hits[0].sign == "supports" else None
    for place, hit in enumerate(hits):
        if place == parted:
            parts.append(f'<p class="line">{BELOW_THE_LINE}</p>')
        parts.append(_hit(hit, answer, largest))
    return "\n".join(parts)


def _hit(hit: ShownHit, answer: ShownAnswer, largest: float) -> str:
    record, numbers = answer.record, []
    query = f"{record['prompt']} {record['response']}"
    if hit.influence:
        numbers.append(f"<span>{_percent(hit.share)} of all influence</span>")
        numbers.append(f'<span class="faint">{score(hit.influence, largest, record)}</span>')
    if hit.held is not None:
        numbers.append(f'<span class="faint">{_percent(hit.held)} of it in the highlighted part</span>')
    flags = f'<span class="flag">{html_text("; ".join(hit.flags))}</span>' if hit.flags else ""
    width = 100 * abs(hit.influence or 0.0) / largest if largest else 0.0
    bar = f'<span class="bar {hit.sign}" style="width:{width:.1f}%"></span>' if hit.influence else ""
    about = (
        f'<div class="top"><span class="faint">{hit.rank:g}</span>'
        f'<span class="name">{html_text(hit.document)}</span>{"".join(numbers)}{flags}'
        f'<span class="faint">chunk {hit.chunk}</span></div>{bar}{_passage(hit, query)}'
    )
    if not hit.picture:
        return f'<div class="hit">{about}</div>'
    name = f"input of {hit.document}, which {hit.sign} this"
    return f'<div class="hit pictured">{_thumb(hit.picture, name, hit.sign)}<div>{about}</div></div>'


def _thumb(picture: str, name: str, kind: str) -> str:
    return f'<img class="thumb {kind}" src="{html_text(picture)}" alt="{html_text(name)}">'


def _passage(hit: ShownHit, query: str) -> str:
    """The passage with what is around it; the whole chunk, if longer, unfolds."""
    start, stop = hit.span
    words = matching_spans(hit.text, query) if hit.whole or stop else []
    left, right = max(0, start - _CONTEXT), min(len(hit.text), stop + _CONTEXT)
    if hit.span == (0, 0):
        right = min(len(hit.text), 2 * _CONTEXT)
    whole = _marked(hit.text, 0, len(hit.text), hit.span, words)
    if left == 0 and right == len(hit.text):
        return f'<p class="text">{whole}</p>'
    part = _marked(hit.text, left, right, hit.span, words)
    part = ("…" if left else "") + part + ("…" if right < len(hit.text) else "")
    return (
        f'<p class="text">{part}</p><details class="chunk"><summary class="faint">the whole chunk</summary>'
        f'<p class="text">{whole}</p></details>'
    )


def _marked(text: str, left: int, right: int, span: tuple[int, int], words: Sequence[tuple[int, int]]) -> str:
    """Characters left … right of the text, with the span and the words marked."""

    def plain(begin: int, end: int) -> str:
        begin, end = max(begin, left), min(end, right)
        pieces, at = [], begin
        for first, last in words:
            first, last = max(first, begin), min(last, end)
            if first < last:
                pieces.append(f"{html_text(text[at:first])}<u>{html_text(text[first:last])}</u>")
                at = last
        return "".join(pieces) + html_text(text[at:end]) if begin < end else ""

    start, stop = span
    if start >= stop:
        return plain(left, right)
    return f"{plain(left, start)}<mark>{plain(start, stop)}</mark>{plain(stop, right)}"


def _plots(answer: ShownAnswer) -> str:
    parts = []
    if answer.responses is not None:
        parts.append(
            "<div><h3>What the subsets answered</h3>"
            '<p class="faint">Each dot is a subset: its measured response against what the recovery '
            f"explains of it.</p>{response_plot(answer.responses)}</div>"
        )
    if answer.concentration is not None:
        parts.append(
            '<div><h3>How concentrated the influence is</h3><p class="faint">Part of all influence that the '
            f"strongest chunks hold, of {answer.concentration.n_chunks:,}.</p>"
            f"{concentration_plot(answer.concentration)}</div>"
        )
    return f'<div class="two">{"".join(parts)}</div>' if parts else ""


def _unit(answers: Sequence[ShownAnswer]) -> str:
    """What influences are, in a sentence."""
    if all(answer.record.get("unit") == "nats" for answer in answers):
        together = any((answer.record.get("scale") or {}).get("link") == "ceiling" for answer in answers)
        return (
            "An influence is a forecast, in nats a token: how much the loss would rise had the model been "
            f"trained without the document{' alone; of several, shares add up and nats do not' * together}."
        )
    return "A score is an influence, 100 for the strongest shown: compare them within an answer."


def _certificate(answer: ShownAnswer) -> str:
    recovery, measurement = answer.record["recovery"], answer.record["measurement"]
    rows = [
        ("λ", f"{_number(recovery['lambda'])}, {_number(recovery['lambda_ratio'])} of λ_max"),
        ("non-zero chunks", f"{recovery['nonzeros']:,}"),
        ("duality gap", f"{_number(recovery['duality_gap'])}, relative {_number(recovery['relative_gap'])}"),
        ("R²", _number(recovery["r_squared"])),
        ("subsets", f"{measurement['subsets']:,}, {html_text(measurement['method'])} measurement"),
        ("coverage", _number(measurement["coverage"])),
    ]
    if read := answer.record.get("read"):
        rows.append(("read directly", f"{read:,} chunks, from their own gradients"))
    if answer.record.get("estimated"):
        rows.append(("others", "estimated from projections, shared pairs of tokens and subsets together"))
    if answer.record.get("redundancy"):
        rows.append(("said alike by many", f"shared out (--redundancy {answer.record['redundancy']:g})"))
    if recall := answer.record.get("recall"):
        rows.append(("strongest chunks read", found_of(recall)))
    if measurement["agreement"] is not None:
        rows.append(("linear against exact", f"r = {measurement['agreement']:.4f}"))
    shown = "".join(f"<dt>{key}</dt><dd>{row}</dd>" for key, row in rows)
    return f"<h3>Certificate of the recovery</h3><dl>{shown}</dl>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if value >= 0.0995 or value == 0 else f"{100 * value:.2g}%"
