"""What a fit will take, from its first chunks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from stride_cli import api
from stride_cli.data.workspace import open_model
from stride_cli.errors import UsageError
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.options import SgdOptions
from stride_cli.training import dry_run


def test_time_grows_with_tokens_and_nothing_is_written(
    corpus: str, saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = api.build_index([corpus], out=tmp_path / "run.stride", model=str(saved_model))
    model = open_model(index, ModelSpec(device="cpu", dtype="fp32"))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(dry_run, "_TOKENS", index.n_tokens // 2)
    # bases and pass of the half take a second, of the whole two; half of a pass is the model before training
    times = itertools.accumulate([0, 0.5, 0, 1, 0, 1, 0, 0.5, 0, 2, 0, 1])
    found = dry_run.estimate_fit(index, model, clock=lambda: float(next(times)))
    more = index.n_tokens - found["timed_tokens"]
    assert found["timed_tokens"] <= index.n_tokens // 2 < index.n_tokens == found["tokens"]
    assert found["seconds"]["corpus"] == pytest.approx(2 + more / (found["timed_tokens"] / 2), rel=0.2)
    assert found["seconds"]["bases"] == pytest.approx(found["seconds"]["corpus"])  # all of it is sampled
    assert found["memory"] is None or found["memory"] > 100 << 20
    assert found["bytes"] > 4 * index.n_subsets * found["gate_size"]
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UsageError, match="closed form"):
        dry_run.estimate_fit(index, model, SgdOptions())
