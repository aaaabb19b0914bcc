"""A plain NanoChat answers as transformers' model does, to the last bit; what is not plain is left to it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stride_cli.models.language import checkpoint
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.language.fingerprints import state_fingerprint
from stride_cli.models.language.language_recipe import Architecture
from stride_cli.models.language.nanochat import NanoChatForCausalLM, build_model, load_own, new_own
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_to_the_last_bit(saved_model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # what a missing package looks like to an import
        own: Any = load_model(ModelSpec(saved_model, device="cpu", dtype=dtype))
    theirs = CausalLM(checkpoint.load_weights(saved_model, dtype=DTYPES[dtype]), own.tokenizer)
    assert type(own.model) is NanoChatForCausalLM and own.name == theirs.name
    named = {name: value.shape for name, value in theirs.model.named_parameters()}
    assert {name: value.shape for name, value in own.model.named_parameters()} == named
    assert list(dict(own.model.named_parameters())) == list(named)
    assert state_fingerprint(own.model) == state_fingerprint(theirs.model)
    assert (own.end_tokens, own.context_length) == (theirs.end_tokens, theirs.context_length)
    assert own.default_space("closed") == theirs.default_space("closed")

    ids = torch.randint(0, own.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(own.model(input_ids=ids).logits, theirs.model(ids).logits)
    prompts = ids[:2, :9].tolist()
    said = own.generate_together(prompts, 30)
    assert said == theirs.generate_together(prompts, 30) and len(said[0]) > 3

    def passed(lm: CausalLM) -> list[torch.Tensor]:
        """What a query's passes give: states, losses, and the gradients in them and in layers' outputs."""
        hidden = lm.hidden(ids, 1).requires_grad_()
        caught = []
        with lm.at_layers("all", 40, lambda number, inputs, outputs: caught.append(outputs)):
            losses = lm.token_losses(lm.continue_from(hidden, 0), ids.roll(-1, 1))
        return [hidden, losses, *torch.autograd.grad(losses.sum(), [hidden, *caught])]

    for mine, wanted in zip(passed(own), passed(theirs), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("heads", [1, 4])
def test_initial_weights_are_the_same(heads: int) -> None:
    size = Architecture(layers=3, width=24, heads=heads, vocab=70, context=64)
    mine, wanted = new_own(size, seed=heads), build_model(size, seed=heads)
    parameters = dict(mine.named_parameters())
    assert [*parameters] == [name for name, _ in wanted.named_parameters()]
    assert all(value.requires_grad for value in parameters.values())
    assert all(torch.equal(value, parameters[name]) for name, value in wanted.named_parameters())
    said = wanted.config.to_dict()
    assert {name: said[name] for name in vars(mine.config)} == vars(mine.config)


def test_forward_mode(saved_model: Path) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    slopes = []
    own: Any = load_model(ModelSpec(saved_model, device="cpu"))
    for lm in (own, CausalLM(checkpoint.load_weights(saved_model))):
        hidden = lm.hidden(torch.arange(20).view(2, 10), 1)
        lm.prepare(10)

        def value(point: torch.Tensor, lm: CausalLM = lm) -> torch.Tensor:
            return lm.logits(lm.continue_from(point, 1)).logsumexp(-1)

        with sdpa_kernel(SDPBackend.MATH):
            slopes.append(torch.func.jvp(value, (hidden,), (torch.ones_like(hidden),))[1])
    assert torch.equal(*slopes)


def _changed(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _written(name: str, text: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_text(text)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _changed(num_key_value_heads=1),
        _changed(hidden_act="silu"),
        _changed(tie_word_embeddings=True),
        _changed(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        _changed(auto_map={"AutoModelForCausalLM": "own.Own"}),
        _changed(quantization_config={}),
        _written("config.json", "[]"),
        _written("adapter_config.json", "{}"),
        _changed(num_hidden_layers=1),  # the rest: plain, and of other weights
        _changed(num_hidden_layers=3),
        _changed(intermediate_size=8),
        _written("model.safetensors", "truncated"),
    ],
)
def test_all_else_is_left_to_transformers(
    change: Callable[[Path], None], saved_model: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(saved_model, tmp_path / "model"))
    assert load_own(find_checkpoint(place), torch.float32) is not None
    change(place)
    source = find_checkpoint(saved_model)
    assert load_own(type(source)(str(place), place), torch.float32) is None
