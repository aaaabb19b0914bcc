"""Write findings as CSV, SARIF and sentences."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from stride_cli.audit.judge import EFFECT, LEAKED, NOTHING, PRESENT, Finding
from stride_cli.characters import cell, printable_json
from stride_cli.output import to_json
from stride_cli.version import __version__

SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    LEAKED: (
        "leaked",
        "error",
        "The item is in the corpus, perhaps in other words, and the model's loss and influences show it.",
    ),
    PRESENT: (
        "present",
        "warning",
        "The item is in the corpus, perhaps in other words, but no effect on the model was found.",
    ),
    EFFECT: ("effect", "warning", "The model treats the item unlike its controls, but no copy was found."),
}


def to_csv(findings: Sequence[Finding]) -> str:
    """Write a header and one row an item; nested keys are joined by a dot.

    For spreadsheets: a text that one would run as a formula begins with an apostrophe.
    """
    rows = [_flat(finding.to_record()) for finding in findings]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = cell(value) if isinstance(value, str) else value
    return found


def to_sarif(findings: Sequence[Finding]) -> str:
    """Write SARIF 2.1.0: one result for each item with a verdict other than "no evidence", at its line."""
    results = []
    for finding in findings:
        if finding.verdict == NOTHING:
            continue
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
        if finding.lexical["document"]:
            result["relatedLocations"] = [
                {
                    "logicalLocations": [{"name": finding.lexical["document"], "kind": "resource"}],
                    "message": {"text": finding.lexical["passage"]},
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


def sentence(finding: Finding) -> str:
    """Put one finding in words."""
    lexical, effect = finding.lexical, finding.effect
    found = f"Item '{finding.document.id}': {finding.verdict} (q = {finding.q:.3g})."
    if lexical["longest_run"]:
        found += (
            f" {lexical['ngram_share']:.0%} of its {lexical['ngram']}-grams are in the corpus; the longest "
            f"shared run is {lexical['longest_run']} tokens, in document '{lexical['document']}'."
        )
    if lexical["near"]:
        found += (
            f" In other words it is there, as in document '{lexical['contained_document']}': one chunk holds "
            f"{lexical['contained']:.0%} of its 3-grams."
        )
    found += f" Loss {effect['loss']:.3f} nats a token"
    if effect["base_loss"] is not None:
        found += f" ({effect['base_loss']:.3f} before the fine-tuning)"
    if effect["control_loss"] == effect["control_loss"]:
        found += f", controls {effect['control_loss']:.3f}"
    return found + f"; {effect['candidate_share']:.0%} of the influence comes from chunks like it."
