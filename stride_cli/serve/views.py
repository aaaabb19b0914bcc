"""Records of one answer's tokens and documents, and files of it."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import QueryOptions
from stride_cli.attribution.passages import WORD, carried_parts, response_pieces, words
from stride_cli.output import to_json
from stride_cli.report.answers import CsvTable

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.schema.serve_records import (
        DocumentChunkRecord,
        DocumentRecord,
        PassagesRecord,
        PieceRecord,
        TokensRecord,
    )
    from stride_cli.serve.indexes import ServedIndex

FORMATS = {"html": "text/html", "csv": "text/csv", "json": "application/json"}
_SHOWN_CHUNKS = 16  # of one document, whose carrying sentences are looked for
_REPORTED = ("top", "bottom", "read", "lambda_ratio", "chat")  # options that `stride report` has


def passages_record(index: ServedIndex, prompt: Mapping[str, str], options: QueryOptions) -> PassagesRecord:
    """Find the sentences that carry the influence of an answer's hits, as the whole answer has them."""
    begun = time.perf_counter()
    answer = index.answer(prompt, options, carried=True)
    return {
        "schema": "stride.passages/1",
        "index": index.name,
        "prompt": answer.query.prompt,
        "response": answer.query.response,
        "passages": [
            {
                "document": answer.document_ids[hit.document],
                "chunk": hit.chunk,
                "passage": answer.passages.get(hit.chunk, ""),
            }
            for hit in (*answer.supporters, *answer.opposers)
        ],
        "seconds": time.perf_counter() - begun,
    }


def tokens_record(index: ServedIndex, prompt: Mapping[str, str], options: QueryOptions) -> TokensRecord:
    """Find the influences on every scored token of an answer.

    Raises
    ------
    UsageError      they cannot be read with these operators
    """
    from stride_cli.attribution.by_token import token_influences
    from stride_cli.attribution.passages import likest_passages

    begun = time.perf_counter()
    answer, session = index.answer(prompt, options), index.session()
    found = token_influences(session, answer)
    # tokens' parts add up to the whole: in nats only where nats do
    slope = None if answer.scale is None else answer.scale.slope
    factor = 1.0 if slope is None else slope
    passages = likest_passages(session.workspace, answer.query, found.strongest.tolist())
    # the response, cut at its tokens; those that are scored have a row each
    rows = {int(place): row for row, place in enumerate(found.positions)}
    pieces: list[PieceRecord] = [
        {"text": text, "row": None if place is None else rows.get(place)}
        for text, place in response_pieces(session.model.tokenizer, answer.query)
    ]
    return {
        "schema": "stride.tokens/1",
        "index": index.name,
        "prompt": answer.query.prompt,
        "response": answer.query.response,
        "pieces": pieces,
        "documents": [session.index.document_id(int(number)) for number in found.documents],
        "titles": [session.index.document_title(int(number)) for number in found.documents],
        "trained": [number not in (session.never_trained or ()) for number in found.documents.tolist()],
        "passages": [passages[chunk] for chunk in found.strongest.tolist()],
        "influence": (factor * found.values).tolist(),
        "whole": (factor * found.whole).tolist(),
        "losses": found.losses.tolist(),
        "unit": "relative" if slope is None else "nats",
        "chunks": len(found.chunks),
        "seconds": time.perf_counter() - begun,
    }


def document_record(
    index: ServedIndex, document: str, prompt: Mapping[str, str], options: QueryOptions
) -> DocumentRecord:
    """Show a whole document beside an answer: what they share, and what of it moves that.

    Parameters
    ----------
    document : its id
    prompt, options : of the answer
    """
    session, (number,) = index.session(), index.numbers([document])
    chunks = list(session.index.document_chunks(number))
    answer, decode = index.answer(prompt, options), session.model.tokenizer.decode
    solution = answer.solution
    weights = dict.fromkeys(chunks, solution.average)
    listed = np.isin(solution.indices, chunks)
    weights |= zip(solution.indices[listed].tolist(), solution.values[listed].tolist(), strict=True)
    # the sentences that carry the influence, of the strongest chunks
    looked = sorted(chunks, key=lambda chunk: -abs(weights[chunk]))[:_SHOWN_CHUNKS]
    wanted = {chunk: weights[chunk] >= 0 for chunk in looked}
    parts = carried_parts(session.steered[0], session.workspace, answer.query, answer.responses, wanted)
    held = {chunk: part for chunk, part in parts.items() if part.held is not None}
    shown: list[DocumentChunkRecord] = [
        {
            "chunk": chunk,
            "text": str(decode(session.index.chunk_tokens(chunk), skip_special_tokens=True)),
            "influence": answer.in_unit(weights[chunk]),
            "carries": list(held[chunk].span) if chunk in held else None,
            "held": held[chunk].held if chunk in held else None,
        }
        for chunk in chunks
    ]
    stored = session.index.document_text(number)
    text = "".join(each["text"] for each in shown) if stored is None else stored
    runs = verbatim_runs(text, f"{answer.query.prompt} {answer.query.response}")
    return {
        "schema": "stride.document/1",
        "index": index.name,
        "document": document,
        "text": text,
        "stored": stored is not None,
        "overlaps": [{"start": start, "stop": stop, "words": n} for start, stop, n in runs],
        "chunks": shown,
        "influence": answer.in_unit(sum(weights.values())),
    }


def exported(index: ServedIndex, prompt: Mapping[str, str], options: QueryOptions, form: str) -> str:
    """Write an answer as a file: "html" (as `stride report` does), "csv" (as `stride query`) or "json"."""
    answer = index.answer(prompt, options, carried=True)
    if form == "html":
        from stride_cli.report.contents import from_answer
        from stride_cli.report.drawing import provenance
        from stride_cli.report.page import render_report

        contents, session = from_answer(index.session(), answer), index.session()
        about = provenance(session.index, _again(index, answer, prompt, options))
        return render_report([contents], title=f"Attribution: {index.name}", about=about)
    record: Any = answer.to_record()
    if form == "json":
        return to_json(record) + "\n"
    written = io.StringIO()
    CsvTable(written).add(record)
    return written.getvalue()


def _again(index: ServedIndex, answer: Answer, prompt: Mapping[str, str], options: QueryOptions) -> list[str]:
    """Give the words of the command that makes a page again; none where `stride report` cannot ask so."""
    told: dict[str, Any] = {name: getattr(options, name) for name in _REPORTED}
    of_page: dict[str, Any] = {"verbose": options.verbose, "passages": options.passages}
    if {"span", "instead"} & {*prompt} or options != QueryOptions(**told, **of_page):
        return []
    again = ["stride", "report", answer.query.prompt]
    again += [f"--response={answer.query.response}"] if "response" in prompt else []
    again += [f"--{'no-' * (not chat)}chat"] if (chat := told.pop("chat")) is not None else []
    told |= {"index": index.session().index.path, "model": index.place.model.place}
    flags = ((f"--{name.replace('_', '-')}", str(told[name])) for name in told if told[name] is not None)
    return [*again, *chain.from_iterable(flags)]


_COMMON = (
    "a an and are as at be been but by can for from had has have he her his in into is it its not of on or "
    "she that the their there they this to was were which who will with"
)
_PARTICLES = frozenset(words(_COMMON))


def verbatim_runs(text: str, asked: str) -> list[tuple[int, int, int]]:
    """Find the longest runs of words of `text` that also stand in `asked`, in the same order.

    Case and what is between words do not count. A run is one of two words or more, one of them at least
    no mere particle, or a single word of five letters or more, or a number.

    Parameters
    ----------
    text : of a document
    asked : prompt and response

    Returns
    -------
    list of (start, stop, words) of `text`: characters, and how many words; ascending, none in another
    """
    wanted = words(asked)
    found = [(match.group().lower(), *match.span()) for match in WORD.finditer(text)]
    document = [word for word, _, _ in found]
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(document):
        # the longest run that begins here; what overlaps it is cut off it
        starts = [place for place, word in enumerate(wanted) if word == document[at]]
        rest = document[at : at + len(wanted)]
        pairs = [zip(rest, wanted[place:], strict=False) for place in starts]  # as far as both go
        length = max((len([*takewhile(lambda pair: pair[0] == pair[1], both)]) for both in pairs), default=0)
        if _tells(document[at : at + length]):
            runs.append((found[at][1], found[at + length - 1][2], length))
            at += length
        else:
            at += 1
    return runs


def _tells(run: list[str]) -> bool:
    if len(run) >= 2:
        return not _PARTICLES.issuperset(run)
    return any(len(word) >= 5 or word.isdigit() for word in run if word not in _PARTICLES)
