"""An answer's numbers in plain words: what they say, how far to trust them, what to beware of.

Everything here reads the answer's record (``stride.answer/1``), so that a saved answer is explained as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STANDS_OUT = 0.1  # a document with this share of the total influence stands out …
_AHEAD = 3.0  # … if it has so many times the share of an average chunk in the solution
_FELLOW = 0.5  # documents with this part of the strongest one's share stand out beside it
_POOR_FIT = 0.5
_FEW_SUBSETS = 100
_CROWDED = 0.5  # non-zeros per subset from which a good fit is no evidence
_AGREES = 0.99
_SURPRISING = 3.0  # nats a token: the model gave the response a probability of 5 % a token
_LISTED = 3
BELOW_THE_LINE = "below: no stronger, for its loss, than what unrelated prompts get"
NO_VERDICT = "No verdict: this index is not calibrated (stride calibrate)."
_NOT_COMPARED = "No verdict: a comparison is held against nothing; the documents are those that tipped it."
_NOT_POOLED = "No verdict: unrelated prompts were asked one by one, and this is of {count:,} together."


def explain(record: Mapping[str, Any]) -> str:
    """Two sentences: which documents to look at and what to make of them; how far to trust that, and what it
    cannot say.

    Parameters
    ----------
    record : a ``stride.answer/1`` record
    """
    word = record.get("verdict")
    if word in ("guessing", "weak"):
        return (_of_a_guess if word == "guessing" else _of_a_weak_one)(record)
    found, shown = _looked_at(record), _supporters(record)
    if word == "clear":
        return f"Clear: {found}. {_what_is_sure(record, shown)}"
    return f"{found[0].upper()}{found[1:]}. {_what_is_not_known(record)}"


def verdict(record: Mapping[str, Any]) -> str:
    """One sentence: clear, weak or guessing, and why; "" where the index is not calibrated."""
    word = record.get("verdict")
    if word is None:
        return ""
    if word == "guessing":
        return (
            "Guessing: the model is no surer of this response than of what it says after unrelated prompts, "
            "so that what is listed shaped its words, and is no source."
        )
    if word == "weak":
        return (
            "Weak: the model is sure of this response, but no document is stronger, for its loss, than those "
            "that unrelated prompts get: single none of them out."
        )
    above = sum(bool(hit.get("above_line")) for hit in record["hits"])
    which = f"{_count(above, 'document')} shown" if above else "its strongest document"
    others = _percent(1 - record["judged"]["beyond"])
    return (
        f"Clear: the model is surer of this response than of {others} of those to unrelated prompts, and "
        f"{which} moved it more, for its loss, than any moved {others} of theirs."
    )


def no_verdict(record: Mapping[str, Any]) -> str:
    """Why an answer has no verdict, in a sentence."""
    if record.get("comparison"):
        return _NOT_COMPARED
    if pooled := record.get("pooled"):
        return _NOT_POOLED.format(count=pooled)
    return NO_VERDICT


def odds(comparison: Mapping[str, Any]) -> str:
    """How likely the model finds what it said and what it is compared with, where the two part."""
    own, other = (
        f"{comparison[token]!r} {comparison[likely]:.2g}"
        for token, likely in (("token", "probability"), ("other_token", "other_probability"))
    )
    said = f"where they part: probability of {own}, of {other}"
    if comparison["probability"] < comparison["other_probability"]:
        said += " (the model would rather say that)"
    return said


def found_of(recall: Mapping[str, Any]) -> str:
    """What is known of the strongest chunks: that they were read."""
    top, least = recall["top"], recall["at_least"]
    if not least:
        return f"how many of the {top} strongest chunks were read cannot be told (more would be with --read)"
    which = f"at least {least} of the" if least < top else "all"
    return f"with {_percent(recall['confidence'])} confidence {which} {top} strongest chunks were read"


def caveats(record: Mapping[str, Any]) -> list[str]:
    """What a reader should beware of in this answer, one sentence each; empty where there is nothing."""
    recovery, measurement = record["recovery"], record["measurement"]
    weighted = _weighted(record)
    found = []
    if not record["hits"] and record["recovery"]["nonzeros"]:
        pass  # nothing can be said of what is not listed
    elif not weighted:
        found.append("No document has any weight: what is listed is ranked by correlation alone.")
    elif not stands_out(record):
        found.append(
            f"Nothing stands out: no document shown holds more than {_percent(_largest(weighted))} of the "
            "influence. The model may be putting the response together from many documents, or making it up."
        )
    # what is recovered matters where nothing better is known of the strongest chunks
    estimated = bool(record.get("estimated"))
    read, fit = bool(record.get("read")) or estimated, recovery["r_squared"]
    if not read and fit is not None and fit < _POOR_FIT:
        found.append(
            f"The influences explain only {_percent(fit)} of what the subsets answered (R²): most of the "
            "response comes from documents too weak to tell apart, or from noise."
        )
    subsets, nonzeros = measurement["subsets"], recovery["nonzeros"]
    if not read and nonzeros > _CROWDED * subsets:
        found.append(
            f"{nonzeros:,} chunks share {subsets:,} measurements: with so many, a good fit is no evidence. A "
            "larger --lambda-ratio keeps fewer."
        )
    recall = record.get("recall")
    if recall is not None and 2 * recall["at_least"] < recall["top"]:
        found.append(f"What was read may not be what matters most: {found_of(recall)}.")
    if not read and subsets < _FEW_SUBSETS:
        found.append(
            f"Only {subsets:,} subsets were measured: chunks are told apart roughly, and weak influences are "
            "uncertain."
        )
    coverage = measurement["coverage"]
    if coverage is not None and coverage < 1:
        found.append(
            f"The operators have seen {_percent(coverage, down=True)} of the chunks; documents among the "
            "others may be missed."
        )
    agreement = measurement["agreement"]
    if agreement is not None and agreement < _AGREES:
        found.append(
            f"Linear and exact measurement agree only at r = {agreement:.2f}: the model does not respond "
            "linearly here; try query.measure: exact in stride.yaml."
        )
    if record["loss"] is not None and record["loss"] > _SURPRISING:
        found.append(
            f"The model itself finds this response unlikely (loss {record['loss']:.1f} nats a token): no "
            "document may have taught it."
        )
    alike = [hit for hit in weighted if hit["neighbours"]]
    if alike:
        others = _count(alike[0]["neighbours"], "other chunk")
        found.append(
            f"{alike[0]['document']} cannot be told apart from {others} in nearly the same subsets: any of "
            "them may be the source."
        )
    return found


def estimated_from(record: Mapping[str, Any], subsets: int, tell: bool) -> str:
    """What chunks that were not read count with.

    Parameters
    ----------
    subsets : of all models
    tell : whether they are enough to say anything of so many chunks: `recovery.conditioning.tell`
    """
    if record.get("estimated"):
        found = "estimated from projections and shared pairs of tokens"
        if tell:
            found = f"estimated from projections, shared pairs of tokens and {subsets:,} subsets"
        return f"{found}; what many say alike is shared out" if record.get("redundancy") else found
    return f"recovered from {subsets:,} subsets"


def flags(hit: Mapping[str, Any]) -> list[str]:
    """What is special about a hit, in words."""
    found = []
    if hit["backfilled"]:
        found.append("by correlation only")
    if hit.get("read") is False and not hit["backfilled"]:
        found.append("estimated, not read")
    if not hit["seen"]:
        found.append("never seen by the operators")
    if hit["neighbours"]:
        found.append(_count(hit["neighbours"], "indistinguishable chunk"))
    return found


def stands_out(record: Mapping[str, Any]) -> bool:
    """Whether some document of the answer holds clearly more of the influence than its fellows."""
    weighted = _weighted(record)
    return bool(weighted) and _prominent(record, weighted[0])


def line_at(above: Sequence[bool | None]) -> int | None:
    """Before which of the supporters the line lies, that those below are no stronger than what unrelated
    prompts get; None where all are above it, where there is none, or where their order is not by influence.

    Parameters
    ----------
    above : of the supporters, in order, whether they are above the line; None: not known
    """
    if None in above or False not in above:
        return None
    first = above.index(False)
    return None if any(above[first:]) else first


def score(value: float, largest: float, record: Mapping[str, Any]) -> str:
    """An influence as it is shown: in nats where they have been calibrated, else 100 for the strongest shown.

    Parameters
    ----------
    value, largest : float     in the record's unit; `largest` > 0 unless all are 0
    """
    if record.get("unit") == "nats":
        return f"{value:+.3g} nats"
    return f"score {100 * value / largest if largest else 0.0:+.0f}"


def what_scores_are(record: Mapping[str, Any]) -> str:
    """One clause on the numbers beside documents."""
    if scale := record.get("scale"):
        linear = scale.get("link", "linear") == "linear"
        error = scale["error"] / scale["slope" if linear else "ceiling"]
        alone = "" if linear else " alone (of several shares add up, nats do not)"
        return f"nats: forecast rise of the loss without the document{alone}, a token, ± {error:.0%}"
    return "score: influence, 100 for the strongest shown"


def _of_a_guess(record: Mapping[str, Any]) -> str:
    first = next(iter(_supporters(record)), None)
    shaped = "The documents listed" if first is None else f"The documents listed, {first['document']} first,"
    return (
        "Guessing: do not take this response for something that the corpus says: the model is no surer "
        f"of it than of what it says to unrelated prompts. {shaped} shaped its words, and are no source; "
        "whether the corpus says anything on this, only a search of it can tell."
    )


def _of_a_weak_one(record: Mapping[str, Any]) -> str:
    first = next(iter(_supporters(record)), None)
    which = "no document" if first is None else f"no document, not even {first['document']},"
    return (
        f"Weak: name no source, for the model is sure of this response, but {which} stands out from what "
        "unrelated prompts get. It may come from many documents together, or from what the model was trained "
        "on before; a document that you suspect can be tested (stride verify-hit --documents)."
    )


def _looked_at(record: Mapping[str, Any]) -> str:
    """Which documents to look at, as a clause."""
    weighted = _weighted(record)
    if record["recovery"]["nonzeros"] and not record["hits"] and not record["opposers"]:
        return "conclude nothing yet, for no document is listed (--top says how many are)"
    if not weighted:
        if record["recovery"]["nonzeros"]:
            return "conclude nothing from this list, for none of its documents has any weight: others have"
        return "conclude nothing from this list, for no document moved this response measurably"
    first = weighted[0]
    if not record["hits"] and not _prominent(record, first):
        return (
            "conclude nothing yet, for no document that supports the response is listed (--top says how many)"
        )
    if not _prominent(record, first):
        return (
            "name no single source, for the response comes from many documents: the strongest shown, "
            f"{first['document']}, holds only {_percent(first['share'])} of all influence"
        )
    prominent = [hit for hit in weighted if hit["share"] >= _FELLOW * first["share"]]
    support = [hit for hit in prominent if hit["sign"] == "supports"]
    oppose = [hit for hit in prominent if hit["sign"] == "opposes"]
    held = _percent(sum(hit["share"] for hit in prominent))
    if support and oppose:
        one_way, other_way = (_names(hits) for hits in (support, oppose))
        return (
            f"compare {one_way}, which {_verb('support', support)} this response, with {other_way}, which "
            f"{_verb('oppose', oppose)} it: they pull the model in opposite directions ({held} of all "
            "influence together)"
        )
    if oppose:
        seen = (
            f", of which {_names(supporters[:1])} is the first" if (supporters := _supporters(record)) else ""
        )
        return (
            f"look at what speaks against this response, {_names(oppose)} ({held} of all influence): the "
            f"model says it in spite of {'that' if len(oppose) == 1 else 'those'}, by what supports it{seen}"
        )
    if len(support) == 1:
        others = [hit for hit in weighted[1:] if hit["sign"] == "supports"]
        beside = "" if not others else f"; the next, {others[0]['document']}, {_percent(others[0]['share'])}"
        return (
            f"look at {first['document']}, which moved the model towards this response more than any other "
            f"document ({held} of all influence{beside})"
        )
    return (
        f"look at {_names(support)} together, for no one of these {len(support)} documents did it alone "
        f"({held} of all influence)"
    )


def _what_is_sure(record: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> str:
    """How far to trust a clear answer, and what it cannot say, as a sentence."""
    doubts = _doubts(record) if shown else []
    beyond = (
        "it says what taught the model, not whether the response is true, nor whether it would be the same "
        "without (stride verify-hit)"
    )
    if doubts:
        return f"Read before you rely on it, as {_joined(doubts)}; {beyond}."
    return f"Trust this as far as one can without retraining: {beyond}."


def _what_is_not_known(record: Mapping[str, Any]) -> str:
    """How far to trust an answer that has no verdict, as a sentence."""
    rows = any("label" in hit for hit in (*record["hits"], *record["opposers"]))
    doubts = _doubts(record) if _weighted(record) else []
    doubt = f", and {_joined(doubts)}" if doubts else ""
    if rows:
        return (
            f"Take that for a hint{doubt}: whether the prediction depends on these rows, only retraining "
            "without them tells (stride verify-hit)."
        )
    if record.get("comparison") or record.get("pooled"):
        asked = "a comparison" if record.get("comparison") else "prompts that are answered as one"
        return (
            f"Take that for a hint{doubt}: no unrelated prompts were asked that {asked} could be held "
            "against; whether it depends on these documents, only retraining without them tells (stride "
            "verify-hit)."
        )
    return (
        f"Take that for a hint{doubt}: as this index is not calibrated (stride calibrate), nothing here "
        "tells an answer from a guess."
    )


def _doubts(record: Mapping[str, Any]) -> list[str]:
    """Reasons to be careful, as clauses; the worst first, two at most."""
    recovery, measurement = record["recovery"], record["measurement"]
    estimated = bool(record.get("estimated"))
    read, fit = bool(record.get("read")) or estimated, recovery["r_squared"]
    first = _weighted(record)[0]
    found = []
    if not read and (fit is None or fit < _POOR_FIT):
        found.append("most of what was measured is left unexplained")
    if not read and recovery["nonzeros"] > _CROWDED * measurement["subsets"]:
        found.append("too many chunks share what was measured")
    if measurement["agreement"] is not None and measurement["agreement"] < _AGREES:
        found.append("exact measurement does not agree")
    if not first["seen"]:
        found.append(f"the operators never saw {first['document']}")
    if first["neighbours"]:
        found.append(
            f"{first['document']} cannot be told apart from {_count(first['neighbours'], 'other chunk')}"
        )
    if record["loss"] is not None and record["loss"] > _SURPRISING:
        found.append("the model itself finds the response unlikely")
    if measurement["coverage"] is not None and measurement["coverage"] < 1:
        found.append(f"only {_percent(measurement['coverage'], down=True)} of the corpus was seen")
    if not read and measurement["subsets"] < _FEW_SUBSETS:
        found.append("so few subsets tell weak influences apart poorly")
    return found[:2]


def _supporters(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The supporters that have a weight, largest share first."""
    return [hit for hit in _weighted(record) if hit["sign"] == "supports"]


def _names(hits: Sequence[Mapping[str, Any]]) -> str:
    """Documents as a list in words: the first few, and how many more."""
    names = [str(hit["document"]) for hit in hits[:_LISTED]]
    if len(hits) > _LISTED:
        return f"{', '.join(names)} and {len(hits) - _LISTED} more"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _verb(verb: str, hits: Sequence[Mapping[str, Any]]) -> str:
    return verb + ("s" if len(hits) == 1 else "")


def _weighted(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The hits that have a weight, of either sign, largest share first."""
    hits: Sequence[Mapping[str, Any]] = [*record["hits"], *record["opposers"]]
    return sorted(
        (hit for hit in hits if not hit["backfilled"] and hit["share"]), key=lambda hit: -hit["share"]
    )


def _prominent(record: Mapping[str, Any], hit: Mapping[str, Any]) -> bool:
    even = 1 / max(1, record["recovery"]["nonzeros"])
    # a solution of a few chunks gives each a large share, whatever they are: all of it is the finding then
    return bool(hit["share"] >= STANDS_OUT and (hit["share"] >= _AHEAD * even or even >= STANDS_OUT))


def _largest(weighted: Sequence[Mapping[str, Any]]) -> float:
    return float(weighted[0]["share"])


def _percent(value: float, *, down: bool = False) -> str:
    """In percent; `down`: what is short of all never reads as 100%."""
    percent = 100 * value
    if down and percent < 100:
        return f"{min(percent, 99.9):.3g}%"
    return f"{percent:.0f}%" if percent >= 1 or percent == 0 else f"{percent:.1g}%"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _joined(clauses: Sequence[str]) -> str:
    return " and ".join(clauses)
