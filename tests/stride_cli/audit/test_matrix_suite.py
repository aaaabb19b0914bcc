"""The matrix of leaks and look-alikes, on its words alone: every copy is found, and no look-alike."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stride_cli.audit.options import AuditOptions
from stride_cli.audit.presence import find_copies
from tests.stride_cli.audit.test_presence import stored

ROOT = Path(__file__).parents[3]
SUITES = ROOT / "examples" / "suites"
DATA = next((each / "shared/data" for each in ROOT.parents if (each / "shared/data").is_dir()), None)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SUITES))
    yield importlib.import_module("audit_matrix")
    for name in ("audit_matrix", "leaks_rules", "planted"):
        sys.modules.pop(name, None)


def parts(row: dict[str, Any]) -> list[str]:
    if "text" in row:
        return [row["text"]]
    turns = row.get("messages") or [{"content": row["prompt"]}, {"content": row["response"]}]
    return [turn["content"] for turn in turns]


@pytest.mark.skipif(DATA is None, reason="GSM8K is not there: ../shared/data")
@pytest.mark.parametrize(("corpus", "form"), [("text", "pairs"), ("pairs", "chats"), ("chats", "text")])
def test_copies_are_found_and_look_alikes_are_not(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, form: str
) -> None:
    made = [
        "--develop",
        "--learnt",
        "2",
        "--unseen",
        "1",
        "--alike",
        "15",
        "--absent",
        "30",
        "--others",
        "60",
    ]
    files = [str(DATA / f"gsm8k_{part}.jsonl.gz") for part in ("train", "test")] if DATA else []
    monkeypatch.setattr(sys, "argv", ["audit_matrix.py", "make", *files, "--out", str(tmp_path), *made])
    suite.main()

    def read(name: str) -> list[dict[str, Any]]:
        text = (tmp_path / corpus / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    texts = ["\n".join(parts(row)) for row in read("indexed")]
    copies = find_copies(*stored(texts), [parts(row) for row in read(form)], AuditOptions())
    found: dict[str, Counter[str]] = {}
    for kind, copy in zip(read("kinds"), copies, strict=True):
        state = "copy" if kind["state"] in ("learnt", "unseen") else kind["state"]
        found.setdefault(f"{state} {kind['copy']}".strip(), Counter())[copy.found] += 1
    for copy in suite.SAME_WORDS:
        assert found[f"copy {copy}"] == {"item": 3}, copy
    whole = form != "text"
    assert found["copy question"] == {"prompt" if whole else "part": 3}
    assert sum(found["copy answer"].values()) - found["copy answer"][""] == 3
    assert found["copy reworded"][""] == 0
    alike = sum((found[f"look-alike {copy}"] for copy in suite.LOOK_ALIKES), Counter())
    assert alike[""] >= 44 and found["absent"] == {"": 30}
    # plain 8-grams of words miss what is set otherwise, at as many false positives
    shares = suite.overlaps(read("indexed"), read("pairs"), 8)
    kinds = read("kinds")
    line = max(
        share for share, kind in zip(shares, kinds, strict=True) if kind["state"] in ("look-alike", "absent")
    )
    missed = Counter(
        kind["copy"]
        for share, kind in zip(shares, kinds, strict=True)
        if kind["copy"] in suite.COPIES and share <= line
    )
    assert missed["forms"] == 3 and missed["verbatim"] == 0
