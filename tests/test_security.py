"""SECURITY.md says what is: numbers as recorded, names as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import fuzz
from tests.fuzz import __main__ as command

ROOT = Path(__file__).parents[1]
RECORDS = "tests/benchmarks/results/fuzz.jsonl"


def test_tries_and_failures_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    (shown,) = re.findall(
        rf"<!-- python -m tests\.fuzz --table {RECORDS} -->\n(.*?)\n<!-- end -->", page, re.S
    )
    assert command.main(["--table", str(ROOT / RECORDS)]) == 0
    assert shown == capsys.readouterr().out.rstrip("\n"), "paste what the command in the comment prints"
    records = [json.loads(line) for line in (ROOT / RECORDS).read_text(encoding="utf-8").splitlines()]
    assert {record["target"] for record in records} >= set(fuzz.known_targets())
    assert all(len(record["failed"]) >= min(1, record["failures"]) for record in records)


def test_a_table_adds_up_the_runs_of_a_target() -> None:
    run = {"target": "b", "tries": 1200, "failures": 2, "crashes": 1, "seconds": 1800.0, "peak_bytes": 2e6}
    other = run | {"target": "a", "tries": 1, "failures": 0, "crashes": 0}
    lines = command.table(
        [run | {"slowest_seconds": each} for each in (1.0, 2.25)] + [other | {"slowest_seconds": 0}]
    )
    assert lines.splitlines()[2:] == [
        "| `a` | 1 | 1 | 0 | 0 | 0.50 | 0.0 s | 2 MB |",
        "| `b` | 2 | 2,400 | 4 | 2 | 1.00 | 2.2 s | 2 MB |",
    ]


def test_what_is_named_exists() -> None:
    from typer.main import get_command

    from stride_cli.commands.app import command_line

    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (ROOT / link).is_file(), link
    own = {"--table"}  # of tests.fuzz
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - own <= _options(get_command(command_line()))


def test_limits_are_those_of_the_code() -> None:
    from index_format import confined
    from stride_cli.corpus import streams

    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    assert f"expand more than {streams.MOST_EXPANSION:,} times" in text
    assert f"beyond their first {streams.UNWATCHED >> 20} MiB" in text
    assert f"for files of {confined._WORTH_BYTES >> 20} MiB or more" in text


def _options(node) -> set[str]:
    found = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for child in getattr(node, "commands", {}).values():
        found |= _options(child)
    return found
