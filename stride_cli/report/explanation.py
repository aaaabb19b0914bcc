"""An answer's numbers in plain words: what they say, how far to trust them, what to beware of.

Everything here reads the answer's record (``stride.answer/1``), so that a saved answer is explained as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stride_cli.characters import power_of_ten

STANDS_OUT = 0.1  # a document with this share of the total influence stands out …
_AHEAD = 3.0  # … if it has so many times the share of an average chunk in the solution
_FELLOW = 0.5  # documents with this part of the strongest one's share stand out beside it
_GOOD_FIT, _POOR_FIT = 0.8, 0.5
_FEW_SUBSETS = 100
# of queries of known truth the mean LDS was .30, .39-.51, .55-.63 and .78 in these ranges of the reliability
_UNRELIABLE, _FAIR, _RELIABLE = 0.4, 0.6, 0.8
_CROWDED = 0.5  # non-zeros per subset from which a good fit is no evidence
_AGREES = 0.99
_SURPRISING = 3.0  # nats a token: the model gave the response a probability of 5 % a token
_LISTED = 3
BELOW_THE_LINE = "below: no stronger than what unrelated prompts get"


def explain(record: Mapping[str, Any]) -> str:
    """Two sentences: what to conclude from an answer, and which documents it names.

    Of an index that is not calibrated, which says less: what the numbers say, and how far to trust them.

    Parameters
    ----------
    record : a ``stride.answer/1`` record
    """
    if record.get("verdict") is None:
        return f"{_finding(record)} {_with_opinion(record, _trust(record))}"
    return f"{verdict(record)} {_finding(record) if record['verdict'] == 'clear' else _strongest(record)}"


def verdict(record: Mapping[str, Any]) -> str:
    """One sentence: clear, weak or guessing, and what that means; "" where the index is not calibrated."""
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
            "Weak: the model is sure of this response, but no document is stronger than those that unrelated "
            "prompts get: single none of them out."
        )
    above = sum(bool(hit.get("above_line")) for hit in record["hits"])
    which = f"{_count(above, 'document')} shown" if above else "its strongest document"
    others = _percent(1 - record["judged"]["beyond"])
    return (
        f"Clear: the model is surer of this response than of {others} of those to unrelated prompts, and "
        f"{which} moved it more than any moved {others} of theirs."
    )


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
    if not weighted:
        found.append("No document has any weight: what is listed is ranked by correlation alone.")
    elif not stands_out(record):
        found.append(
            f"Nothing stands out: no document shown holds more than {_percent(_largest(weighted))} of the "
            "influence. The model may be putting the response together from many documents, or making it up."
        )
    # what is recovered matters where nothing better is known of the strongest chunks
    read, fit = bool(record.get("read")), recovery["r_squared"]
    if not read and fit is not None and fit < _POOR_FIT:
        found.append(
            f"The influences explain only {_percent(fit)} of what the subsets answered (R²): most of the "
            "response comes from documents too weak to tell apart, or from noise."
        )
    reliability = record.get("reliability")
    if reliability is not None and reliability < _UNRELIABLE:
        found.append(
            "Recovered from half of the subsets, the influences predict what the other half answered only at "
            f"r = {reliability:.2f}: expect little of them, whatever R² says."
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
            "linearly here; try --measure exact."
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


def flags(hit: Mapping[str, Any]) -> list[str]:
    """What is special about a hit, in words."""
    found = []
    if hit["backfilled"]:
        found.append("by correlation only")
    if hit.get("read") is False and not hit["backfilled"]:
        found.append("recovered, not read")
    if not hit["seen"]:
        found.append("never seen by the operators")
    if hit["neighbours"]:
        found.append(_count(hit["neighbours"], "indistinguishable chunk"))
    if hit.get("prior") and not hit["influence"] and not hit["backfilled"]:
        found.append("by overlap only")
    return found


def stands_out(record: Mapping[str, Any]) -> bool:
    """Whether some document of the answer holds clearly more of the influence than its fellows."""
    weighted = _weighted(record)
    return bool(weighted) and _prominent(record, weighted[0])


def _strongest(record: Mapping[str, Any]) -> str:
    """The strongest document, without a word on what that means."""
    weighted = _weighted(record)
    if not weighted:
        return _finding(record)
    held = _percent(_largest(weighted))
    return f"The strongest shown, {weighted[0]['document']}, holds {held} of all influence."


def _finding(record: Mapping[str, Any]) -> str:
    weighted = _weighted(record)
    spread = _count(record["recovery"]["nonzeros"], "chunk")
    if not weighted:
        if record["recovery"]["nonzeros"]:
            return f"None of the documents shown has any weight on this response; {spread} do."
        return "No document moves this response measurably: none got any weight."
    first = weighted[0]
    if not _prominent(record, first):
        return (
            f"No document stands out for this response: the strongest shown, {first['document']}, holds only "
            f"{_percent(first['share'])} of an influence that is spread over {spread}."
        )
    prominent = [hit for hit in weighted if hit["share"] >= _FELLOW * first["share"]]
    verb = {"supports": "supports", "opposes": "opposes"}[first["sign"]]
    size = f"{_percent(first['share'])} of all influence"
    if len(prominent) == 1:
        sentence = f"One document stands out: {first['document']} {verb} this response with {size}"
        if len(weighted) > 1:
            sentence += f", the next holds {_percent(weighted[1]['share'])}"
        return sentence + "."
    together = sum(hit["share"] for hit in prominent)
    names = ", ".join(
        hit["document"] + (" (opposing)" if hit["sign"] == "opposes" else "") for hit in prominent[:_LISTED]
    )
    more = f" and {len(prominent) - _LISTED} more" if len(prominent) > _LISTED else ""
    return (
        f"{len(prominent)} documents stand out, {names}{more}: together they hold {_percent(together)} of "
        "all influence on this response."
    )


def _trust(record: Mapping[str, Any]) -> str:
    recovery, measurement = record["recovery"], record["measurement"]
    fit, weighted = recovery["r_squared"], _weighted(record)
    subsets = f"{measurement['subsets']:,} subsets"
    if not weighted:
        return (
            f"Do not read anything into the order of the documents: {subsets} were measured, and what they "
            "answered singles none of these out."
        )
    explained = "an unknown part" if fit is None else _percent(fit)
    doubts = _doubts(record)
    reason = f"the influences explain {explained} of what {subsets} answered"
    if fit is None or fit < _POOR_FIT:
        return f"Trust it little: {reason}" + (f", and {_joined(doubts)}." if doubts else ".")
    # where it is known, how well halves of the subsets predict each other says more than a good fit does
    reliability = record.get("reliability")
    if reliability is not None and reliability < _UNRELIABLE:
        return f"Trust it little: {reason}, which is no evidence here."
    if doubts:
        return f"Trust it with care: {reason}, but {_joined(doubts)}."
    if reliability is not None and reliability < _FAIR:
        return f"Trust it with care: {reason}, which says little by itself."
    if fit < _GOOD_FIT or (reliability is not None and reliability < _RELIABLE):
        return f"Trust the order of the strongest, not the exact numbers: {reason}."
    if not stands_out(record):
        return f"The numbers hold together, but as hints only, so even is the spread: {reason}."
    return (
        f"The numbers hold together, but so do those of answers to nonsense: {reason}, and the sparse "
        f"solution is the best one to within {_gap(recovery['relative_gap'])}."
    )


def _with_opinion(record: Mapping[str, Any], sentence: str) -> str:
    """The sentence with one more clause, where halves of the subsets gave second opinions."""
    reliability = record.get("reliability")
    if reliability is None:
        return sentence
    clause = f"half of the subsets predict what the others answered at r = {reliability:.2f}"
    weighted = _weighted(record)
    if weighted and weighted[0].get("stability") is not None:
        kept = _percent(weighted[0]["stability"])
        clause += f", and {weighted[0]['document']} stays on the list in {kept} of such halves"
    return f"{sentence.removesuffix('.')}; {clause}."


def _doubts(record: Mapping[str, Any]) -> list[str]:
    """Reasons to be careful, as clauses; the worst first, two at most."""
    recovery, measurement = record["recovery"], record["measurement"]
    first = _weighted(record)[0]
    found = []
    if recovery["nonzeros"] > _CROWDED * measurement["subsets"]:
        found.append(f"with {recovery['nonzeros']:,} chunks to fit them, that is no evidence")
    if measurement["agreement"] is not None and measurement["agreement"] < _AGREES:
        found.append(f"exact measurement agrees only at r = {measurement['agreement']:.2f}")
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
    if measurement["subsets"] < _FEW_SUBSETS:
        found.append("so few subsets tell weak influences apart poorly")
    return found[:2]


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


def _gap(value: float | None) -> str:
    if value is None:
        return "an unknown part"
    digits, _, power = f"{max(value, 0.0):.0e}".partition("e")
    return f"{digits}×{power_of_ten(int(power))}" if value > 0 else "rounding"


def _joined(clauses: Sequence[str]) -> str:
    return " and ".join(clauses)
