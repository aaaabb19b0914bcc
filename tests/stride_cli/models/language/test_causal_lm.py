"""The parts of a model add up to the model, for every architecture and layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stride_cli.errors import ModelError, NumericalError, QueryError
from stride_cli.models.language.causal_lm import CausalLM
from tests.tiny_models import DECODERS, EXPERTS

Maker = Callable[..., Any]


def some_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*DECODERS, *EXPERTS])
def test_parts_equal_the_whole_at_every_layer(name: str, make_model: Maker) -> None:
    model = make_model(name)
    lm = CausalLM(model)
    assert (lm.n_layers, lm.d_model, lm.vocab_size) == (3, 32, 97)
    ids = some_ids(3, 20)  # longer than the sliding windows
    with torch.no_grad():
        whole = model(ids).logits
    for layer in range(lm.n_layers + 1):
        hidden = lm.hidden(ids, layer)
        assert hidden.shape == (3, 20, 32)
        assert torch.equal(lm.logits(lm.continue_from(hidden, layer)), whole)


@pytest.mark.parametrize("name", DECODERS)
def test_gradient_of_the_continuation(name: str, make_model: Maker) -> None:
    lm = CausalLM(make_model(name).double())
    hidden = lm.hidden(some_ids(2, 10), 1).requires_grad_()
    probe = torch.randn(2, 10, 97, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def value(point: torch.Tensor) -> torch.Tensor:
        return (lm.logits(lm.continue_from(point, 1)) * probe).sum()

    (gradient,) = torch.autograd.grad(value(hidden), hidden)
    step = 1e-3  # norms round to fp32 inside
    with torch.no_grad():
        slope = (value(hidden + step * direction) - value(hidden - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-2)


@pytest.mark.parametrize("name", [*DECODERS, *EXPERTS])
def test_padding_on_the_right_changes_nothing(name: str, make_model: Maker) -> None:
    network = make_model(name)
    lm = CausalLM(network)
    short = some_ids(1, 7)
    padded = torch.cat([short, torch.zeros((1, 20), dtype=torch.int64)], 1)
    with torch.no_grad():
        wanted = network(short).logits
        for layer in (0, 2):
            found = lm.logits(lm.continue_from(lm.hidden(padded, layer), layer))[:, :7]
            assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    lm.check_padding(64)


def test_threads_do_not_disturb_each_other(make_model: Maker) -> None:
    lm = CausalLM(make_model("Llama"))
    ids = some_ids(2, 15)
    hidden = lm.hidden(ids, 1)
    wanted = lm.continue_from(hidden, 1)
    wrong: list[int] = []

    def continue_often() -> None:
        wrong.extend(1 for _ in range(30) if not torch.equal(lm.continue_from(hidden, 1), wanted))

    def capture_often() -> None:
        for length in range(20, 60):  # each a new length: blocks are passed through meanwhile
            lm.prepare(length)
            lm.hidden(ids, 2)

    threads = [threading.Thread(target=each) for each in (continue_often, capture_often, continue_often)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["Llama", "NanoChat", "GPT2", "Mistral", "Gemma3", "GptOss"])
def test_greedy_generation(name: str, make_model: Maker) -> None:
    model = make_model(name)
    lm = CausalLM(model)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    generated = lm.generate([5, 6, 7], 12)
    ids = [5, 6, 7]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generated == ids[3:]
    # together with others of any length, and one ends before they do
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [5] * 63, list(range(1, 21)), [5, 6]]
    for end in (None, generated[4]):
        model.generation_config.eos_token_id = end
        alone = [lm.generate(prompt, 12) for prompt in prompts]
        assert lm.generate_each(prompts, 12) == lm.generate_together(prompts, 12) == alone
    assert alone[0] == generated[: generated.index(generated[4])]


def test_generation_ends_with_the_context(make_model: Maker) -> None:
    lm = CausalLM(make_model("Llama"))
    lm.model.generation_config.eos_token_id = lm.model.config.eos_token_id = None
    assert len(lm.generate([3] * 60, 50)) == 4
    with pytest.raises(QueryError, match="context is 64"):
        lm.generate([3] * 64, 1)
    with pytest.raises(QueryError, match="no token"):
        lm.generate([], 1)


def test_weights_that_are_not_finite(make_model: Maker) -> None:
    model = make_model("Llama")
    good = CausalLM(model)
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        CausalLM(model)
    with pytest.raises(NumericalError, match="not finite"):
        good.generate([1, 2], 3)


def test_architectures_that_are_refused() -> None:
    import transformers as tf

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    bloom = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ModelError, match="batch size"):
        CausalLM(bloom)
    bert = tf.BertConfig(**sizes, num_hidden_layers=2, intermediate_size=64, is_decoder=False)
    with pytest.raises(ModelError, match="not causal"):
        CausalLM(tf.BertForMaskedLM(bert))
    t5 = tf.T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder-decoder"):
        CausalLM(tf.T5ForConditionalGeneration(t5))
    headless = tf.LlamaModel(
        tf.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=4, intermediate_size=32)
    )
    with pytest.raises(ModelError, match="no output head"):
        CausalLM(headless)


def test_something_between_the_blocks_and_the_head_is_noticed(make_model: Maker) -> None:
    """A model whose forward pass does arithmetic that is in no module must not be measured wrongly."""
    model = make_model("Llama")
    original = model.model.forward

    def doubling(**inputs: Any) -> Any:
        output = original(**inputs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = doubling
    with pytest.raises(ModelError, match="does not give the model's own logits"):
        CausalLM(model)
