"""What is added up on a device, its arithmetic done on the CPU: the same sums and signs as in memory, in one
turn or several, interrupted, halved for want of memory, and in bf16."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli.data.batches import TOGETHER, ChunkReader
from stride_cli.operators import gradient_sums, gradients, subset_sums
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.exact_response import pearson
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.projections import Folding, encode
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.operators.subset_sums import DeviceSums, SubsetSums

K, CPU = 12, torch.device("cpu")
SETTINGS = ClosedSettings(
    spaces=("residual-matrix", "logit"),
    layer=2,
    ranks={"residual-matrix": 5, "logit": 4},
    batch_tokens=128,
    project=64,
)


def same(found: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    return float(np.linalg.norm(found - expected)) <= tolerance * float(np.linalg.norm(expected))


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, 3, replace=False)) for _ in range(40)]).astype(np.uint16)


@pytest.fixture(scope="module")
def in_memory(model, chunks: ChunkReader, columns: np.ndarray) -> Operators:
    return fit_closed(model, chunks, columns, K, SETTINGS)


def assert_same_fit(found: Operators, expected: Operators) -> None:
    assert found.projections is not None and expected.projections is not None
    for own, wanted in zip(found.gates, expected.gates, strict=True):
        assert same(own, wanted)
    assert same(found.projections.step, expected.projections.step)
    assert (found.projections.codes != expected.projections.codes).mean() < 1e-3
    assert found.log["loss"] == pytest.approx(expected.log["loss"], rel=1e-6)


@pytest.mark.parametrize("n_subsets", [7, 400])  # most of them in each batch, and few
@pytest.mark.parametrize("rows", [400, 3])
def test_sums_on_a_device_are_those_in_memory(
    n_subsets: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subset_sums, "_COLUMNS", 1000)
    random = np.random.default_rng(0)
    sizes, degree = (50, 130), 4
    columns = np.stack([random.choice(n_subsets, degree, replace=False) for _ in range(60)])
    rows_of = [random.normal(size=(60, size)).astype(np.float32) for size in sizes]
    share = torch.from_numpy(random.random((60, 1), np.float32))
    own = SubsetSums(n_subsets, sizes)
    device = DeviceSums(n_subsets, sizes, CPU, min(rows * n_subsets // 7, n_subsets))
    assert device.turns == (1 if rows == 400 else 3)
    for turn in range(device.turns):
        if turn:
            device.next_turn()
        for start in range(0, 60, 20):
            some = slice(start, start + 20)
            given = [torch.from_numpy(each[some]) for each in rows_of]
            if not turn:
                own.add(columns[some], given, share[some])
            device.add(columns[some], given, share[some])
    for found, expected in zip(device.sums(), own.sums(), strict=True):
        assert same(found, expected)


def test_a_fit_in_turns_is_the_fit_in_one_and_goes_on_where_it_stopped(
    model, chunks: ChunkReader, columns, in_memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sums = gradient_sums.subset_sums
    monkeypatch.setattr(
        gradient_sums, "subset_sums", lambda count, sizes, device, beside: DeviceSums(count, sizes, device, 5)
    )
    groups = [chunks.small_groups(group, TOGETHER) for group in chunks.plan(SETTINGS.batch_tokens)]
    batches = sum(len(list(group)) for group in groups)
    real, calls = gradient_sums.chunk_gradients, 0

    def dies(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == batches + 3:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(gradient_sums, "chunk_gradients", dies)
    with pytest.raises(KeyboardInterrupt):
        fit_closed(model, chunks, columns, K, SETTINGS, scratch=tmp_path, save_seconds=0)
    stopped = shutil.copytree(tmp_path, tmp_path / "stopped")
    found = fit_closed(model, chunks, columns, K, SETTINGS, scratch=tmp_path, save_seconds=0)
    assert calls == 3 * batches + 1  # three turns, and the batch that was not added
    assert_same_fit(found, in_memory)
    # where there is room for all subsets at once, the pass begins again
    monkeypatch.setattr(gradient_sums, "subset_sums", real_sums)
    assert_same_fit(fit_closed(model, chunks, columns, K, SETTINGS, scratch=stopped), in_memory)
    assert calls == 4 * batches + 1


def test_batches_are_halved_where_memory_runs_out(
    model, chunks: ChunkReader, columns, in_memory, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    real, sizes = gradients.signals, []

    def short(steered: Any, batch: Any, **named: Any) -> Any:
        sizes.append(len(batch.rows))
        if batch.ids.numel() > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(steered, batch, **named)

    wanted = gradients.gradient_products(
        SteeredModel.of(model, in_memory), [torch.ones(2, gate.shape[1]) for gate in in_memory.gates], chunks
    )
    for place in ("stride_cli.operators.gradients.signals", "stride_cli.operators.bases.signals"):
        monkeypatch.setattr(place, short)
    found = fit_closed(model, chunks, columns, K, SETTINGS)
    for own, expected in zip(found.gates, in_memory.gates, strict=True):
        assert same(own, expected, 1e-4)  # the bases' sums are rounded otherwise too
    told = capsys.readouterr().err
    # of each pass the first batch alone fails: those that follow are small enough
    assert "out of memory at 1" in told and 3 <= told.count("out of memory") <= 9
    read = gradients.gradient_products(
        SteeredModel.of(model, in_memory), [torch.ones(2, gate.shape[1]) for gate in in_memory.gates], chunks
    )
    assert same(read, wanted, 1e-5)
    monkeypatch.setattr("stride_cli.operators.gradients.signals", lambda *given, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(gradients.weighted_gradients(SteeredModel.of(model, in_memory), chunks, np.arange(3)))


@pytest.mark.parametrize("count", [64, 192, 2048])  # the last: more than gates
def test_folding_on_a_device_is_the_folding(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stride_cli.operators.device_sums._NUMBERS", 5000)
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(9, size, generator=random) for size in (700, 430)]
    rows[0][3], rows[1][3] = 0.0, 0.0
    folding, scored = Folding(1130, count, 5), torch.arange(1.0, 10)
    assert same(folding.on(CPU)(rows), folding(rows))
    codes, step = folding.on(CPU).encoded(rows, scored)
    wanted_codes, wanted_step = encode(folding(rows) * scored.numpy()[:, None])
    assert same(step, wanted_step) and step[3] == 0 and codes.dtype == np.uint8
    differ = np.unpackbits(codes ^ wanted_codes, axis=1).astype(bool)
    assert (np.abs(folding(rows))[differ] < 1e-5).all()


def test_bf16_gives_the_same_responses(model, fresh_model, chunks: ChunkReader, columns) -> None:
    half = fresh_model()
    half.model.to(torch.bfloat16)
    plain = replace(SETTINGS, project=0, batch_tokens=4096)
    batch = chunks.batch(np.arange(6))
    fits = [(m, fit_closed(m, chunks, columns, K, plain)) for m in (half, model)]
    found, expected = (measure_linear(SteeredModel.of(*each), batch) for each in fits)
    assert found.dtype == np.float64
    assert np.mean([pearson(a, b) for a, b in zip(found, expected, strict=True)]) > 0.97
