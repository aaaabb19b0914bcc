"""`stride query --file`, `audit`, `select` and `evaluate causes` by several processes: the same answers, in
order, whoever dies. `evaluate lds` and `compare`, which need retrained models, are in test_evaluate.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stride_cli.commands.conftest import one_is_killed

SUBJECTS = ("war", "treaty", "king", "city", "revolution", "empire", "wall", "battle")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "prompt": f"The {name} began in"}) for name in SUBJECTS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def line(workspace: Path, prompts: Path) -> str:
    return f"query --file {prompts} --index {workspace}/run.stride --top 3 --read 10"


def exact(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but seconds, which are each time others."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Influences that were read to 3e-5 of the answer's largest; those that were estimated, and shares, in
    which they are, to 2e-3, since they are by a query's numbers in three bits, of which rounding turns one or
    the other over, as in what is shared out of those that were read, and λ, of what estimates leave, to 2e-6.
    Other numbers of what they are, but for the gap, which is what the solver left; all else exactly."""
    for answer, other in zip(exact(found), exact(expected), strict=True):
        largest = max((abs(hit["influence"]) for hit in other.get("hits", [])), default=1.0)
        _close(answer, other, 1e-6 * largest)


def _close(found: Any, expected: Any, least: float) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key not in ("duality_gap", "relative_gap"):
                estimated = 2e3 if expected.get("read") is False else 30.0
                inside = {"share": 2e-3, "hits": least, "influence": estimated * least, "lambda": 2e-6}
                _close(found[key], value, inside.get(key, 1e-9))
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each, value in zip(found, expected, strict=True):
            _close(each, value, least)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=least)
    else:
        assert found == expected


@pytest.mark.usefixtures("workers_here")
def test_shares_are_answered_as_all_together_are(run: Callable[..., Any], line: str, prompts: Path) -> None:
    """By this process, one share after the other."""
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    alone = run(line)
    shared = run(f"{line} --workers 2")
    assert shared.code == 0, shared.err
    same(shared.records, alone.records)


@pytest.mark.slow
def test_workers_answer_as_one_process_does(
    run: Callable[..., Any], line: str, living_workers: Callable[[], list[int]], prompts: Path
) -> None:
    alone, two, three = run(line), *(run(f"{line} --workers {workers}") for workers in (2, 3))
    assert two.code == three.code == 0, two.err + three.err
    assert [record["id"] for record in two.records] == list(SUBJECTS)
    assert exact(two.records) == exact(three.records)  # the same shares, whoever has them
    same(two.records, alone.records)
    assert living_workers() == []
    # a bad one ends the command after those before it, or is recorded in its place
    lines = prompts.read_text().splitlines()
    lines[3] = "{}"
    lines[6] = json.dumps({"prompt": "word " * 600})
    prompts.write_text("\n".join(lines))
    stopped = run(f"{line} --workers 2")
    assert stopped.code == 2 and [record["id"] for record in stopped.records] == list(SUBJECTS[:3])
    recorded = run(f"{line} --workers 2 --on-bad record")
    kinds = [record["schema"].split("/")[0].split(".")[1] for record in recorded.records]
    assert kinds == ["answer"] * 3 + ["bad_input"] + ["answer"] * 2 + ["bad_input", "answer"]
    assert recorded.code == 2 and [record["line"] for record in recorded.records if "line" in record] == [
        4,
        7,
    ]


@pytest.mark.slow
def test_an_audit_by_workers_is_that_of_one_process(
    run: Callable[..., Any], workspace: Path, tmp_path: Path, living_workers: Callable[[], list[int]]
) -> None:
    corpus = [json.loads(each) for each in (workspace / "corpus.jsonl").read_text().splitlines()]
    items = [{"id": f"in/{n}", "text": corpus[n]["text"][:300]} for n in range(20)]
    items += [
        {"id": f"out/{n}", "text": f"Report {n}: a storm closed the {word}."}
        for n, word in enumerate(SUBJECTS)
    ]
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text("".join(json.dumps(item) + "\n" for item in items))
    asked = f"audit {benchmark} --index {workspace}/run.stride"
    alone, shared = run(asked), run(f"{asked} --workers 2")
    assert alone.code == shared.code == 0, shared.err
    same(shared.records, alone.records)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_share_alone(
    run: Callable[..., Any], line: str, living_workers: Callable[[], list[int]]
) -> None:
    alone = run(line)
    with one_is_killed(living_workers):
        shared = run(f"{line} --workers 2")
    assert shared.code == 0 and "a worker was killed" in shared.err
    same(shared.records, alone.records)
    assert living_workers() == []


@pytest.fixture
def task(workspace: Path, tmp_path: Path) -> Path:
    """Queries that are beginnings of documents, which are their causes."""
    rows = []
    for number, line in enumerate((workspace / "corpus.jsonl").read_text().splitlines()[:7]):
        document = json.loads(line)
        words = document["text"].split()
        rows.append({"id": f"q{number}", "prompt": " ".join(words[:6]), "response": " ".join(words[6:12])})
        rows[-1] |= {"causes": [document["id"]], "task": f"t{number % 2}"}
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def selected(run: Callable[..., Any], line: str, out: Path) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """The command's outcome, and the lines of the files that it wrote."""
    outcome = run(f"{line} --out {out}")
    assert outcome.code == 0, outcome.err
    files = {path.stem: path.read_text().splitlines() for path in sorted(out.glob("*.jsonl"))}
    return outcome, {name: [json.loads(each) for each in found] for name, found in files.items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stride"])
def test_workers_select_as_one_process_does(
    run: Callable[..., Any],
    workspace: Path,
    task: Path,
    tmp_path: Path,
    living_workers: Callable[[], list[int]],
    method: str,
) -> None:
    line = f"select {task} --index {workspace}/run.stride --size 8 --method {method}"
    _, alone = selected(run, line, tmp_path / "alone")
    _, two = selected(run, f"{line} --workers 2", tmp_path / "two")
    with one_is_killed(living_workers):
        outcome, killed = selected(run, f"{line} --workers 3", tmp_path / "three")
    assert "a worker was killed" in outcome.err
    assert sorted(alone) == ["bm25", "chosen", "random"]
    for found in (two, killed):
        for name, documents in alone.items():
            _close(found[name], documents, 1e-6)
    assert living_workers() == []
