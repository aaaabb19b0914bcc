"""Checkpoints in four and eight bits: loaded as they are, with gradients that are those of their values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stride_cli.errors import ModelError
from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.quantised import make_differentiable, quantisation
from stride_cli.models.linear_layers import layer_widths
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec
from tests.stride_cli.commands.conftest import run_stride
from tests.tiny_models import tiny_sizes

IDS = torch.arange(24)[None] % 90
WIDTH = 64  # four-bit weights come in blocks of 64


@pytest.fixture(scope="module")
def plain(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights, with the saved model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    sizes = tiny_sizes(num_key_value_heads=2) | {"vocab_size": len(tokenizer), "num_hidden_layers": 2}
    sizes |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "bos_token_id": None, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    path = tmp_path_factory.mktemp("plain") / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[4, 8])
def quantised(request: Any, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        if request.param == 4
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    path = tmp_path_factory.mktemp("quantised") / f"bits{request.param}"
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, path / name)
    return path


def gradient(model: Any) -> torch.Tensor:
    read = model.get_input_embeddings()(IDS).detach().requires_grad_()
    (found,) = torch.autograd.grad(model(inputs_embeds=read, labels=IDS).loss, read)
    return found


def test_gradients_are_those_of_the_values_that_are_kept(quantised: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = load_model(ModelSpec(quantised, device="cpu", dtype="fp32"))
    assert quantisation(quantised) == "bitsandbytes"
    unpacked = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32).dequantize()
    with torch.no_grad():
        model.model(input_ids=IDS)  # a pass without gradients must not change how the next ones are made
    wanted, found = gradient(unpacked), gradient(model.model)
    assert (wanted - found).norm() < 0.03 * wanted.norm()
    layers = model.linear_layers("all")
    assert len(layers) == 14 and layer_widths(layers[4]) == (WIDTH, 2 * WIDTH)
    assert all(
        not isinstance(each.weight, torch.nn.Parameter) or each.weight.dtype != torch.float32
        for each in layers
    )


@pytest.mark.slow
@pytest.mark.parametrize("space", ["residual-matrix", "linear-matrix"])
def test_from_index_to_query(quantised: Path, tmp_path: Path, space: str) -> None:
    pairs = [
        {"id": f"d{n}", "prompt": f"What is {n} and {n}?", "response": f"{2 * n}, as all know."}
        for n in range(12)
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    index = str(tmp_path / "run.stride")
    built = run_stride(f"index build {corpus} --model {quantised} --out {index}")
    assert built.code == 0, built.err
    trained = run_stride(f"train --index {index} --space {space} --json")
    assert trained.code == 0, trained.err
    asked = "'What is 7 and 7?' --response '14, as all know.' --json"
    found = run_stride(f"query {asked} --index {index}")
    assert found.code == 0, found.err
    assert json.loads(found.out)["hits"][0]["document"] == "d7"
    refused = run_stride(f"model finetune {corpus} --model {quantised} --out {tmp_path / 'tuned'}")
    assert refused.code == 2
    assert "quantised" in refused.err and "plain weights" in refused.err


def test_an_adapter_on_one_is_added_to_plain_weights(quantised: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    base = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    for layer in base.modules():  # as exact as can be, to compare with
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    found: Any = load_model(ModelSpec(tmp_path / "adapter", device="cpu", dtype="fp32"))
    with torch.no_grad():
        logits = found.model(input_ids=IDS).logits
        before = load_model(ModelSpec(quantised, device="cpu", dtype="fp32")).model(input_ids=IDS).logits  # type: ignore[attr-defined]
    assert (logits - wanted).norm() < 0.03 * (before - wanted).norm()
    assert len(found.linear_layers("all")) == 4
    assert all(type(each) is torch.nn.Linear for each in found.linear_layers("all"))


def test_training_is_refused_before_anything_is_loaded(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "model"))
    assert quantisation(copy) is None
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="quantised \\(gptq\\), and cannot be trained"):
        load_weights(copy)


class _Rounding(torch.nn.Linear):
    """A linear layer whose output does not depend on what it reads, as autograd sees it."""

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        return super().forward(read.detach()) + 0 * read.sum()


def test_layers_without_gradients_are_refused() -> None:
    make_differentiable(torch.nn.Sequential(torch.nn.Linear(4, 3)))
    with pytest.raises(ModelError, match="_Rounding give no gradients"):
        make_differentiable(torch.nn.Sequential(torch.nn.Linear(4, 3), _Rounding(3, 2)))
