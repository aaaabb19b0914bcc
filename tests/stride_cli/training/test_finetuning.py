"""Fine-tuning: on answers only, all weights or low-rank, merged, from and to real checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import CorpusError, ModelError
from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.language.lora import add_lora, merged_weights
from stride_cli.models.language.nanochat import load_own
from stride_cli.models.language.tokenizer import OwnTokenizer, load_tokenizer
from stride_cli.models.loading import load_model, model_fingerprint
from stride_cli.models.spec import ModelSpec
from stride_cli.training.finetuning import FinetuneOptions, finetune_model
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import mean_loss
from stride_cli.training.runs import cut, read_corpus

QUICK = FinetuneOptions(epochs=30, lr=0.01, dtype="fp32", device="cpu", batch_tokens=256)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    towns = ["Oslo", "Rome", "Lima", "Bonn"]
    records = [
        {"id": f"q{number}", "prompt": f"number {number}?", "response": towns[number % 4]}
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("rank", [0, 4])
def test_answers_are_learnt_and_prompts_are_not(
    tmp_path: Path, answers: str, saved_model: Path, rank: int
) -> None:
    options = dataclasses.replace(QUICK, lora_rank=rank, epochs=80 if rank else 30, lr=0.03 if rank else 0.01)
    trained = finetune_model([answers], saved_model, tmp_path / "tuned", options)
    assert load_own(find_checkpoint(tmp_path / "tuned"), torch.float32)
    assert type(load_tokenizer(tmp_path / "tuned")) is OwnTokenizer
    tuned, base = (load_model(ModelSpec(each, device="cpu")) for each in (tmp_path / "tuned", saved_model))
    recipe = trained.recipe
    chunks, _ = cut(read_corpus([answers], ReadOptions()), base.tokenizer, block_size=recipe.block_size)
    assert mean_loss(tuned.model, chunks, recipe) < 0.5 * mean_loss(base.model, chunks, recipe)
    assert trained.before == pytest.approx(mean_loss(base.model, chunks, recipe), rel=1e-4)
    prompts = [dataclasses.replace(c, tokens=c.tokens[: c.loss_start], loss_start=1) for c in chunks]
    assert mean_loss(tuned.model, prompts, recipe) > 0.8 * mean_loss(base.model, prompts, recipe)
    assert trained.loss == pytest.approx(mean_loss(tuned.model, chunks, recipe), rel=1e-4)
    assert trained.parameters == base.n_parameters == tuned.n_parameters
    assert tuned.tokenizer_fingerprint == base.tokenizer_fingerprint
    assert recipe.base_fingerprint == base.fingerprint == model_fingerprint(saved_model)


def test_a_quantised_model_becomes_a_plain_one(tmp_path: Path, answers: str, quantized_model: Path) -> None:
    base = load_weights(quantized_model)
    options = dataclasses.replace(QUICK, checkpoints=1, lr=0.01)
    trained = finetune_model([answers], quantized_model, tmp_path / "tuned", options)
    tuned = load_model(ModelSpec(tmp_path / "tuned", device="cpu"))
    block_size = trained.recipe.block_size
    chunks, _ = cut(read_corpus([answers], ReadOptions()), tuned.tokenizer, block_size=block_size)
    assert trained.loss == pytest.approx(mean_loss(tuned.model, chunks, trained.recipe), rel=1e-4)
    assert mean_loss(tuned.model, chunks, trained.recipe) < 0.5 * mean_loss(base, chunks, trained.recipe)
    (kept,) = (tmp_path / "tuned" / "checkpoints").iterdir()
    assert load_model(ModelSpec(kept, device="cpu")).n_parameters == tuned.n_parameters


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "NanoChat", "Mixtral"])
def test_low_rank_parts(name: str, make_model: Callable[..., Any]) -> None:
    model = make_model(name).eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        before = model(ids).logits
    added = add_lora(model, rank=3, seed=0)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(p) for p in trainable} == {id(p) for p in added}
    assert sum(p.numel() for p in trainable) < 0.5 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)  # B is zero at the start
        for parameter in added:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        adapted = model(ids).logits
    assert not torch.allclose(adapted, before, atol=1e-2)
    weights = merged_weights(model)
    assert weights is not None
    merged = make_model(name, seed=5).eval()
    merged.load_state_dict(weights)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted, atol=1e-4)


def test_what_the_template_refuses_is_skipped(tmp_path: Path, answers: str, saved_model: Path) -> None:
    base = Path(shutil.copytree(saved_model, tmp_path / "base"))
    (base / "chat_template.jinja").write_text(
        "{% if '3' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
        "{% for message in messages %}{{ message.content }} {% endfor %}"
    )
    reading, options = ReadOptions(on_bad="skip"), dataclasses.replace(QUICK, epochs=1)
    with pytest.raises(CorpusError, match="refuses document 'q3'"):
        finetune_model([answers], base, tmp_path / "tuned", options)
    trained = finetune_model([answers], base, tmp_path / "tuned", options, reading=reading)
    assert [chunk.n_scored > 0 for chunk in trained.chunks] == [number != 3 for number in range(12)]


def test_a_model_says_what_adaptation_added(tmp_path: Path, answers: str, saved_model: Path) -> None:
    """Row and column space of what it changed; where it cannot be told, the A that the recipe's seed drew."""
    base = Path(shutil.copytree(saved_model, tmp_path / "base"))
    finetune_model([answers], base, tmp_path / "tuned", dataclasses.replace(QUICK, lora_rank=2, epochs=2))
    tuned, untuned = (load_model(ModelSpec(each, device="cpu")) for each in (tmp_path / "tuned", base))
    assert tuned.default_space("closed") == "linear-matrix" != untuned.default_space("closed")
    assert untuned.adapter_matrices("all") is None
    names = {layer: name for name, layer in tuned.model.named_modules()}
    layers, found = tuned.linear_layers("all"), tuned.adapter_matrices("all")
    fewer = tuned.adapter_matrices("mlp")
    assert found is not None and len(found) == len(layers) > 0
    assert fewer is not None and len(fewer) == tuned.n_layers
    recipe = read_recipe(tmp_path / "tuned")
    assert recipe is not None
    began = initial_model(recipe)
    drawn = [began.get_submodule(names[layer]).lora_a for layer in layers]
    for layer, (rows, columns), start in zip(layers, found, drawn, strict=True):
        assert rows.shape == start.shape and not torch.equal(rows, start)
        assert columns is not None and columns.shape == (len(layer.weight), 2)
        change = layer.weight - untuned.model.get_submodule(names[layer]).weight
        close = {"rtol": 0, "atol": 1e-3 * float(change.norm())}
        torch.testing.assert_close(change @ rows.T @ rows, change, **close)
        torch.testing.assert_close(columns @ columns.T @ change, change, **close)
    weights = load_file(base / "model.safetensors")
    noise = torch.randn(layers[0].weight.shape, generator=torch.Generator().manual_seed(0))
    weights[f"{names[layers[0]]}.weight"] += 0.1 * noise  # another base, or rounding that hides the change
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    other = load_model(ModelSpec(tmp_path / "tuned", device="cpu")).adapter_matrices("all")
    assert other is not None and torch.equal(other[0].A, drawn[0]) and other[0].B is None
    assert all(torch.equal(*pair) for pair in zip(other[1], found[1], strict=True))
    shutil.rmtree(base)
    later = load_model(ModelSpec(tmp_path / "tuned", device="cpu")).adapter_matrices("all")
    assert later is not None and all(each.B is None for each in later)
    assert all(torch.equal(each.A, start) for each, start in zip(later, drawn, strict=True))


def test_tied_weights_stay_tied(tmp_path: Path, answers: str, tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for rank in (0, 2):
        options = dataclasses.replace(QUICK, lora_rank=rank, epochs=1)
        finetune_model([answers], tmp_path / "base", tmp_path / f"tuned{rank}", options)
        model = load_weights(tmp_path / f"tuned{rank}")
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_base_model_that_was_replaced(tmp_path: Path, answers: str, saved_model: Path) -> None:
    base = Path(shutil.copytree(saved_model, tmp_path / "base"))
    finetune_model([answers], base, tmp_path / "tuned", dataclasses.replace(QUICK, epochs=1))
    recipe = read_recipe(tmp_path / "tuned")
    assert recipe is not None
    shutil.copy(tmp_path / "tuned" / "model.safetensors", base)
    with pytest.raises(ModelError, match="fingerprint"):
        initial_model(recipe)
