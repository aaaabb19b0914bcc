"""Operators fitted by several workers are those that one process fits, whatever dies on the way."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli import api, parallel
from stride_cli.data.batches import ChunkReader
from stride_cli.models.spec import ModelSpec
from stride_cli.operators import corpus_pass
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.corpus_pass import PassWorkers
from stride_cli.operators.options import FitRunOptions
from stride_cli.operators.store import Operators
from tests.prepared import Prepared
from tests.same_fit import assert_same_fit

K = 12


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, 3, replace=False)) for _ in range(40)]).astype(np.uint16)


@dataclass(frozen=True)
class Place:
    """A `ModelPlace` of what this process holds."""

    opened: Any
    model: ModelSpec = field(default_factory=lambda: ModelSpec(device="cpu"))

    def __hash__(self) -> int:
        return id(self.opened)

    def __eq__(self, other: object) -> bool:
        return self is other

    def open(self) -> Any:
        return self.opened


@pytest.fixture
def fit(model: Any, chunks: ChunkReader, columns: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fit_closed` in a directory, by so many workers, all of which are this process."""
    monkeypatch.setattr(
        corpus_pass, "Workers", lambda task, count, **named: parallel.Workers(task, 1, **named)
    )

    def fitted(folder: Path | None = None, workers: int = 3, free: int | None = None, **options: Any) -> Any:
        ranks = {"residual": 5, "logit": 3, "token-logit": 3, "mlp-matrix": 3}
        given = {"spaces": ("mlp-matrix", "logit", "token-logit"), "project": 24} | options
        settings = ClosedSettings(layer=2, ranks=ranks, batch_tokens=64, **given)
        if folder is None:
            return fit_closed(model, chunks, columns, K, settings)
        folder.mkdir(exist_ok=True)
        place: Any = Place((model, chunks, columns))
        team = PassWorkers(place, count=workers, free=free)
        return fit_closed(model, chunks, columns, K, settings, scratch=folder, save_seconds=0, workers=team)

    return fitted


def same(found: Operators, expected: Operators) -> None:
    """The same bits."""
    arrays = found.to_arrays()[0], expected.to_arrays()[0]
    assert arrays[0].keys() == arrays[1].keys()
    for name, values in arrays[1].items():
        np.testing.assert_array_equal(arrays[0][name], values, name)


@pytest.mark.parametrize("options", [{}, {"spaces": ("residual", "logit"), "project": 0}])
def test_workers_fit_what_one_process_fits(fit: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """The same bases and projections; gates up to the order of sums."""
    found, whole = fit(tmp_path, **options), fit(**options)
    arrays, expected = found.to_arrays()[0], whole.to_arrays()[0]
    assert arrays.keys() == expected.keys()
    for name, values in expected.items():
        largest = float(np.abs(values).max()) if name.endswith(("_gates", "_loss")) else 0.0
        np.testing.assert_allclose(arrays[name], values, rtol=0, atol=1e-6 * largest, err_msg=name)
    assert found.to_arrays()[1].keys() == whole.to_arrays()[1].keys()


def test_what_is_done_is_not_done_again(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted twice, and gone on with by another number of workers: the same bits."""
    done: list[int] = []
    real = corpus_pass.accumulate

    def accumulate(*given: Any) -> Any:
        if len(done) in (2, 7):
            done.append(-1)
            raise KeyboardInterrupt
        found = real(*given)
        done.append(1)
        return found

    monkeypatch.setattr(corpus_pass, "accumulate", accumulate)
    for workers in (3, 2):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "cut", workers)
    found = fit(tmp_path / "cut", 4)
    assert done.count(1) == 12  # four ranges for each of the three workers that it began with
    same(found, fit(tmp_path / "whole", 3))


def train(index: Path, copy: Path | None = None, **options: Any) -> Path:
    """Operators in the index, or in a copy of it, by two workers."""
    found = index if copy is None else Path(shutil.copytree(index, copy))
    chosen = api.ClosedOptions(rank=6, project=48, **options)
    api.fit_index(
        found,
        chosen,
        run=FitRunOptions(workers=2, save_seconds=0),
        model=ModelSpec(device="cpu", dtype="fp32"),
    )
    return found


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_a_part_of_its_range(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes, one killed over a range that it has saved; the bits are those of an undisturbed fit."""
    monkeypatch.setattr(parallel, "available_cores", lambda: 2)
    target = Path(shutil.copytree(trained / "run.stride", tmp_path / "killed"))
    (tmp_path / "model").symlink_to(trained / "model")
    killed: list[int] = []

    def kill_one() -> None:
        folder = target / "operators.partial/scratch/shared"
        while not any(folder.glob("range-*/closed-pass.pt")):
            time.sleep(0.002)
        killed.append(multiprocessing.active_children()[0].pid or 0)
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    train(target, batch_tokens=64)
    killer.join(10)
    assert killed and "a worker was killed" in capfd.readouterr().err
    assert not multiprocessing.active_children()
    alone = train(trained / "run.stride", tmp_path / "alone", batch_tokens=64)
    assert_same_fit(target / "operators", alone / "operators")


@pytest.mark.slow
def test_a_fit_that_is_killed_whole_goes_on(trained: Path, tmp_path: Path, prepared: Prepared) -> None:
    """The command and all its workers, over the ranges: what was there stays."""
    target = Path(shutil.copytree(trained / "run.stride", tmp_path / "killed"))
    (tmp_path / "model").symlink_to(trained / "model")
    line = "--rank 6 --project 48 --save-seconds 0 --device cpu --dtype fp32 --no-calibration --workers 2"
    command = ["stride", "train", "--index", str(target), *line.split()]
    folder = target / "operators.partial/scratch/shared"
    process = prepared.start(command)
    while process.poll() is None and not any(folder.glob("sums-*.pt")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (target / "operators").exists()
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("sums-*.pt")}
    process, found = prepared.start(command), dict(stamps)
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # once it is whole
            found |= {path: path.stat().st_mtime_ns for path in stamps}
        time.sleep(0.01)
    assert process.wait() == 0 and found == stamps
    assert_same_fit(target / "operators", train(trained / "run.stride", tmp_path / "whole") / "operators")
