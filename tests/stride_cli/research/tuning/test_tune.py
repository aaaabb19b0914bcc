"""`stride tune` on a real small classifier: further training, trials, the choice, stride.yaml."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.config import resolve
from stride_cli.data.batches import ChunkReader
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import UsageError
from stride_cli.models.spec import ModelSpec
from stride_cli.research.evaluation.metrics import correlate
from stride_cli.research.evaluation.scoring import run_method
from stride_cli.research.methods.lexical import shared_pairs
from stride_cli.research.tuning.responses import WithheldChunks, random_halves, withheld_queries
from stride_cli.research.tuning.search import DIMENSIONS, Target, run_trial
from stride_cli.research.tuning.written_settings import write_settings
from stride_cli.schema import json_schema
from tests.tiny_chunks import MemoryIndex


@pytest.fixture
def index(digits: Path, tmp_path: Path) -> Path:
    shutil.copytree(digits / "run.stride", tmp_path / "run.stride")
    return tmp_path / "run.stride"


def where(index: Path) -> WorkspacePath:
    return WorkspacePath(index, ModelSpec(device="cpu", dtype="fp32"))


def test_withheld_chunks_leave_no_trace_in_operators(index: Path) -> None:
    """The gates of subsets that hold a withheld chunk are those of the same subsets without it."""
    task = where(index).open()
    queries, rows = withheld_queries(task, 20)
    chunks = WithheldChunks(task.index, rows)
    assert len(queries) == 20 and chunks.scored_tokens() == task.chunks.scored_tokens() - 20
    assert not chunks.batch(rows).weights.any() and chunks.batch(np.setdiff1d(range(200), rows)).weights.any()
    masks = random_halves(task, rows, 6)
    assert not masks[:, rows].any() and set(masks.sum(axis=1)) == {90}
    assert (random_halves(task, rows, 3) == masks[:3]).all()
    with pytest.raises(UsageError, match=r"--held-out is 51, and the index has 200 .* 1 to 50"):
        withheld_queries(task, 51)


@pytest.mark.parametrize("masked", [False, True])
def test_scored_tokens_are_those_of_all_chunks(masked: bool) -> None:
    found: Any = MemoryIndex(40, masked=masked)
    whole, rest = ChunkReader(found), WithheldChunks(found, np.array([3, 20]))
    for chunks in (whole, rest):
        assert chunks.scored_tokens() == sum(chunks.chunk(row)[1].sum() for row in range(40))
    asked = QuerySet(*zip(whole.chunk(3), strict=True), ["chunk 3"])
    pairs = [shared_pairs(asked, chunks, int(whole.tokens.max()) + 1)[0] for chunks in (whole, rest)]
    assert pairs[0][3] > 0 and not pairs[1][[3, 20]].any()


def test_trials_are_scored_as_queries_are_answered(index: Path) -> None:
    """By the pipeline's defaults, with estimates and reads: as any comparison of methods runs `stride`."""
    task = where(index).open()
    queries, rows = withheld_queries(task, 20)
    masks = random_halves(task, rows, 8)
    measured = np.random.default_rng(0).normal(size=(20, 8))
    settings = dict.fromkeys(DIMENSIONS) | {"space": "linear-matrix", "damping": 1.0}
    trial = run_trial(task, Target(queries, masks, measured, "truth"), settings)
    found = run_method(task, "stride:space=linear-matrix,damping=1", queries, masks=masks).predicted
    np.testing.assert_array_equal(trial.scores, correlate(found, measured).spearman)


def test_settings_are_written_and_a_file_of_ones_own_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_settings({"train.layer": 3, "query.lambda_ratio": 0.1}) == Path("stride.yaml")
    assert resolve("train", {}).layer == 3 and resolve("query", {}).lambda_ratio == 0.1
    assert write_settings({"train.layer": 4}) is None and resolve("train", {}).layer == 3
    assert [path.name for path in tmp_path.iterdir()] == ["stride.yaml"]


@pytest.mark.slow
def test_sweep_chooses_resumes_and_writes(index: Path, run, tmp_path: Path, monkeypatch) -> None:
    """Through the command line: with a damping of 100 directions are hardly told apart, with 1 they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stride.yaml").write_text("train:\n  space: head-matrix+linear-matrix\n  damping: 100\n")
    line = "tune --index run.stride --damping 100,1 --responses 10 "
    line += "--epochs 2 --workers 1 --device cpu"
    result = run(f"{line} --dry-run")
    assert result.code == 0, result.err
    *trials, chosen = result.records
    assert [trial["damping"] for trial in trials] == [100, 1]
    assert not any(trial["kept"] for trial in trials)
    for record in result.records:
        fields = json_schema(record["schema"])["properties"]
        assert set(fields) - {"error"} <= set(record) <= set(fields)
    assert chosen["damping"] == 1 and chosen["queries"] == 24 and chosen["responses"] == 10
    assert chosen["path"] == ""
    again = run(line)
    assert again.code == 0, again.err
    assert all(trial["kept"] for trial in again.records[:-1]) and "0 of them to do" in again.err
    assert [t["score"] for t in again.records[:-1]] == [t["score"] for t in trials]
    assert "damping: 100\n" in (tmp_path / "stride.yaml").read_text()  # the owner's
    assert "set in stride.yaml: train.damping: 1.0\n" in again.err and "Trials" in again.err
