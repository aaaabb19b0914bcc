"""`stride query --file` and `stride audit` by several processes: the same answers, in order, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution import sharing
from stride_cli.attribution.options import SharingOptions
from stride_cli.attribution.sharing import in_parts, shared_out
from stride_cli.training import engines

SUBJECTS = ("war", "treaty", "king", "city", "revolution", "empire", "wall", "battle")


@given(st.integers(0, 40), st.integers(1, 5), st.randoms())
def test_answers_are_in_order_and_jobs_are_taken_as_they_are_needed(
    count: int, workers: int, random: Any
) -> None:
    taken: list[int] = []

    def jobs() -> Iterator[int]:
        for number in range(count):
            taken.append(number)
            yield number

    def engine(worker: Any, groups: Any, workers: int) -> Iterator[tuple[int, Any]]:
        """As many at once as there are workers, which end in any order."""
        running: list[int] = []
        given = 0
        while given < len(groups) or running:
            while given < len(groups) and len(running) < workers:
                running.append(given)
                given += 1
            number = running.pop(random.randrange(len(running)))
            yield number, [10 * job for job in groups[number]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "open_engine", lambda name: engine)
        found = []
        for answer in shared_out(None, jobs(), SharingOptions(workers=workers)):  # type: ignore[arg-type]
            found.append(answer)
            assert len(taken) <= len(found) + (1 + sharing._HELD) * sharing._AHEAD * workers + workers
    assert found == [10 * number for number in range(count)]


@given(st.integers(0, 20), st.integers(1, 7))
def test_parts_are_all_of_it(count: int, size: int) -> None:
    parts = list(in_parts(iter(range(count)), size))
    assert [each for part in parts for each in part] == list(range(count))
    assert all(len(part) == size for part in parts[:-1])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "prompt": f"The {name} began in"}) for name in SUBJECTS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def line(workspace: Path, prompts: Path) -> str:
    return f"query --file {prompts} --index {workspace}/run.stride --top 3 --read 10 --max-new-tokens 4"


def exact(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but seconds, which are each time others."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Influences to 1e-6 of the answer's largest, and so shares to 1e-6 of all; other numbers of what they
    are, but for the gap, which is what the solver left; all else exactly."""
    for answer, other in zip(exact(found), exact(expected), strict=True):
        largest = max((abs(hit["influence"]) for hit in other.get("hits", [])), default=1.0)
        _close(answer, other, 1e-6 * largest)


def _close(found: Any, expected: Any, least: float) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key not in ("duality_gap", "relative_gap"):
                inside = {"share": 1e-6, "hits": least, "influence": least}
                _close(found[key], value, inside.get(key, 1e-9))
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each, value in zip(found, expected, strict=True):
            _close(each, value, least)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-6, abs=least)
    else:
        assert found == expected


def test_shares_are_answered_as_all_together_are(
    run: Callable[..., Any], line: str, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process, one share after the other."""
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    alone = run(line)
    monkeypatch.setattr(engines, "open_engine", lambda name: here)
    shared = run(f"{line} --workers 2")
    assert shared.code == 0, shared.err
    same(shared.records, alone.records)


def here(worker: Any, groups: Any, workers: int | None) -> Any:
    return engines.run_local(worker, groups, 1)


@pytest.mark.slow
def test_workers_answer_as_one_process_does(
    run: Callable[..., Any], line: str, forked_spawners: Callable[[], list[int]], prompts: Path
) -> None:
    alone, two, three = run(line), *(run(f"{line} --workers {workers}") for workers in (2, 3))
    assert two.code == three.code == 0, two.err + three.err
    assert [record["id"] for record in two.records] == list(SUBJECTS)
    assert exact(two.records) == exact(three.records)  # the same shares, whoever has them
    same(two.records, alone.records)
    assert forked_spawners() == []
    # a bad one ends the command after those before it, or is recorded in its place
    lines = prompts.read_text().splitlines()
    lines[3] = "[1]"
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


def test_what_cannot_be_shared_is_refused(run: Callable[..., Any], workspace: Path, prompts: Path) -> None:
    place = f"--index {workspace}/run.stride"
    for wrong, said in (
        (f"query 'The' {place} --workers 2", "no file of prompts is given"),
        (f"query - {place} --workers 2", "no file of prompts is given"),
        (f"query --file {prompts} {place} --pool --workers 2", "--pool answers them as one"),
        (f"query --file {prompts} {place} --workers 0", "--workers is 0"),
        (f"query --file nothing.jsonl {place} --workers 2", "there is no file 'nothing.jsonl'"),
    ):
        result = run(wrong)
        assert result.code == 2 and said in result.err, result.err


def test_what_a_worker_raises_is_told(
    run: Callable[..., Any], line: str, workspace: Path, forked_spawners: Callable[[], list[int]]
) -> None:
    result = run(f"{line} --workers 2 --model {workspace}/nowhere")
    assert result.code == 2 and "nowhere" in result.err and "worker" not in result.err


@pytest.mark.slow
def test_an_audit_by_workers_is_that_of_one_process(
    run: Callable[..., Any], workspace: Path, tmp_path: Path, forked_spawners: Callable[[], list[int]]
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
    run: Callable[..., Any], line: str, forked_spawners: Callable[[], list[int]]
) -> None:
    alone = run(line)
    killed: list[int] = []

    def kill_one() -> None:
        while not (found := forked_spawners()):
            time.sleep(0.002)
        os.kill(found[0], signal.SIGKILL)
        killed.append(found[0])

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    shared = run(f"{line} --workers 2")
    killer.join(10)
    assert killed and shared.code == 0 and "a worker died (status -9)" in shared.err
    same(shared.records, alone.records)
    assert forked_spawners() == []


@pytest.mark.slow
def test_tasks_of_ray_answer_as_one_process_does(run: Callable[..., Any], line: str) -> None:
    pytest.importorskip("ray")
    alone, shared = run(line), run(f"{line} --engine ray --workers 2")
    assert shared.code == 0, shared.err
    same(shared.records, alone.records)
