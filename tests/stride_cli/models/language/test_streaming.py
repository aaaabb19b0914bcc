"""Models whose blocks' weights stay on disk: the same numbers as any other way, and little memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stride_cli.data.batches import pad_batch
from stride_cli.errors import ModelError
from stride_cli.models.language import checkpoint, streaming
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.linear_layers import layer_widths
from stride_cli.models.loading import Opener, load_model
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.layer_spaces import LayerMatrixSpace
from stride_cli.operators.spaces import SPACES
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.sgd import initial_space
from tests.stride_cli.commands.conftest import run_stride
from tests.tiny_models import VOCAB, configurations, random_model, tiny_sizes

pytest.importorskip("accelerate")

CPU = torch.device("cpu")
# heads tied (Qwen2 below, GPT-2, Gemma 2) and not; windows, soft caps; experts, fused when they are loaded or
# one by one, and shared
FAMILIES = ("Llama", "Qwen2", "GPT2", "Gemma2", "Gemma3", "Mixtral", "Qwen2Moe", "GptOss", "DeepseekV3")
Loaded = Callable[..., CausalLM]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """loaded(family, dtype, streamed=…): a tiny model that was saved in bf16 and in several files."""

    def load(name: str, dtype: torch.dtype = torch.float32, *, streamed: bool = True) -> CausalLM:
        path = tmp_path / name
        if not path.exists():
            model = random_model(name).to(torch.bfloat16)
            if name == "Qwen2":
                model.config.tie_word_embeddings = True
                model.tie_weights()
            model.save_pretrained(path, max_shard_size="30KB")
            assert len(list(path.glob("*.safetensors"))) > 1
        source = find_checkpoint(path)
        if streamed:
            return CausalLM(checkpoint._load_streamed(source, dtype, CPU), spec=ModelSpec(path))
        return CausalLM(checkpoint._load_weights(source, dtype), spec=ModelSpec(path))

    return load


def steered(model: CausalLM) -> SteeredModel:
    """In the residual stream, at every linear layer inside, and at the logits."""
    sizes: dict[str, Any] = {"d_model": model.d_model, "vocab_size": VOCAB, "rank": 4, "seed": 1}
    spaces = [initial_space(name, n_buckets=VOCAB, **sizes) for name in ("residual-matrix", "logit")]
    cls = SPACES["linear-matrix"]
    assert issubclass(cls, LayerMatrixSpace)
    random = torch.Generator().manual_seed(3)
    widths = [layer_widths(layer) for layer in model.linear_layers("all")]
    V = [torch.randn(4, read, generator=random) / read**0.5 for read, _ in widths]
    U = [torch.randn(given, 3, generator=random) / given**0.5 for _, given in widths]
    spaces.append(cls.from_bases(V, U))
    return SteeredModel(model, [space.requires_grad_(False) for space in spaces], 1)


def some_batch() -> Any:
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCAB, length) for length in (20, 13, 17)]
    return pad_batch(np.arange(3), rows, [np.ones(len(row)) for row in rows])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_whole_model(name: str, loaded: Loaded) -> None:
    whole, model = loaded(name, streamed=False), loaded(name)
    assert all(each.is_meta for each in model.blocks.parameters())
    batch = some_batch()
    with torch.no_grad():
        final = model.continue_from(model.hidden(batch.ids, 2), 2)
        assert torch.equal(
            model.logits(final), whole.logits(whole.continue_from(whole.hidden(batch.ids, 2), 2))
        )
    for drawn in (None, np.random.default_rng(1).random(batch.ids.shape)):
        wanted, loss = gate_gradients(steered(whole), batch, sampled=drawn)
        found, found_loss = gate_gradients(steered(model), batch, sampled=drawn)
        for this, that in zip([*found, found_loss], [*wanted, loss], strict=True):
            assert float(that.norm()) > 0 and relative(this, that) < 1e-6
    assert model.generate([3, 5, 7], 8) == whole.generate([3, 5, 7], 8) != []
    assert all(each.is_meta for each in model.blocks.parameters())


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of blocks' weights in memory, whenever one has come; the last is the most that there were."""
    refs: list[tuple[StorageWeakRef, int]] = []
    most = [0]
    for cls in (streaming._Weight, streaming._Note):
        plain = cls.fetched

        def fetched(self: Any, device: torch.device, plain: Any = plain) -> torch.Tensor:
            found: torch.Tensor = plain(self, device)
            storage = found.untyped_storage()
            stored = (self if isinstance(self, streaming._Weight) else self.weight).stored
            if storage.data_ptr() == stored.untyped_storage().data_ptr():
                return found  # mapped from its file
            refs[:] = [each for each in refs if not each[0].expired()]
            refs.append((StorageWeakRef(storage), storage.nbytes()))
            most[0] = max(most[0], sum(size for _, size in refs))
            return found

        monkeypatch.setattr(cls, "fetched", fetched)
    return most


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_no_more_than_two_blocks_are_there_at_once(name: str, alive: list[int], tmp_path: Path) -> None:
    import transformers

    config = configurations()[name](transformers)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 12, 128, 256
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "deep", max_shard_size="500KB"
    )
    model = CausalLM(checkpoint._load_streamed(find_checkpoint(tmp_path / "deep"), torch.float32, CPU))
    a_block = 4 * sum(each.numel() for each in model.blocks[0].parameters())
    drawn = np.random.default_rng(1).random((3, 20))
    gate_gradients(steered(model), some_batch(), sampled=drawn)
    model.generate([1, 2, 3], 3)
    # of 12; fused experts lie on disk in the precision that is computed in
    assert a_block // (1 if name == "Llama" else 20) <= alive[0] <= 2 * a_block


def test_threads_may_run_the_same_blocks(loaded: Loaded) -> None:
    model = loaded("Llama")
    space, batch = steered(model), some_batch()
    wanted = gate_gradients(space, batch)[0]
    wrong: list[Any] = []

    def run() -> None:
        for _ in range(5):
            found = gate_gradients(space, batch)[0]
            wrong.extend(1 for this, that in zip(found, wanted, strict=True) if not torch.equal(this, that))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all(each.is_meta for each in model.blocks.parameters())


def test_it_is_done_where_weights_are_larger_than_memory(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decided(wanted: bool | None = None, dtype: torch.dtype = torch.float32) -> bool:
        return streaming.is_streamed(find_checkpoint(saved_llama), dtype, CPU, wanted)

    assert not decided() and decided(True)
    files = sorted(saved_llama.glob("*.safetensors"))
    count, kinds = streaming.stored_numbers(files)
    assert kinds == {torch.bfloat16}
    monkeypatch.setattr(streaming, "available_bytes", lambda: 4 * count)
    assert decided() and not decided(False)
    assert "they stay on disk" in capsys.readouterr().err
    assert not decided(dtype=torch.bfloat16)  # mapped, as they are
    monkeypatch.setattr(streaming, "available_bytes", lambda: 6 * count)
    assert not decided()
    assert capsys.readouterr().err == ""


def test_a_device_without_room_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, card = random_model("Llama"), torch.device("cuda")

    def full(where: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    placed: list[torch.device] = []
    monkeypatch.setattr(model, "to", full)
    monkeypatch.setattr(checkpoint, "stream_from_memory", lambda model, where: placed.append(where))
    monkeypatch.setattr(streaming, "free_bytes", lambda device: 10**9)
    with pytest.raises(ModelError, match="no room for the model's weights on cuda") as refused:
        checkpoint._place(model, card, None)
    assert "--stream" in str(refused.value.fix) and placed == []
    monkeypatch.setattr(streaming, "free_bytes", lambda device: 10**4)
    checkpoint._place(model, card, None)
    assert "they stay in memory" in capsys.readouterr().err and placed == [card]
    with pytest.raises(ModelError):
        checkpoint._place(model, card, False)


@pytest.fixture
def saved_llama(saved_model: Path, tmp_path: Path, tokenizer: Any) -> Path:
    """A tiny Llama in several files, with the saved model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    own = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0}
    config = LlamaConfig(**tiny_sizes(num_key_value_heads=2) | own)
    path = tmp_path / "llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="30KB")
    tokenizer.save_pretrained(path)
    return path


def test_the_choice_reaches_whoever_loads_the_model(saved_llama: Path) -> None:
    def is_streamed(**options: Any) -> bool:
        model: Any = load_model(ModelSpec(saved_llama, device="cpu", dtype="fp32", **options))
        return next(model.blocks.parameters()).is_meta

    assert not is_streamed() and not is_streamed(stream=False) and is_streamed(stream=True)
    spec = ModelSpec(saved_llama, device="cpu", stream=True)
    beside: Any = Opener.like(load_model(spec)).load(str(saved_llama))
    assert next(beside.blocks.parameters()).is_meta


@pytest.mark.slow
def test_from_index_to_query(saved_llama: Path, corpus: str, tmp_path: Path) -> None:
    """Operators, answers and what is read are the whole model's; a plan and `model info` say what they do."""
    answers = []
    for flag in ("--no-stream", "--stream"):
        index = tmp_path / f"{flag[2:]}.stride"
        for line in (
            f"index build {corpus} --model {saved_llama} --out {index}",
            f"train --index {index} --device cpu {flag}",
            f"STRIDE_QUERY_MEASURE=exact query 'Ada number 3 lives in' --read 5 --index {index} --device cpu "
            f"{flag}",
        ):
            found = run_stride(f"{line} --json")
            assert found.code == 0, found.err
        (answer,) = found.records
        answer["info"] = run_stride(f"model info {saved_llama} {flag} --json").records[0]
        answers.append(answer)
    whole, streamed = answers
    assert streamed["info"] == whole["info"] and streamed["response"] == whole["response"]
    assert [hit["document"] for hit in streamed["hits"]] == [hit["document"] for hit in whole["hits"]]
    for this, that in zip(streamed["hits"], whole["hits"], strict=True):
        assert this["influence"] == pytest.approx(that["influence"], rel=1e-5)
