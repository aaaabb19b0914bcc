"""Draw answers as one HTML file: a gallery of queries without network or server, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stride_cli.attribution.frames import influence_text, share_text
from stride_cli.characters import html_text, shortened
from stride_cli.report.contents import ShownAnswer, ShownHit, matching_spans
from stride_cli.report.drawing import about_page, asset, html_page, verdict_style
from stride_cli.report.explanation import (
    asked,
    called,
    caveats,
    conclude,
    fewer,
    flags,
    how_found,
    nothing_listed,
    untrained,
    verdict,
)
from stride_cli.report.plots import response_plot
from stride_cli.schema.answer_records import PASSAGE, sections

_OPEN = 3  # so many queries of a gallery are shown unfolded
_CONTEXT = 240  # characters shown on either side of a passage; the rest of the chunk unfolds


def render_report(
    answers: Sequence[ShownAnswer], *, title: str, about: Sequence[tuple[str, str]] = ()
) -> str:
    """Write the page as text.

    Parameters
    ----------
    answers : one or more
    title : str      for the head of the page
    about : of `drawing.provenance`
    """
    queries = f"{len(answers):,} " + ("query" if len(answers) == 1 else "queries")
    parts = [
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
        *([_contents(answers)] if len(answers) > 1 else []),
        *(_card(number, answer) for number, answer in enumerate(answers, 1)),
        about_page(about),
    ]
    script = asset("filter.js") + asset("fold.js")
    style = asset("answers.css") + asset("report.css") + verdict_style()
    return html_page(html_text(title), parts, style=style, script=script)


def _legend(answers: Sequence[ShownAnswer]) -> str:
    parts = []
    if any(scored for answer in answers for _, scored in answer.pieces):
        parts.append(
            '<span class="token">Marked words</span> are those that this prompt decides; they count most.'
        )
    hits = [hit for answer in answers for hit in (*answer.supporters, *answer.opposers)]
    measured = [hit.held is not None for hit in hits if hit.span[1]]
    if any(measured):
        parts.append(
            "<mark>Highlighted</mark> is the sentence that carries more of a chunk’s influence than any "
            "other: its tokens have most in common with the query’s gradient."
        )
    elif measured:  # of saved answers, which do not tell
        own = "the sentence of a chunk most like the query" if any(hit.whole for hit in hits) else PASSAGE
        parts.append(f"<mark>Highlighted</mark> is {own}.")
    if measured:
        parts.append('<span class="text"><u>Words</u></span> are shared with the query.')
    return " ".join(parts)


def _contents(answers: Sequence[ShownAnswer]) -> str:
    """Tell what was asked, what the model said, and what may be concluded, a row a query."""
    judged = any(answer.record.get("verdict") for answer in answers)
    names = ["query", "the model said", *(["verdict"] if judged else []), "strongest document", "share"]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for number, answer in enumerate(answers, 1):
        named = [hit for _, hits, quiet in sections(answer.record) if not quiet for hit in hits]
        hit = max(named, key=lambda each: each["share"], default=None)
        prompt = shortened(answer.record["prompt"].strip() or "…", 70)
        said = shortened(answer.record["response"].strip() or "…", 70)
        strongest = "–" if hit is None else html_text(shortened(called(hit), 40))
        if hit is not None and hit["sign"] == "opposes":
            strongest += " (opposes)"
        cells = [f'<a href="#q{number}">{html_text(prompt)}</a>', html_text(said)]
        word = answer.record.get("verdict") or "–"
        cells += [f'<span class="verdict {word}">{word}</span>'] if judged else []
        cells += [strongest, "–" if hit is None else share_text(hit["share"])]
        row = "".join(
            f"<td{f' data-name={chr(34)}{name}{chr(34)}' if place else ''}>{cell}</td>"
            for place, (name, cell) in enumerate(zip(names, cells, strict=True))
        )
        rows.append(f'<tr data-for="q{number}">{row}</tr>')
    return f'<h2>Overview</h2><div class="wide"><table class="contents">{"".join(rows)}</table></div>'


def _card(number: int, answer: ShownAnswer) -> str:
    record = answer.record
    sourced = any(hits and not quiet for _, hits, quiet in sections(record)[:1])  # else nothing is marked
    response = "".join(
        f'<span class="token">{html_text(piece)}</span>' if scored and sourced else html_text(piece)
        for piece, scored in answer.pieces
    )
    origin = "the model’s own continuation" if record["generated"] else "a given response"
    if answer.picture or any("label" in hit for hit in record["hits"]):
        origin = "the model’s own prediction" if record["generated"] else "a given class"
    about = f"{origin}, {html_text(asked(record))}"
    if "id" in record:
        about = f"{html_text(str(record['id']))}: {about}"
    response += "…" * bool(record.get("cut"))
    if record.get("comparison"):
        response += f'</b><br><span class="faint">rather than</span> <b>{html_text(record["instead"])}'
    listed = "".join(f"<li>{html_text(caveat)}</li>" for caveat in caveats(record))
    return "\n".join(
        [
            f'<article class="card" id="q{number}"><details{" open" if number <= _OPEN else ""}>',
            f'<summary><h2 class="said">{html_text(record["prompt"])}<b>{response}</b></h2>'
            f'<br><span class="faint">{about}</span></summary><div>',
            _thumb(answer.picture, "the query’s input", "") if answer.picture else "",
            _judged(record),
            _hits(answer),
            "<details><summary>How far to trust this, and how it was measured</summary>",
            f'<p>{html_text(conclude(record))}</p><p class="faint">{html_text(how_found(record))}.</p>',
            f'<ul class="caveats">{listed}</ul>' if listed else "",
            _plot(answer),
            _certificate(answer),
            "</details>",
            "</div></details></article>",
        ]
    )


def _judged(record: Mapping[str, Any]) -> str:
    """Say what may be concluded, in the verdict's colour; then what nobody should overlook."""
    word, said = record.get("verdict") or "", verdict(record)
    head = f'<span class="verdict {word}">{word.capitalize()}</span>: ' if word else ""
    first = f'<p class="judged {word}">{head}{html_text(said.removeprefix(f"{word.capitalize()}: "))}</p>'
    beside = filter(None, [nothing_listed(record), untrained(record)])
    return "".join([first * bool(said), *(f'<p class="flag">{html_text(each)}</p>' for each in beside)])


def _hits(answer: ShownAnswer) -> str:
    """Show the documents under their headings; those that are no stronger than noise are folded."""
    record, parts = answer.record, []
    shown = {id(hit.record): hit for hit in (*answer.supporters, *answer.opposers)}
    for heading, hits, quiet in sections(record):
        title = heading[0].upper() + heading[1:]
        listed = "\n".join(_hit(shown[id(hit)], answer, quiet) for hit in hits)
        if quiet:
            parts.append(f'<details class="quiet"><summary>{title} ({len(hits)})</summary>{listed}</details>')
        else:
            parts.append(f"<h3>{title}</h3>{listed}")
    said = fewer(record)
    return "\n".join([*parts, f'<p class="faint">{html_text(said)}.</p>' * bool(said)])


def _hit(hit: ShownHit, answer: ShownAnswer, quiet: bool) -> str:
    """Show a document; without numbers and bar where it is `quiet`."""
    record, found = answer.record, hit.record
    document, influence, sign = html_text(found["document"]), found["influence"], found["sign"]
    query = f"{record['prompt']} {record['response']}"
    numbers, bar = [], ""
    if influence and not quiet:
        numbers.append(f"influence {influence_text(found, record.get('unit'))}")
        bar = (
            f'<span class="share"><span class="meter"><span class="bar {sign}" style="width:'
            f'{100 * found["share"]:.1f}%"></span></span>{share_text(found["share"])}</span>'
        )
        if hit.held is not None:
            numbers.append(f"{share_text(hit.held)} of it in the highlighted part")
    numbers.append(f"chunk {found['chunk']}")
    if special := "; ".join(flags(found)):
        numbers.append(f'<span class="flag">{html_text(special)}</span>')
    folder, _, name = document.rpartition("/")
    folder = f'<span class="faint">{folder}/</span>' if folder else ""
    if "title" in found:
        folder, name = "", f'{html_text(found["title"])} <span class="id">{document}</span>'
    about = (
        f'<div class="top"><span class="rank">{found["rank"]:g}</span>'
        f'<span class="name">{folder}{name}</span>{bar}</div>{_passage(hit, query)}'
        f'<div class="top faint">{"".join(f"<span>{each}</span>" for each in numbers)}</div>'
    )
    if not hit.picture:
        return f'<div class="hit">{about}</div>'
    picture = _thumb(hit.picture, f"input of {found['document']}, which {sign} this", "" if quiet else sign)
    return f'<div class="hit pictured">{picture}<div>{about}</div></div>'


def _thumb(picture: str, name: str, kind: str) -> str:
    return f'<img class="thumb {kind}" src="{html_text(picture)}" alt="{html_text(name)}">'


def _passage(hit: ShownHit, query: str) -> str:
    """Show the passage with what is around it; the whole chunk, if longer, unfolds."""
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
    """Show characters left … right of the text, with the span and the words marked."""

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


def _plot(answer: ShownAnswer) -> str:
    if answer.responses is None:
        return ""
    return (
        '<h3>What the subsets answered</h3><p class="faint">Each dot is a subset: its measured response '
        f"against what the recovery explains of it.</p>{response_plot(*answer.responses)}"
    )


def _unit(answers: Sequence[ShownAnswer]) -> str:
    """Say in a sentence what influences are."""
    if all(answer.record.get("unit") == "nats" for answer in answers):
        together = any((answer.record.get("scale") or {}).get("link") == "ceiling" for answer in answers)
        return (
            "An influence is a forecast, in nats a token: how much the loss would rise had the model been "
            f"trained without the document{' alone; of several, shares add up and nats do not' * together}."
        )
    return "An influence is a number without a unit: compare it within an answer."


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
    shown = "".join(f"<dt>{key}</dt><dd>{row}</dd>" for key, row in rows)
    return f"<h3>Certificate of the recovery</h3><dl>{shown}</dl>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
