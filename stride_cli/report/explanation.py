"""Put an answer's numbers in plain words: what they say, how far to trust them, what to beware of.

Everything here reads the answer's record (``stride.answer/1``), so that a saved answer is explained as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    said = [verdict(record)]
    if record.get("verdict") not in ("guessing", "weak"):
        looked = _looked_at(record)
        said.append(f"{looked[0].upper()}{looked[1:]}.")
        if with_weight(record):
            if doubts := [clause for clause, _ in _weaknesses(record) if clause][:2]:
                said.append(f"Read before you rely on it, as {' and '.join(doubts)}.")
            said.append(
                "This says what moved the model, not whether the response is true, nor whether it would be "
                "the same without (stride verify-hit)."
            )
    return " ".join(filter(None, [*said, nothing_listed(record), untrained(record)]))


def answer_record(answer: Answer, *, name: str | None, verbose: bool) -> dict[str, Any]:
    """Make the record that `stride query --json` prints, explained where it is to be `verbose`."""
    named = replace(answer, id=name)
    record = named.to_record()
    return replace(named, explanation=explain(record)).to_record() if verbose else record


def nothing_listed(record: Record) -> str:
    """Say why no document is listed; "" where some are."""
    if record["hits"] or record["opposers"]:
        return ""
    if record["measurement"]["subsets"] == 1:
        return "Nothing is listed: the corpus has one chunk, and influences are told from other chunks'."
    return "Nothing is listed: no document has an influence that is not zero."


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
        return "No verdict: this index is not calibrated (stride calibrate)."
    missing = ", ".join(repr(each) for each in record.get("missing") or ())
    lacking = f" No document above the line has {missing}." if missing else ""
    if word == "guessing":
        return (
            "Guessing: the model is no surer of this response than of what it says after unrelated prompts, "
            f"so that what is listed shaped its words, and is no source.{lacking}"
        )
    judged, first = record["judged"], next((hit["document"] for hit in record["hits"]), "a document")
    if word == "contested":
        return f"Contested: the model is torn between {first} and {judged['against']}: read both."
    if word == "weak":
        why = "but the strongest document does not have what the prompt is about"
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
    """List what to beware of in this answer, one sentence each; empty where there is nothing."""
    weighted, found = with_weight(record), list[str]()
    if record["recovery"]["nonzeros"] and not record["hits"]:
        pass  # nothing can be said of what is not listed
    elif not weighted:
        found.append("No document has any weight: what is listed is ranked by correlation alone.")
    elif not _prominent(record, weighted[0]):
        found.append(
            f"Nothing stands out: no document shown holds more than {_percent(weighted[0]['share'])} of the "
            "influence. The model may be putting the response together from many documents, or making it up."
        )
    return [*found, *(sentence for _, sentence in _weaknesses(record) if sentence)]


def _weaknesses(record: Record) -> list[tuple[str, str]]:
    """List reasons to be careful, the worst first: each as a clause, and as a sentence; "" for none."""
    recovery, measurement, loss = record["recovery"], record["measurement"], record["loss"]
    subsets, nonzeros, fit = measurement["subsets"], recovery["nonzeros"], recovery["r_squared"]
    coverage, recall = measurement["coverage"], record.get("recall")
    # what is recovered matters where nothing better is known of the strongest chunks
    recovered = not record.get("read") and not record.get("estimated")
    weighted = with_weight(record)
    found: list[tuple[str, str]] = []
    if recovered and (fit is None or fit < _POOR_FIT):
        sentence = (
            f"The influences explain only {_percent(fit or 0.0)} of what the subsets answered (R²): most of "
            "the response comes from documents too weak to tell apart, or from noise."
        )
        found.append(("most of what was measured is left unexplained", "" if fit is None else sentence))
    if recovered and nonzeros > _CROWDED * subsets:
        sentence = (
            f"{nonzeros:,} chunks share {subsets:,} measurements: with so many, a good fit is no evidence. A "
            "larger --lambda-ratio keeps fewer."
        )
        found.append(("too many chunks share what was measured", sentence))
    if recall is not None and 2 * recall["at_least"] < recall["top"]:
        found.append(("", f"What was read may not be what matters most: {found_of(recall)}."))
    if weighted and not weighted[0]["seen"]:
        found.append((f"the operators never saw {weighted[0]['document']}", ""))
    if hit := next((hit for hit in weighted if hit["neighbours"]), None):
        clause = f"{hit['document']} cannot be told apart from {_count(hit['neighbours'], 'other chunk')}"
        sentence = f"{clause} in nearly the same subsets: any of them may be the source."
        found.append((clause if hit is weighted[0] else "", sentence))
    if loss is not None and loss > _SURPRISING:
        sentence = (
            f"The model itself finds this response unlikely (loss {loss:.1f} nats a token): no document may "
            "have taught it."
        )
        found.append(("the model itself finds the response unlikely", sentence))
    if coverage is not None and coverage < 1:
        seen = _percent(coverage, down=True)
        sentence = f"The operators have seen {seen} of the chunks; documents among the others may be missed."
        found.append((f"only {seen} of the corpus was seen", sentence))
    if recovered and subsets < _FEW_SUBSETS:
        sentence = f"Only {subsets:,} subsets were measured: chunks are told apart roughly."
        found.append(("so few subsets tell weak influences apart poorly", sentence))
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


def _looked_at(record: Record) -> str:
    """Say as a clause which documents to look at."""
    weighted, supporters = with_weight(record), [hit for hit in _supporters(record) if not _below(hit)]
    some = bool(_weights(record))  # have a weight, whether they are listed or not
    if some and not record["hits"] and not record["opposers"]:
        return "conclude nothing yet, for no document is listed (--top says how many are)"
    if not weighted:
        why = "none of its documents has any weight: others have"
        why = why if some else "no document moved this response measurably"
        return f"conclude nothing from this list, for {why}"
    first = weighted[0]
    if not _prominent(record, first):
        if not record["hits"]:
            return (
                "conclude nothing yet, for no document that supports the response is listed (--top says how "
                "many)"
            )
        return (
            "name no single source, for the response comes from many documents: the strongest shown, "
            f"{first['document']}, holds only {_percent(first['share'])} of all influence"
        )
    prominent = [hit for hit in weighted if hit["share"] >= _FELLOW * first["share"]]
    # what is no stronger than what unrelated prompts get is named only where it is all there is
    prominent = [hit for hit in prominent if hit is first or not _below(hit)]
    support = [hit for hit in prominent if hit["sign"] == "supports"]
    oppose = [hit for hit in prominent if hit["sign"] == "opposes"]
    held = f"{_percent(sum(hit['share'] for hit in prominent))} of all influence"
    if support and oppose:
        return (
            f"compare {_names(support)}, which support{'s' * (len(support) == 1)} this response, with "
            f"{_names(oppose)}, which oppose{'s' * (len(oppose) == 1)} it: they pull the model in opposite "
            f"directions ({held} together)"
        )
    if oppose:
        seen = f", of which {_names(supporters[:1])} is the first" if supporters else ""
        return (
            f"look at what speaks against this response, {_names(oppose)} ({held}): the model says it in "
            f"spite of {'that' if len(oppose) == 1 else 'those'}, by what supports it{seen}"
        )
    if len(support) > 1:
        return (
            f"look at {_names(support)} together, for no one of these {len(support)} documents did it alone "
            f"({held})"
        )
    rest = [hit for hit in supporters if hit is not first][:1]
    following = "".join(f"; the next, {hit['document']}, {_percent(hit['share'])}" for hit in rest)
    return (
        f"look at {first['document']}, which by our estimate moved the model towards this response more than "
        f"any other document ({held}{following})"
    )


def _supporters(record: Record) -> list[Record]:
    """List the supporters that have a weight, largest share first."""
    return [hit for hit in with_weight(record) if hit["sign"] == "supports"]


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


def _below(hit: Record) -> bool:
    """True where a document supports, and is not above the line."""
    return hit["sign"] == "supports" and hit.get("above_line") is False


def _names(hits: Sequence[Record]) -> str:
    """List documents in words: the first few, and how many more."""
    names = [str(hit["document"]) for hit in hits[:_LISTED]]
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
