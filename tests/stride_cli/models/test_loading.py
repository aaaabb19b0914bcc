"""Checkpoints, whole and broken."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stride_cli.errors import ModelError
from stride_cli.models.language import checkpoint
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.models.loading import load_model, model_fingerprint
from stride_cli.models.spec import ModelSpec


@pytest.fixture
def model_dir(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a local path touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_directory_loads_without_network(saved_model: Path, no_network: None) -> None:
    lm = load_model(ModelSpec(saved_model, device="cpu"))
    assert lm.n_layers == 2 and lm.d_model == 16 and lm.context_length == 64
    assert lm.dtype == torch.float32 and lm.path == str(saved_model)
    assert lm.vocab_size == len(lm.tokenizer)
    assert load_model(ModelSpec(saved_model, device="cpu", dtype="bf16")).dtype == torch.bfloat16


def test_fingerprints_follow_the_content(saved_model: Path, model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    assert model_fingerprint(model_dir) == hashlib.sha256(weights.read_bytes()).hexdigest()
    lm = load_model(ModelSpec(model_dir, device="cpu"))
    assert lm.fingerprint == model_fingerprint(saved_model)
    assert lm.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(saved_model))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_fingerprint(model_dir) != lm.fingerprint


def test_shards_are_all_in_the_fingerprint(saved_model: Path, tmp_path: Path) -> None:
    model = checkpoint.load_weights(saved_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    load_tokenizer(saved_model).save_pretrained(tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    joined = hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    assert load_model(ModelSpec(tmp_path / "sharded", device="cpu")).fingerprint == joined
    shards[0].unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path / "sharded")


@pytest.mark.parametrize("given", ["./nowhere", "a/b/c", "gone.gguf", "~/nothing-here"])
def test_a_path_that_is_not_there(given: str, no_network: None) -> None:
    with pytest.raises(ModelError, match="there is no model at") as caught:
        load_model(given)
    assert given in caught.value.message and caught.value.fix


def test_a_hub_id_that_is_not_cached(monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"no directory 'some/model'.*HF_HUB_OFFLINE") as caught:
        load_model("some/model")
    assert caught.value.fix and "download some/model" in caught.value.fix


def _truncated(kept: int) -> Callable[[Path], Any]:
    def change(model_dir: Path) -> None:
        weights = model_dir / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:kept])

    return change


def _of_another_size(**changes: Any) -> Callable[[Path], Any]:
    def change(model_dir: Path) -> None:
        config = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _without_a_tensor(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors.pop("model.layers.1.mlp.fc1.weight")
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


def _without_tokenizer(model_dir: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_dir / name).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_tokenizer, "has no tokenizer"),
        (lambda model_dir: (model_dir / "model.safetensors").unlink(), "has no weights"),
        (_truncated(0), "cannot be read"),
        (_truncated(200), "cannot be read"),
        (_truncated(-1), "cannot be read"),
        (_without_a_tensor, r"lack 1 tensors .*model\.layers\.1\.mlp\.fc1\.weight"),  # never made up
        (_of_another_size(hidden_size=32), "another shape|cannot be loaded"),
        (_of_another_size(num_hidden_layers=3), "lack"),
        (_of_another_size(num_hidden_layers=1), "hold, but its config does not"),
        (_of_another_size(model_type="no-such-type"), "cannot be loaded"),
        (lambda model_dir: (model_dir / "config.json").write_text("{"), "cannot be loaded"),
    ],
)
def test_a_checkpoint_is_loaded_whole_or_not_at_all(
    change: Callable[[Path], Any], message: str, model_dir: Path
) -> None:
    change(model_dir)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model_dir)
    assert caught.value.fix


_OPENED = """
import gc, sys, weakref
from pathlib import Path
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec
from stride_cli.startup import own_process

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}

def opened(path):
    model = load_model(ModelSpec(path, device="cpu", dtype="bf16"))
    model.hidden(torch.zeros((1, 4), dtype=torch.int64), model.n_layers)
    return model

import torch
own_process()
first = weakref.ref(opened(sys.argv[1]))  # imports what takes more than a small model
gc.collect()
before = held()
model = opened(sys.argv[2])
after = held()
print(after["RssAnon"] - before["RssAnon"], after["RssFile"] - before["RssFile"], first() is None)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is mapped")
def test_weights_in_half_precision_stay_in_their_file(tmp_path: Path, tokenizer: Any) -> None:
    """They are mapped, and neither widened nor copied: what is larger than memory is read block by block. A
    first model, with which transformers is imported, goes when nobody has it any more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    small = LlamaForCausalLM(
        LlamaConfig(**config.to_diff_dict() | {"hidden_size": 8, "intermediate_size": 8})
    )
    for each, name in ((small.to(torch.bfloat16), "small"), (model, "large")):
        each.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    line = [sys.executable, "-c", _OPENED, str(tmp_path / "small"), str(tmp_path / "large")]
    opened = subprocess.run(line, capture_output=True, text=True, check=True)
    own, mapped, gone = opened.stdout.split()
    own, mapped = int(own), int(mapped)
    assert gone == "True" and size > 100 << 20 and mapped > 0.9 * size and own < 0.2 * size
