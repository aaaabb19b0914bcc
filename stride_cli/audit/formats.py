"""Write findings as CSV, SARIF and sentences."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from stride_cli.audit.judge import LEAKED, NOTHING, PRESENT, UNDECIDED, VERDICTS, Finding
from stride_cli.characters import cell, printable, printable_json
from stride_cli.output import to_json
from stride_cli.version import __version__

SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    LEAKED: ("leaked", "error", "A document holds the item, and the model's loss shows that it was learnt."),
    PRESENT: ("present", "warning", "A document holds the item, but no effect on the model was found."),
    UNDECIDED: ("undecided", "warning", "No test could have told whether the item was learnt."),
}

_HELD = {
    "item": "whole",
    "prompt": "by its prompt alone",
    "response": "by its response alone",
    "part": "in part",
    "other words": "in other words",
}


def to_csv(findings: Sequence[Finding]) -> str:
    """Write a header and one row an item; nested keys are joined by a dot, a list is JSON.

    For spreadsheets: a text that one would run as a formula begins with an apostrophe, and what would steer a
    terminal is escaped.
    """

    def shown(value: Any) -> Any:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
        return cell(printable(text)) if isinstance(text, str) else text

    rows = []
    for finding in findings:
        record = finding.to_record().items()
        told = {name: each if isinstance(each, dict) else {"": each} for name, each in record}
        flat = {f"{name}.{key}".strip("."): own for name, each in told.items() for key, own in each.items()}
        rows.append({name: shown(own) for name, own in flat.items()})
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_sarif(findings: Sequence[Finding]) -> str:
    """Write SARIF 2.1.0: one result for each item with a verdict other than "no evidence", at its line."""
    results = []
    for finding in (each for each in findings if each.verdict != NOTHING):
        rule, level, _ = _RULES[finding.verdict]
        source = "stdin" if finding.document.source in ("", "-") else finding.document.source
        region = {"startLine": max(1, finding.document.line)}
        location = {"artifactLocation": {"uri": quote(source)}, "region": region}
        result: dict[str, Any] = {
            "ruleId": rule,
            "level": level,
            "message": {"text": sentence(finding)},
            "locations": [{"physicalLocation": location}],
            "partialFingerprints": {"item/v1": finding.document.id},
            "properties": finding.to_record(),
        }
        if finding.presence["document"]:
            result["relatedLocations"] = [
                {
                    "logicalLocations": [{"name": finding.presence["document"], "kind": "resource"}],
                    "message": {"text": finding.presence["passage"]},
                }
            ]
        results.append(result)
    driver = {
        "name": "stride audit",
        "version": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": text}} for rule, _, text in _RULES.values()],
    }
    run = {"tool": {"driver": driver}, "results": results}
    # through to_json: a number that is not finite is no JSON
    document = json.loads(to_json({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}))
    return printable_json(json.dumps(document, ensure_ascii=False, indent=1)) + "\n"


def summary(findings: Sequence[Finding]) -> list[str]:
    """Put an audit in words: how many items have each verdict, what the test could find, and what to add."""
    counts = Counter(finding.verdict for finding in findings)
    named = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICTS if counts[verdict])
    tested = [each for each in findings if each.q is not None] or findings
    used = max((each.controls for each in tested), key=lambda each: each["together"] or 0)
    kinds = {"file": "from a file", "absent": "the items that are not in the corpus"}
    kind = kinds.get(used["kind"], f"versions of {used['sources']:,} items")
    power = min(each.controls["power"] for each in tested)
    test = f"{used['count']:,} controls, {kind}: they find {power:.0%} of items whose loss was halved"
    if (together := used["together"] or 0) > 1:
        more = together * (used["count"] + 1) - 1
        test += f", where {together:,} or more are such; for a single one it takes {more:,} controls"
    reasons = Counter(finding.reason for finding in findings if finding.reason)
    there = Counter(finding.presence["found"] for finding in findings)
    held = ", ".join(f"{there[found]:,} {name}" for found, name in _HELD.items() if there[found])
    said = [f"{len(findings):,} items: {named}", f"in the corpus: {held or 'none'}", test]
    said += [f"undecided, {count:,}: {reason}" for reason, count in reasons.most_common()]
    if any("controls" in reason for reason in reasons):
        said.append("to decide more: --controls FILE, as many items as you can that cannot be in the corpus")
    return said


def sentence(finding: Finding) -> str:
    """Put one finding in words."""
    held, effect = finding.presence, finding.effect
    why = finding.reason or ("" if finding.q is None else f"q = {finding.q:.3g}")
    said = f"Item '{finding.document.id}': {finding.verdict}{f' ({why})' * bool(why)}."
    if held["found"]:
        said += f" Document '{held['document']}' holds it {_HELD[held['found']]}"
        said += f", and so do {held['documents'] - 1} more" if held["documents"] > 1 else ""
        said += f"; the longest run is {held['longest_run']} words."
    said += f" Loss {effect['loss']:.3f} nats a token"
    if effect["base_loss"] is not None:
        said += f" ({effect['base_loss']:.3f} before the fine-tuning)"
    if effect["control_loss"] is not None:
        said += f", controls {effect['control_loss']:.3f}"
    if finding.controls["like"] not in ("", "item", "versions"):  # put as the copy is
        said += f" ({finding.controls['like']})"
    if effect["influence_share"] is not None:
        said += f"; {effect['influence_share']:.0%} of the influence comes from such documents"
    return said + "."
