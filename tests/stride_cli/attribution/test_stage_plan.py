"""What stages will take: sizes are exact, times and memory grow as the work does, shallow models stand for
deep ones."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index_format.reader import Index
from stride_cli import api
from stride_cli.attribution.shallow import AsDeep, Shape, SpaceSize, shallow_model, space_sizes
from stride_cli.attribution.stage_plan import (
    Room,
    Stage,
    StagePlan,
    Work,
    advised,
    asking_memory,
    calibration_seconds,
    fetching_seconds,
    fit_memory,
    fit_seconds,
    plan_stages,
    query_seconds,
    stored_bytes,
)
from stride_cli.attribution.stage_rates import Rates
from stride_cli.corpus.gate_budget import shared_directions
from stride_cli.corpus.options import PlanOptions
from stride_cli.corpus.plan import CorpusCounts
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.store import Operators
from tests.tiny_models import VOCAB, configurations

WORK = Work(
    chunks=5000, tokens=500_000, subsets=1600, degree=10, gates=10**5, project=2048,
    sample=(36_864, 16_384), reads=100, together=200, fine_tuned=True, packed=True,
)  # fmt: skip
NOTHING = {field.name: 0.0 for field in fields(Rates)}
SHAPE: Any = SimpleNamespace(
    token_bytes=10_000,
    vocabulary=4096,
    moment_bytes=10**7,
    weight_bytes=10**8,
    placed_bytes=10**8,
    held_bytes=10**8,
    device="cpu",
)


def rates(**given: float) -> Rates:
    return Rates(**NOTHING | given)


@given(st.integers(2, 9), st.floats(1e-6, 1e-2))
def test_a_pass_over_more_chunks_takes_longer_and_its_sample_does_not(times: int, rate: float) -> None:
    more = replace(WORK, chunks=times * WORK.chunks, tokens=times * WORK.tokens)
    for name in ("gradients", "sums"):
        own = rates(**{name: rate})
        (memory, *_) = (4 * WORK.subsets * WORK.gates / 2.5e9,)  # touched for the first time, in both
        assert fit_seconds(more, own)["fit"] - memory == pytest.approx(
            times * (fit_seconds(WORK, own)["fit"] - memory)
        )
    for name in ("observe", "scale", "bases", "step"):
        assert fit_seconds(more, rates(**{name: rate})) == fit_seconds(WORK, rates(**{name: rate}))
    before, projected = rates(before=rate), rates(project=rate)
    assert fit_seconds(more, before)["before"] == pytest.approx(rate * more.tokens)
    assert fit_seconds(replace(more, fine_tuned=False), before)["before"] == 0
    assert fit_seconds(more, projected)["projections"] == pytest.approx(rate * more.chunks)


def test_queries_take_what_they_measure_and_read() -> None:
    own = rates(gates=1e-6)
    assert query_seconds(WORK, own, 0.0)["query"] == pytest.approx(1e-6 * WORK.subsets)
    assert calibration_seconds(WORK, own, 0.0) == pytest.approx(300 * 1e-6 * WORK.subsets)
    reading = rates(gradients=0.01)
    assert query_seconds(WORK, reading, 0.0)["reading"] == pytest.approx(0.01 * WORK.reads)
    # no chunk is read twice by those who are asked together
    whole = calibration_seconds(replace(WORK, together=300), reading, 0.0)
    assert 0.01 * WORK.reads < whole < 0.01 * WORK.chunks
    assert calibration_seconds(replace(WORK, reads=0), reading, 0.0) == 0
    assert query_seconds(replace(WORK, reads=0), reading, 0.5)["query"] > 0.5


def test_memory_grows_with_what_is_held() -> None:
    def fit(**changed: Any) -> int:
        return fit_memory(replace(WORK, **changed), SHAPE, 10**8, 4096)[0]

    sums = 4 * WORK.subsets * WORK.gates
    assert fit(subsets=2 * WORK.subsets) - fit() == sums
    assert fit(chunks=2 * WORK.chunks, tokens=2 * WORK.tokens) - fit() == 24 * WORK.chunks
    asked = [asking_memory(WORK, SHAPE, 10**8, 4096, queries)[0] for queries in (100, 200)]
    assert asked[1] - asked[0] >= 100 * 4 * WORK.gates
    on_device = SimpleNamespace(**vars(SHAPE) | {"device": "cuda"})
    memory, device = fit_memory(WORK, on_device, 10**8, 4096)
    assert device > sums + SHAPE.weight_bytes and memory < fit()


def test_what_does_not_fit_is_named_with_its_setting() -> None:
    stages = [Stage("fit", "train", 1.0, fit_memory(WORK, SHAPE, 10**8, 4096)[0], 0, 10**9)]
    assert advised(stages, WORK, Room(10**11, 10**11)) == []
    (said,) = advised(stages, WORK, Room(10**9, 10**11))
    assert "--subsets" in said and "sums of 1,600 subsets × 100,000 gates" in said
    few = replace(WORK, gates=100)
    stages = [Stage("fit", "train", 1.0, fit_memory(few, SHAPE, 10**8, 4096)[0], 0, 10**9)]
    assert "--dtype bf16" in advised(stages, few, Room(10**8, 10**11))[0]
    assert "on the disk: --no-text, a smaller --project" in advised(stages, few, Room(10**12, 10**8))[0]


def test_streaming_is_named_where_it_would_help() -> None:
    few = replace(WORK, gates=100)
    need = fit_memory(few, SHAPE, 10**8, 4096)[0]
    stages = [Stage("fit", "train", 1.0, need, 2 * 10**9, 0)]
    (said,) = advised(stages, few, Room(need - 10**7), 5 * 10**7)
    assert "give --stream, which leaves 50 MB of weights on disk" in said
    (said,) = advised(stages, few, Room(need - 10**8), 5 * 10**7)  # not by itself
    assert "--stream (50 MB less), --dtype bf16" in said
    assert "--stream" not in advised(stages, few, Room(need - 10**7))[0]  # they are there already
    (said,) = advised(stages, few, Room(need, None, 10**9), 10**9)
    assert "needs 2.0 GB on the GPU, 1.0 GB are free: give --stream" in said


def test_a_streamed_model_takes_two_blocks_and_the_time_in_which_they_come() -> None:
    settings: Any = SimpleNamespace(batch_tokens=4096)
    given: dict[str, Any] = {"weight_bytes": 10**9, "layers": 40, "block_bytes": 2 * 10**7, "fetch": 0.5}
    whole = Shape(None, settings, rates(), [], 8, 9, moment_bytes=0, mapped=False, token_bytes=0,
                  has_base=True, device="cpu", **given)  # fmt: skip
    streamed = replace(whole, streamed=True)
    assert whole.held_bytes - streamed.held_bytes == 38 * 2 * 10**7
    on_device = [replace(each, device="cuda") for each in (whole, streamed)]
    devices = [fit_memory(WORK, each, 0, 4096)[1] for each in on_device]
    assert devices[0] - devices[1] == 38 * 2 * 10**7
    came = fetching_seconds(WORK, streamed)
    batches = 5000 / 32  # chunks together
    sample = 36_864 / 4096 + 16_384 / 4096
    assert came["before"] == 0.5 * math.ceil(batches)
    # true and drawn labels of the sample, forward and backward of all, five central differences on two probes
    assert came["fit"] == pytest.approx(0.5 * (3 * sample + 2 * math.ceil(batches) + 10))
    assert came["query"] > came["reading"] > 0 and came["projections"] == 0
    assert fetching_seconds(replace(WORK, chunks=10_000), streamed)["fit"] > came["fit"]


def test_rates_of_a_deep_model_lie_on_the_line_through_two_shallow_ones() -> None:
    one, two = rates(gradients=3.0, token=1.0, sums=2.0), rates(gradients=5.0, token=0.5, sums=2.0)
    found = one.at_depth(two, 10)
    assert (found.gradients, found.sums) == (23.0, 2.0)
    assert found.token == 1.0  # noise does not make a deeper model faster


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "Mixtral", "NanoChat", "Gemma3"])
def test_a_shallow_model_says_what_the_deep_one_is(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    config = configurations()[name](transformers)
    config.save_pretrained(tmp_path)
    (one, layers), (whole, _) = (
        shallow_model(str(tmp_path), blocks, device="cpu", dtype=torch.float32) for blocks in (1, None)
    )
    two, _ = shallow_model(str(tmp_path), 2, device="cpu", dtype=torch.float32)
    deep: Any = AsDeep(one, layers, two.n_parameters - one.n_parameters)
    assert (layers, deep.n_layers, deep.n_parameters) == (3, whole.n_layers, whole.n_parameters)
    index: Any = SimpleNamespace(attributes={}, n_subsets=40, n_chunks=40, seed=0, path=None)
    found, expected = (resolve_settings(ClosedOptions(), model, index) for model in (deep, whole))
    assert asdict(found) == asdict(expected)
    counts = CorpusCounts(documents=1, chunks=40, tokens=400)
    chunks = _chunks()
    assert space_sizes(deep, found, counts, chunks) == space_sizes(whole, expected, counts, chunks)


def _chunks() -> Any:
    from stride_cli.attribution.shallow import chunks_of

    random = np.random.default_rng(0)
    return chunks_of([random.integers(0, VOCAB, 10) for _ in range(40)])


def test_stored_gates_are_packed_where_they_are_many() -> None:
    assert stored_bytes(10, SpaceSize("logit", 100, 7)) == 4 * 1000 + 7
    many = SpaceSize("logit", 1 << 20, 0)
    assert stored_bytes(100, many) == 100 * (1 << 20) + 100 * 4 * (1 << 12)


def test_a_plan_on_a_terminal_says_what_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    from stride_cli.commands.index import _show_stages
    from stride_cli.corpus.plan import plan_index

    stages = [
        Stage("fit", "train", 7200.0, 3 * 10**9, 0, 10**9),
        Stage("before", "train", 0.0, 1, 0, 0),  # there is none
        Stage("query", "query", 4.0, 10**9, 2 * 10**9, 0),
    ]
    plan = plan_index(CorpusCounts(documents=1, chunks=9, tokens=90))
    _show_stages(StagePlan(plan, stages, rates(), 2.0, 9, 512.0, "cpu", False, ["fit needs 3 GB: give less"]))
    out, told = capsys.readouterr()
    assert "about 2 hours" in out and "3 GB" in out and "2 GB" in out and "before" not in out
    assert "estimates" in told and "512 tokens a second" in told and "does not fit: fit needs 3 GB" in told


@pytest.mark.slow
def test_disk_is_what_it_will_be(saved_model: Path, corpus: str, tmp_path: Path) -> None:
    """To the byte, but for what describes arrays, and how many directions chunks have in common."""
    found = plan_stages(str(saved_model), PlanOptions(), sources=[corpus])
    assert [stage.stage for stage in found.stages][:3] == ["build", "before", "fit"]
    out = tmp_path / "run.stride"
    api.build_index([corpus], model_path=str(saved_model), out=out)
    record = api.train(out, model_path=str(saved_model), device="cpu")
    assert record["gate_size"] == found.plan.gate_dimension
    arrays = sum(
        path.stat().st_size
        for path in out.rglob("*")
        if path.is_file() and path.suffix != ".json" and "partial" not in str(path)
    )
    (common,) = Operators.from_index(Index.open(out)).redundancy.values.shape
    spared = (shared_directions(found.plan.n_chunks) - common) * (4 * found.plan.n_chunks + 8)
    assert spared >= 0 and sum(stage.disk_bytes for stage in found.stages) == arrays + spared
    assert isinstance(found.rates, Rates) and all(value >= 0 for value in asdict(found.rates).values())
    assert found.reads == 30 and found.advice == []


def test_a_shape_has_the_gates_that_are_asked_for() -> None:
    spaces = [SpaceSize("mlp-matrix", 300, 1), SpaceSize("logit", 700, 1)]
    shape = Shape(*[None] * 3, spaces, *[0] * 4, False, 0, False, "cpu")  # type: ignore[arg-type]
    assert [space.gates for space in shape.with_gates(500).spaces] == [150, 350]
    assert shape.with_gates(7).gates == 7


@pytest.mark.slow
def test_stages_of_several_models_and_of_a_corpus_that_is_not_there(saved_model: Path, corpus: str) -> None:
    plans = [plan_stages(str(saved_model), PlanOptions(checkpoints=n), sources=[corpus]) for n in (0, 2)]
    disk = [{stage.stage: stage.disk_bytes for stage in each.stages} for each in plans]
    assert disk[1] == {name: size * (1 if name == "build" else 3) for name, size in disk[0].items()}
    whole = plan_stages(str(saved_model), PlanOptions(chunks=300, block_size=32))
    assert (whole.plan.n_chunks, whole.plan.n_tokens, whole.plan.n_documents) == (300, 300 * 32, None)
    assert all(stage.seconds > 0 for stage in whole.stages if stage.stage != "before")
