"""From a corpus to a checkpoint that transformers loads, known by heart, the same after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from index_format.errors import StorageFull
from stride_cli.errors import UsageError
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import FILE_NAME, read_recipe
from stride_cli.models.language.nanochat import load_own
from stride_cli.models.language.tokenizer import OwnTokenizer, load_tokenizer
from stride_cli.models.loading import load_model, model_fingerprint
from stride_cli.training import language_loop as training
from stride_cli.training import runs
from stride_cli.training.pretraining import TrainOptions, train_model
from tests.prepared import Prepared
from tests.same_fit import contents

TINY = TrainOptions(layers=2, width=32, heads=2, vocab=300, context=64, epochs=4, dtype="fp32", device="cpu")


def test_what_is_at_out(tmp_path: Path, corpus: str, documents: list[dict[str, str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    trained = train_model([corpus], out, dataclasses.replace(TINY, checkpoints=2))
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "NanoChatForCausalLM"
    assert load_own(find_checkpoint(out), model.dtype) and type(load_tokenizer(out)) is OwnTokenizer
    assert model.config.pad_token_id is None and model.get_input_embeddings().padding_idx is None
    assert model.config.bos_token_id == tokenizer.bos_token_id == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert trained.parameters == model.num_parameters()
    recipe = read_recipe(out)
    assert recipe == trained.recipe and recipe is not None
    assert recipe.corpus["documents"] == len(documents)
    assert recipe.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(out))
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert [point["step"] for point in log] == list(range(1, recipe.steps + 1))
    steps = sorted((out / "checkpoints").iterdir())
    assert [path.name for path in steps] == [f"step-{round(recipe.steps * k / 3):06d}" for k in (1, 2)]
    prints = {model_fingerprint(path) for path in [out, *steps]}
    assert len(prints) == 3
    assert load_model(steps[0]).n_layers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_resumed_after_an_interruption(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train_model([corpus], tmp_path / "whole", TINY)
    original = training._apply
    calls = 0

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(training, "_apply", interrupt)
    monkeypatch.setattr(runs, "SAVE_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        train_model([corpus], tmp_path / "cut", TINY)
    assert not (tmp_path / "cut").exists() and (tmp_path / "cut.partial" / "state.pt").exists()
    monkeypatch.setattr(training, "_apply", original)
    with pytest.raises(UsageError, match="other settings"):
        train_model([corpus], tmp_path / "cut", dataclasses.replace(TINY, seed=1))
    train_model([corpus], tmp_path / "cut", TINY)
    assert {"model.safetensors", "tokenizer_config.json", FILE_NAME} <= set(contents(tmp_path / "cut"))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not (tmp_path / "cut.partial").exists()


def test_a_full_disk_stops_it_wherever_it_is(
    tmp_path: Path, corpus: str, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told as such, and the same call goes on once there is room, to the same bytes."""
    options = dataclasses.replace(TINY, checkpoints=1, layers=1, epochs=2)
    monkeypatch.setattr(runs, "SAVE_SECONDS", 0)
    train_model([corpus], tmp_path / "whole", options)
    reached = []
    for size in (4, 8, 28, 36, 400, 840, 20_000):  # kB
        small = small_disk(f"{size}k")
        if (small / "model").exists():
            break
        try:
            train_model([corpus], small / "model", options)
        except StorageFull as full:
            assert "no space left" in full.message and full.fix
            files = (small / "model.partial").rglob("*")
            reached.append({file.name for file in files if file.is_file() and file.stat().st_size})
    assert contents(small / "model") == contents(tmp_path / "whole")
    assert [path.name for path in small.iterdir()] == ["model"]
    assert "training.json" not in reached[0] and FILE_NAME not in reached[1]
    assert len(reached) >= 5 and "state.pt" in reached[-1]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, corpus: str, prepared: Prepared) -> None:
    options = dataclasses.replace(TINY, epochs=50, checkpoints=3)
    train_model([corpus], tmp_path / "whole", options)
    program = (
        "import sys; from stride_cli.training import runs; from stride_cli.training.pretraining import *\n"
        f"runs.SAVE_SECONDS = 0; train_model([{corpus!r}], sys.argv[1], {options!r})"
    )
    command = ["-c", program, str(tmp_path / "cut")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    chooser = random.Random(0)
    kills = 0
    for _ in range(40):
        process = prepared.start(command, env=environment)
        state = tmp_path / "cut.partial" / "state.pt"
        begun = state.stat().st_mtime_ns if state.exists() else 0
        # wait for this process to have got somewhere, then some more
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == begun):
            time.sleep(0.01)
        if kills < 6:
            time.sleep(chooser.random() * 0.1)
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
        assert not (tmp_path / "cut").exists()
    assert kills >= 3
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not (tmp_path / "cut.partial").exists()
