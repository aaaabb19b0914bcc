"""LoRA adapters that PEFT saved, loaded by path: PEFT's own answers, from index to query; what is told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stride_cli import api
from stride_cli.errors import ModelError
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.checkpoint import _load_weights, load_weights
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.language.fingerprints import settings_fingerprint
from stride_cli.models.loading import load_model, model_fingerprint
from stride_cli.models.spec import ModelSpec
from tests.stride_cli.commands.conftest import run_stride

peft = pytest.importorskip("peft")
IDS = torch.arange(12)[None]


def save_adapter(
    base: Path, out: Path, target_modules: list[str] | str, *, scale: float = 1.0, **more: Any
) -> torch.Tensor:
    """A LoRA adapter of random weights at `out`; what PEFT's own model makes of it, logits (1, 12, V)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    given = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    config = peft.LoraConfig(**given, target_modules=target_modules, **more)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(scale if ".lora_B" in name else 1)
    model.eval().save_pretrained(out)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def load_whole(path: Path, dtype: torch.dtype) -> Any:
    return _load_weights(find_checkpoint(path), dtype)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def base(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "base"))


@pytest.fixture(scope="module")
def made(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An adapter of q_proj and fc2 of the saved model, and what PEFT makes of it."""
    out = tmp_path_factory.mktemp("made") / "adapter"
    return out, save_adapter(saved_model, out, ["q_proj", "fc2"])


@pytest.fixture
def adapter(made: tuple[Path, torch.Tensor], base: Path, tmp_path: Path) -> Path:
    """A copy of that adapter, of a base model of one's own."""
    copy = Path(shutil.copytree(made[0], tmp_path / "adapter"))
    edit(copy / "adapter_config.json", base_model_name_or_path=str(base))
    return copy


def test_an_adapter_answers_as_pefts_own_model(adapter: Path, base: Path, made: Any) -> None:
    model: Any = load_model(ModelSpec(adapter, device="cpu"))
    plain: Any = load_model(ModelSpec(base, device="cpu"))
    with torch.no_grad():
        found, before = (each.model(input_ids=IDS).logits for each in (model, plain))
    torch.testing.assert_close(found, made[1], rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 0.1
    # in its own weights: the layers that it is on, in the order in which they run
    names = {layer: name for name, layer in model.model.named_modules()}
    assert [names[layer].rsplit(".", 1)[1] for layer in model.linear_layers("all")] == ["q_proj", "fc2"] * 2
    assert len(plain.linear_layers("all")) == 12
    assert model.default_space("closed") == "linear-matrix" and not model.pretrained
    stored = load_file(adapter / "adapter_model.safetensors")
    for layer, added in zip(model.linear_layers("all"), model.adapter_matrices("all"), strict=True):
        for side, found in added._asdict().items():
            assert torch.equal(found, stored[f"base_model.model.{names[layer]}.lora_{side}.weight"])
    assert plain.adapter_matrices("all") is None
    assert model.name == plain.name
    # it is its base and itself
    both = (base / "model.safetensors").read_bytes() + (adapter / "adapter_model.safetensors").read_bytes()
    assert model.fingerprint == hashlib.sha256(both).hexdigest() == model_fingerprint(adapter)
    assert model.tokenizer_fingerprint == plain.tokenizer_fingerprint
    own = settings_fingerprint(adapter)
    edit(adapter / "adapter_config.json", lora_alpha=7)
    assert settings_fingerprint(adapter) != own != settings_fingerprint(base)


# architecture, tied or not, adapter; False: its change is more than a low-rank one of linear layers in blocks
KINDS: list[tuple[str, bool, dict[str, Any], bool]] = [
    ("Llama", True, {"target_modules": ["lm_head", "q_proj"]}, True),
    ("Llama", True, {"target_modules": ["lm_head"]}, False),
    ("Llama", True, {"target_modules": ["embed_tokens", "q_proj"]}, True),
    ("Llama", True, {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, True),
    ("Llama", False, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, True),
    ("Llama", True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    ("Llama", True, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
    ("Llama", True, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, True),
    ("Llama", False, {"target_modules": ["q_proj", "o_proj"], "use_rslora": True}, True),
    ("Llama", False, {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3}}, True),
    ("Llama", False, {"target_modules": ["q_proj"], "lora_bias": True}, True),
    ("Qwen2", False, {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}, True),
    ("Qwen2", False, {"target_modules": ["q_proj", "o_proj"], "bias": "all"}, True),
    ("GPT2", True, {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}, True),
    ("GPT2", True, {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}, True),
    ("GPT2", True, {"target_modules": ["c_fc"], "use_dora": True}, True),
    ("Gemma2", True, {"target_modules": "all-linear"}, True),
    ("Mixtral", False, {"target_modules": "all-linear"}, False),
    ("Mixtral", False, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, False),
    ("Mixtral", False, {"target_modules": ["q_proj"]}, True),
    ("Qwen3Moe", False, {"target_modules": "all-linear"}, False),
    ("GptOss", False, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, False),
]


@pytest.mark.parametrize(("name", "tied", "kind", "linear"), KINDS)
def test_every_kind_answers_as_pefts_own_model(
    name: str, tied: bool, kind: dict[str, Any], linear: bool, make_model: Any, tmp_path: Path
) -> None:
    make_model(name, tied=tied).save_pretrained(tmp_path / "base")
    expected = save_adapter(tmp_path / "base", tmp_path / "adapter", **kind)
    network = load_whole(tmp_path / "adapter", torch.float32)
    with torch.no_grad():
        found = network.eval()(input_ids=IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    model = CausalLM(network)
    layers = model.linear_layers("all")
    # either the layers that it is on, with what it adds to each, or all: nothing between
    if linear:
        on = [each for each in network.adapted_layers.items() if each[1] is not None and "layers." in each[0]]
        assert model.adapter_matrices("all") is not None and model.default_space("closed") == "linear-matrix"
        assert len(layers) == len(on) or name == "GPT2"
    else:
        assert model.adapter_matrices("all") is None and len(layers) > 3
        assert model.default_space("closed") != "linear-matrix"
        assert "as if all weights had been trained" in model.remarks(["residual-matrix"])[-1]


def test_an_adapter_that_adds_biases_is_asked_and_not_trained_on(make_model: Any, tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", ["q_proj"], lora_bias=True)
    with pytest.raises(
        ModelError, match=r"adds biases \(lora_bias\) to layers without, such as model.layers.0"
    ):
        load_weights(tmp_path / "adapter")


def test_in_sixteen_bits_a_small_change_is_not_rounded_off(make_model: Any, tmp_path: Path) -> None:
    """Of weights around 1 a change below 2⁻⁹ is gone in bfloat16, which is what PEFT's own merge leaves."""
    from transformers import AutoModelForCausalLM

    base = make_model("Llama").to(torch.bfloat16)
    for layer in base.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data.uniform_(1, 2, generator=torch.Generator().manual_seed(0))
    base.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", ["q_proj", "down_proj"], scale=0.003)

    def as_peft_has_it() -> Any:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
        return peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")

    wanted, merged = as_peft_has_it().base_model.model, as_peft_has_it().merge_and_unload()
    own = load_whole(tmp_path / "adapter", torch.bfloat16)
    for name in own.adapted_layers:
        assert own.get_submodule(name).weight.dtype == torch.bfloat16
        # the same numbers, multiplied in float32
        layer, found, lost = (each.get_submodule(name).float() for each in (wanted, own, merged))
        read = layer.lora_A["default"].weight
        with torch.no_grad():
            answer = layer(read)
            change = (answer - layer.base_layer(read)).norm()
            assert (found(read) - answer).norm() < 0.02 * change
            assert (lost(read) - answer).norm() > 0.5 * change


def test_an_adapter_that_cannot_be_added_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's merge made wrong on purpose in one layer: the probe names it."""
    from peft.tuners.lora.layer import Linear

    plain = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 1.1 * plain(self, name))
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.q_proj gives something else") as caught:
        load_weights(adapter)
    assert caught.value.fix and "merge it into its base model yourself" in caught.value.fix


def test_parts_that_are_no_low_rank_ones_are_missed_too(make_model: Any, tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    out = tmp_path / "adapter"
    save_adapter(tmp_path / "base", out, ["q_proj"], modules_to_save=["lm_head"])
    weights = load_file(out / "adapter_model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if "lm_head" not in name},
        out / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=r"does not fit its base model .*lm_head"):
        load_weights(out)


def test_where_the_base_model_is(adapter: Path, base: Path, tmp_path: Path) -> None:
    known = model_fingerprint(adapter)
    edit(adapter / "adapter_config.json", base_model_name_or_path=f"/somewhere/else/{base.name}")
    assert model_fingerprint(adapter) == known  # both were moved together
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(
        ModelError, match="names the base model '/somewhere/else/base', which is not"
    ) as caught:
        load_model(adapter)
    assert caught.value.fix and "--model BASE --adapter" in caught.value.fix
    assert model_fingerprint(ModelSpec(moved, adapter)) == known
    assert model_fingerprint(adapter) == known  # remembered
    edit(adapter / "adapter_config.json", base_model_name_or_path=None)
    other = adapter.rename(tmp_path / "other")
    with pytest.raises(ModelError, match="names no base model"):
        load_model(other)
    edit(other / "adapter_config.json", base_model_name_or_path="some/model-of-the-hub")
    with pytest.raises(
        ModelError, match=r"adapter '.*other' names the hub model 'some/model-of-the-hub'"
    ) as caught:
        load_model(other)
    assert caught.value.fix and f"(--model some/model-of-the-hub --adapter {other})" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "is an adapter of kind IA3"),
        ({"task_type": "SEQ_CLS"}, "is an adapter for task SEQ_CLS"),
        ({"megatron_config": {"a": 1}}, "adapter of a Megatron model"),
        ({"alora_invocation_tokens": [3]}, "adapter that acts on some of the tokens"),
        ({"target_modules": ["nothing"]}, "does not fit its base model"),
        ({"target_modules": ["q_proj"]}, "it has, beside"),
        ({"target_modules": ["q_proj", "fc2", "fc1"]}, "it lacks 4 parts"),
        ({"r": 3}, "does not fit its base model .*: size mismatch for"),
    ],
)
def test_what_is_no_lora_adapter_of_this_base(adapter: Path, changes: dict, message: str) -> None:
    edit(adapter / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(ModelSpec(adapter, device="cpu"))
    assert caught.value.fix


def test_damaged_adapters_and_another_base(adapter: Path, make_model: Any, tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "llama")
    edit(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "llama"))
    with pytest.raises(ModelError, match="does not fit its base model") as caught:
        load_weights(adapter)
    assert caught.value.fix and "--model BASE --adapter" in caught.value.fix
    edit(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"weights of adapter .* cannot be read"):
        load_weights(adapter)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no weights \(adapter_model.safetensors"):
        load_weights(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(adapter)


def test_from_index_to_answer(adapter: Path, base: Path, corpus: str, tmp_path: Path) -> None:
    index = tmp_path / "run.stride"
    moved = base.rename(tmp_path / "moved")
    built = run_stride(f"index build {corpus} --model {moved} --adapter {adapter} --out {index}")
    assert built.code == 0, built.err
    fitted = run_stride(f"train --index {index} --device cpu --nulls 40 --rank 2")
    assert fitted.code == 0, fitted.err
    assert fitted.records[0]["space"] == "linear-matrix"
    asked = run_stride(f"query 'Ada number 3 lives in' --index {index} --top 3 --device cpu")
    assert asked.code == 0, asked.err
    assert len(asked.records[0]["hits"]) == 3
    # with another base it is another model
    other = Path(shutil.copytree(moved, tmp_path / "otherbase"))
    tensors = {name: 2 * value for name, value in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    wrong = run_stride(f"query 'Ada' --index {index} --model {other} --adapter {adapter}")
    assert wrong.code == 3 and "was built for model" in wrong.err
    none = run_stride(f"query 'Ada' --index {index} --adapter {moved}")
    assert none.code == 2 and "is no adapter" in none.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tied, kind", [("Llama4", False, None), *(each[:3] for each in KINDS if not each[3])]
)
def test_what_is_more_than_layers_of_blocks_is_attributed_too(
    name: str, tied: Any, kind: Any, make_model: Any, corpus: str, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    """Fused experts, routers, a tied head: what is left out, or how such adapters are read, is said."""
    network = make_model(name, tied=tied)
    network.resize_token_embeddings(len(tokenizer))
    for each in (network, tokenizer):
        each.save_pretrained(tmp_path / "base")
    model, said = ModelSpec(str(tmp_path / "base"), device="cpu"), "feed_forward.router (gives something else"
    if kind is not None:
        save_adapter(tmp_path / "base", tmp_path / "adapter", **kind)
        model = dataclasses.replace(model, adapter=str(tmp_path / "adapter"))
        said = "as if all weights had been trained"
    index = api.build([corpus], model=model, out=tmp_path / "run.stride")
    options = api.ClosedOptions(rank=2, space=None if kind else "linear-matrix+logit")
    api.fit_index(index.path, options, model=model)
    assert said in capsys.readouterr().err
    place, listed = api.WorkspacePath(index.path, model), api.QueryOptions(bottom=10)
    answer = api.query(place, "Ada number 3 lives in", listed)
    assert len(answer.supporters + answer.opposers) > 3 and np.isfinite(answer.solution.values).all()
