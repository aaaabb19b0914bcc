"""Put an answer's numbers in plain words: what they say, how far to trust them, what to beware of.

Everything here reads the answer's record (``stride.answer/1``), so that a saved answer is explained as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.frames import share_text

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer

STANDS_OUT = 0.1  # a document with this share of the total influence stands out …
_AHEAD = 3.0  # … if it has so many times the share of an average chunk in the solution
_FELLOW = 0.5  # documents with this part of the strongest one's share stand out beside it
_POOR_FIT = 0.5
_FEW_SUBSETS = 100
_CROWDED = 0.5  # non-zeros per subset from which a good fit is no evidence
_SURPRISING = 3.0  # nats a token: the model gave the response a probability of 5 % a token
_LISTED = 3

Record = Mapping[str, Any]


def explain(record: Record) -> str:
    """Say what to conclude, how far to trust it and what it cannot say; then what nobody should overlook."""
    said = [
        verdict(record),
        conclude(record),
        *caveats(record)[:2],
        nothing_listed(record),
        untrained(record),
    ]
    return " ".join(filter(None, said))


def conclude(record: Record) -> str:
    """Say which documents to look at, and what the list cannot say; "" where the verdict says all."""
    if record.get("verdict") in ("guessing", "weak"):
        return ""
    weighted = with_weight(record)
    if not weighted:
        return "Conclude nothing from this list: no document on it moved the response measurably."
    # what is no stronger than what unrelated prompts get is named only where it is all there is
    first = weighted[0]
    strong = (hit for hit in weighted if hit["share"] >= _FELLOW * first["share"])
    named = [hit for hit in strong if hit is first or hit.get("above_line") is not False]
    both = ((sign, [hit for hit in named if hit["sign"] == sign]) for sign in ("supports", "opposes"))
    signs = ((hits, sign if len(hits) == 1 else sign[:-1]) for sign, hits in both if hits)
    told = " and ".join(f"{_names(hits)}, which {sign} it" for hits, sign in signs)
    look = f"Look at {told} ({share_text(sum(hit['share'] for hit in named))} of all influence)."
    if not _prominent(record, first):
        look = (
            "Name no single source: the response comes from many documents, and the strongest shown, "
            f"{called(first)}, holds only {share_text(first['share'])} of all influence."
        )
    return (
        f"{look} This says what moved the model, not whether the response is true, nor whether it would be "
        "the same without (stride verify-hit)."
    )


def answer_record(answer: Answer, *, name: str | None, verbose: bool) -> dict[str, Any]:
    """Make the record that `stride query --json` prints, explained where it is to be `verbose`."""
    record = replace(answer, id=name).to_record()
    return record | {"explanation": explain(record)} if verbose else record


def nothing_listed(record: Record) -> str:
    """Say why no document is listed; "" where some are."""
    if record["hits"] or record["opposers"]:
        return ""
    why = "no document has an influence that is not zero"
    if record["measurement"]["subsets"] == 1:
        why = "the corpus has one chunk, and influences are told from other chunks'"
    elif record.get("asked") == 0 and _weights(record):
        why = "none was asked for (--top)"
    return f"Nothing is listed: {why}."


def untrained(record: Record) -> str:
    """Say that the model was not trained on this corpus; "" where it was, or nothing is known."""
    if (count := record.get("untrained")) is None:
        return ""
    which = f"{_count(count, 'document')} of this index" if count else "some documents of this index"
    return f"By its own record, the model was never trained on {which}."


def verdict(record: Record) -> str:
    """Say the verdict and why, or why there is none; "" of a classifier, which has none."""
    if (word := record.get("verdict")) is None:
        if any("label" in hit for hit in (*record["hits"], *record["opposers"])):
            return ""
        if record.get("comparison"):
            return "No verdict: a comparison is held against nothing; the documents are those that tipped it."
        if count := record.get("pooled"):
            return f"No verdict: unrelated prompts were asked one by one, and this is of {count:,} together."
        return "No verdict: this index is not calibrated, or has grown since (stride calibrate)."
    missing = ", ".join(repr(each) for each in record.get("missing") or ())
    lacking = f" No document above the line has {missing}." if missing else ""
    if word == "guessing":
        return (
            "Guessing: the model is no surer of this response than of what it says after unrelated prompts, "
            f"so that what is listed shaped its words, and is no source.{lacking}"
        )
    judged, first = record["judged"], next(map(called, record["hits"]), "a document")
    if word == "contested":
        names = {hit["document"]: called(hit) for hit in (*record["hits"], *record["opposers"])}
        other = names.get(judged["against"], judged["against"])
        return f"Contested: the model is torn between {first} and {other}: read both."
    if word == "weak":
        why = "but its strongest documents do not all have what the prompt is about"
        if judged.get("held"):
            why = "but hardly surer than of those to near misses, which the corpus says nothing about"
        return f"Weak: the model is sure of this response, {why}: name no source.{lacking}"
    above, nulls = sum(bool(hit.get("above_line")) for hit in record["hits"]), judged["nulls"]
    surer = round((1 - judged["surer"]) * (nulls + 1))
    beside = f"; {_count(above, 'document')} stand out" if above > 1 else ""
    return (
        f"Clear: the model is surer of this response than of those to {surer:,} of {nulls:,} unrelated "
        f"prompts, and the strongest document, {first}, has what the prompt is about{beside}."
    )


def asked(record: Record) -> str:
    """Say how much of the response is scored, how likely the model finds it, and how it was asked."""
    tokens, found = record["scored_tokens"], []
    if comparison := record.get("comparison"):
        found.append(_odds(comparison))
    else:
        if not any("label" in hit for hit in record["hits"]):
            found.append(_count(tokens, "scored token"))
        if (loss := record["loss"]) is not None:
            likely = "over 0.99" if loss < 0.01 else f"{math.exp(-loss):.2g}"
            found.append(f"probability {likely}{' a token' * (tokens != 1)}")
    if record.get("template") == "chat":
        found.append("asked in the chat template")
    if record.get("cut"):
        found.append("cut there: more by STRIDE_QUERY_MAX_NEW_TOKENS=40")
    return ", ".join(found)


def _odds(comparison: Record) -> str:
    """Say how likely the model finds what it said and what it is compared with, where the two part."""
    own, other = (
        f"{comparison[token]!r} {comparison[likely]:.2g}"
        for token, likely in (("token", "probability"), ("other_token", "other_probability"))
    )
    said = f"where they part: probability of {own}, of {other}"
    if comparison["probability"] < comparison["other_probability"]:
        said += " (the model would rather say that)"
    return said


def found_of(recall: Record) -> str:
    """Say how many of the strongest chunks were read."""
    top, least = recall["top"], recall["at_least"]
    if not least:
        return f"how many of the {top} strongest chunks were read cannot be told (more would be with --read)"
    which = f"at least {least} of the" if least < top else "all"
    return f"with {_percent(recall['confidence'])} confidence {which} {top} strongest chunks were read"


def caveats(record: Record) -> list[str]:
    """List what to beware of in this answer, the worst first, one sentence each."""
    recovery, measurement, loss = record["recovery"], record["measurement"], record["loss"]
    subsets, nonzeros, fit = measurement["subsets"], recovery["nonzeros"], recovery["r_squared"]
    coverage, recall, weighted = measurement["coverage"], record.get("recall"), with_weight(record)
    found = []
    if record["hits"] and not weighted:
        found.append("No document has any weight: what is listed is ranked by correlation alone.")
    # what is recovered matters where nothing better is known of the strongest chunks
    if not record.get("read") and not record.get("estimated"):
        if fit is not None and fit < _POOR_FIT:
            found.append(
                f"The influences explain only {share_text(fit)} of what the subsets answered (R²): most of "
                "the response comes from documents too weak to tell apart, or from noise."
            )
        if nonzeros > _CROWDED * subsets:
            found.append(
                f"{nonzeros:,} chunks share {subsets:,} measurements: with so many, a good fit is no "
                "evidence. A larger --lambda-ratio keeps fewer."
            )
        if subsets < _FEW_SUBSETS:
            found.append(f"Only {subsets:,} subsets were measured: chunks are told apart roughly.")
    if recall is not None and 2 * recall["at_least"] < recall["top"]:
        found.append(f"What was read may not be what matters most: {found_of(recall)}.")
    if weighted and not weighted[0]["seen"]:
        found.append(f"The operators never saw {called(weighted[0])}.")
    if hit := next((hit for hit in weighted if hit["neighbours"]), None):
        found.append(
            f"{called(hit)} cannot be told apart from {_count(hit['neighbours'], 'other chunk')} in "
            "nearly the same subsets: any of them may be the source."
        )
    if loss is not None and loss > _SURPRISING:
        found.append(
            f"The model itself finds this response unlikely (loss {loss:.1f} nats a token): no document may "
            "have taught it."
        )
    if coverage is not None and coverage < 1:
        seen = _percent(coverage, down=True)
        found.append(
            f"The operators have seen {seen} of the chunks; documents among the others may be missed."
        )
    return found


def flags(hit: Record) -> list[str]:
    """Say in words what is special about a hit."""
    found = []
    if hit.get("trained") is False:
        found.append("the model was never trained on it")
    if hit["backfilled"]:
        found.append("by correlation only")
    if hit.get("read") is False and not hit["backfilled"]:
        found.append("estimated, not read")
    if not hit["seen"]:
        found.append("never seen by the operators")
    if hit["neighbours"]:
        found.append(_count(hit["neighbours"], "indistinguishable chunk"))
    return found


def how_found(record: Record) -> str:
    """Say where the numbers come from: of what happened in this answer alone."""
    read, chunks, measurement = record.get("read") or 0, record.get("chunks"), record["measurement"]
    if scale := record.get("scale"):
        alone = " alone (of several shares add up, nats do not)" * (scale.get("link") == "ceiling")
        held = ", in brackets nine in ten retrainings" * bool(scale.get("band"))
        found = [f"nats: forecast rise of the loss without the document{alone}, a token{held}"]
    else:
        found = ["share of all influence, and influence: a number to compare within one answer"]
    if read and read == chunks:
        found.append(f"all {read:,} chunks read from their own gradients")
    else:
        subsets = f"{measurement['subsets']:,} subsets"
        others = f"recovered from {subsets}"
        if record.get("estimated"):
            others = f"estimated from projections, shared pairs of tokens and {subsets}"
        found.append(f"{read:,} chunks read from their own gradients, others {others}" if read else others)
        if recall := record.get("recall"):
            found.append(found_of(recall))
    if record.get("redundancy"):
        found.append("near-duplicates share credit")
    if record["recovery"].get("shrink_exponent", 1) != 1:
        found.append("small influences shrunk")
    if (coverage := measurement["coverage"]) is not None and coverage < 1:
        found.append(f"{_percent(coverage, down=True)} of the chunks seen")
    return "; ".join(found)


def fewer(record: Record) -> str:
    """Say that fewer documents support the response than were asked for; "" where they are as many."""
    count, asked = len(record["hits"]), record.get("asked") or 0
    return f"{count:,} of {asked:,} asked: no other document supports this" if 0 < count < asked else ""


def with_weight(record: Record) -> list[Record]:
    """List the hits that have a weight, of either sign, largest share first."""
    hits: Sequence[Record] = [*record["hits"], *record["opposers"]]
    return sorted(
        (hit for hit in hits if not hit["backfilled"] and hit["share"]), key=lambda hit: -hit["share"]
    )


def _prominent(record: Record, hit: Record) -> bool:
    """True where a document holds clearly more of the influence than the others."""
    even = 1 / max(1, _weights(record))
    # a solution of a few chunks gives each a large share, whatever they are: all of it is the finding then
    return bool(hit["share"] >= STANDS_OUT and (hit["share"] >= _AHEAD * even or even >= STANDS_OUT))


def _weights(record: Record) -> int:
    """Count the chunks with an influence of their own."""
    return int(record["recovery"].get("influences", record["recovery"]["nonzeros"]))


def called(hit: Record) -> str:
    """Name a hit's document: its title, or its id where it has none."""
    return str(hit.get("title", hit["document"]))


def _names(hits: Sequence[Record]) -> str:
    """List documents in words: the first few, and how many more."""
    names = [called(hit) for hit in hits[:_LISTED]]
    if len(hits) > _LISTED:
        return f"{', '.join(names)} and {len(hits) - _LISTED} more"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _percent(value: float, *, down: bool = False) -> str:
    """In percent; `down`: what is short of all never reads as 100%."""
    percent = 100 * value
    if down and percent < 100:
        return f"{min(percent, 99.9):.3g}%"
    return f"{percent:.0f}%" if percent >= 1 or percent == 0 else f"{percent:.1g}%"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
