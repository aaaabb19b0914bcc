"""Linear layers inside the blocks: numbered as they run, visited in one thread only, unused without harm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from index_format.errors import IndexMismatch
from stride_cli.data.batches import Batch
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.linear_layers import is_linear, layer_widths
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.layer_spaces import LayerMatrixSpace, LinearMatrixSpace, OutputMatrixSpace
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.research.paper.exact_response import measure_exact
from tests.tiny_models import DECODERS, EXPERTS

Maker = Callable[..., Any]


def a_space(model: CausalLM) -> LinearMatrixSpace:
    torch.manual_seed(1)
    widths = [layer_widths(layer) for layer in model.linear_layers("all")]
    space = LinearMatrixSpace.from_bases(
        [torch.randn(2, read) for read, _ in widths], [torch.randn(given, 3) for _, given in widths]
    )
    assert isinstance(space, LinearMatrixSpace)
    return space


def named_layers(network: torch.nn.Module, model: CausalLM) -> list[str]:
    names = {module: name for name, module in network.named_modules()}
    return [names[layer] for layer in model.linear_layers("all")]


def a_batch() -> Batch:
    ids = torch.arange(14).view(2, 7) % 23
    weights = torch.ones(2, 7)
    weights[:, 0] = 0  # nothing predicts the first token
    return Batch(np.arange(2), ids, weights)


@pytest.mark.parametrize("name", DECODERS)
def test_first_order_and_steered_responses_agree(name: str, make_model: Maker) -> None:
    """OPT declares its projections in another order than it calls them in."""
    model = CausalLM(make_model(name))
    space = a_space(model)
    gates = np.random.default_rng(0).normal(0, 1e-2, (5, space.gate_size)).astype(np.float32)
    operators = Operators(
        [space.requires_grad_(False)], [gates], 2, "closed", np.ones(1, np.uint8), step=3e-3
    )
    steered = SteeredModel.of(model, operators)
    linear, exact = measure_linear(steered, a_batch()), measure_exact(steered, a_batch())
    np.testing.assert_allclose(exact, linear, rtol=0.05, atol=0.02 * np.abs(linear).max())


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((n, LinearMatrixSpace) for n in [*DECODERS, *EXPERTS]), *((n, OutputMatrixSpace) for n in DECODERS)],
)
def test_gradients_equal_autograd_in_the_weights(
    name: str, kind: type[LayerMatrixSpace], make_model: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V = U = 1: a gate's gradient is then that of the layer's weights, in every layer that there is; or of
    the last block's that write, where the passes begin with that block."""
    monkeypatch.setattr("stride_cli.models.linear_layers.steered_blocks", lambda count: [count - 1])
    network = make_model(name)
    model, batch = CausalLM(network), a_batch()
    layers = model.linear_layers(kind.which)
    inner = [each for each in model.blocks.modules() if is_linear(each) and not is_router(each)]
    some = kind is OutputMatrixSpace
    assert set(layers) == set(inner) or (some and len(layers) == 2)
    widths = [layer_widths(layer) for layer in layers]
    space = kind.from_bases(
        [torch.eye(read) for read, _ in widths], [torch.eye(given) for _, given in widths]
    )
    steered = SteeredModel(model, [space], 2)
    assert steered.first_block == 2 * some
    (gradient,), losses = gate_gradients(steered, batch)
    for row in range(len(batch.ids)):
        ids = batch.ids[row : row + 1]
        for layer in layers:
            layer.weight.requires_grad_(True)
        logits = network(input_ids=ids, use_cache=False).logits[0, :-1].double()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        expected = torch.autograd.grad(loss, [layer.weight for layer in layers])
        assert float(loss.detach()) == pytest.approx(float(losses[row]), rel=1e-5)
        parts = gradient[row].split([read * given for read, given in widths])
        for layer, found, own in zip(layers, parts, expected, strict=True):
            wanted = -(own.T if is_conv(layer) else own)
            torch.testing.assert_close(
                found.view(wanted.shape), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())
            )


@pytest.mark.parametrize("name", DECODERS)
def test_two_layers_of_a_block_write_into_the_residual_stream(name: str, make_model: Maker) -> None:
    """What is added to what they give comes out of their block. Some models normalise it before."""
    model, batch, added, found = CausalLM(make_model(name)), a_batch(), torch.linspace(-1, 2, 32), set()
    before = model.hidden(batch.ids, model.n_layers)
    for layer in (each for each in model.blocks[-1].modules() if is_linear(each)):
        if layer_widths(layer)[1] == 32:
            handle = layer.register_forward_hook(lambda module, args, output: output + added)
            moved = (model.hidden(batch.ids, model.n_layers) - before) @ added / added.square().sum()
            handle.remove()
            found |= {layer} if float(moved.mean()) > 0.5 else set()
    writers = model.linear_layers("outputs")
    assert len(writers) == 2 * model.n_layers and set(model.linear_layers("mlp")) < set(writers)
    assert set(writers[-2:]) == found or name in {"Gemma2", "Gemma3", "Gemma4", "Olmo2"}


def test_operators_of_other_layers_are_refused(make_model: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an earlier release, which steered all blocks."""
    ones = [torch.ones(1, 1)] * 6
    space = OutputMatrixSpace.from_bases(ones, ones)
    operators = Operators([space], [np.zeros((5, 6), np.float32)], 2, "closed", np.ones(1, np.uint8), step=1)
    assert SteeredModel.of(CausalLM(make_model("Llama")), operators).first_block == 0
    monkeypatch.setattr("stride_cli.models.linear_layers.steered_blocks", lambda count: [2])
    with pytest.raises(IndexMismatch, match=r"act at 6 linear layers \(expected 2\)") as refused:
        SteeredModel.of(CausalLM(make_model("Llama")), operators)
    assert refused.value.fix == "fit them again: stride train --overwrite"


def test_the_default_space_goes_by_training_and_size(make_model: Maker, monkeypatch: Any) -> None:
    model = CausalLM(make_model("Llama"))  # 8 L d² = 24,576
    for pretrained, most, wanted in ((True, 0, "mlp"), (False, 24_576, "linear"), (False, 24_575, "output")):
        monkeypatch.setattr(CausalLM, "pretrained", pretrained)
        monkeypatch.setattr("stride_cli.corpus.gate_budget._SMALL", most)
        assert model.default_space("closed") == f"{wanted}-matrix+logit+token-logit+pair-logit"


def is_router(module: torch.nn.Module) -> bool:
    return "Router" in type(module).__name__  # Llama 4's gives two tensors, and is an nn.Linear


def is_conv(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def test_experts_of_a_list_are_left_out(make_model: Maker) -> None:
    """Each sees some of the tokens: no rows and positions to tell them by."""
    network = make_model("Llama")
    for block in network.model.layers:
        block.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        inner = block.mlp.forward

        def forward(hidden: Any, inner: Any = inner, experts: Any = block.mlp.experts) -> Any:
            own = hidden + 0.1
            own[:, ::2] = experts[0](hidden[:, ::2])
            return inner(own)

        block.mlp.forward = forward
    model = CausalLM(network)
    layers = named_layers(network, model)
    assert len(layers) == 21 and not any("experts" in name for name in layers)


def test_what_is_left_out_is_said(make_model: Maker) -> None:
    """Fused experts, a router that gives a tuple, a layer whose weight is used without a call."""
    network = make_model("Llama4")
    for block in network.model.layers:
        block.self_attn.decay = torch.nn.Linear(32, 32, bias=False)
        inner = block.self_attn.forward

        def forward(*args: Any, inner: Any = inner, decay: Any = block.self_attn.decay, **given: Any) -> Any:
            attended, *rest = inner(*args, **given)
            return attended @ decay.weight.T, *rest

        block.self_attn.forward = forward
    model = CausalLM(network)
    said = model.remarks(["mlp-matrix", "logit"])
    assert len(said) == 3 and model.remarks(["residual-matrix"]) == []
    for name, why in (
        ("feed_forward.experts", "several matrices in one weight"),
        ("feed_forward.router", "gives something else than its product"),
        ("self_attn.decay", "used without a call"),
    ):
        assert any(f"left out of the operators: {name} (" in each and why in each for each in said)


def test_another_threads_pass_is_not_visited(make_model: Maker) -> None:
    model = CausalLM(make_model("Llama"))
    ids = torch.arange(10).view(2, 5)
    wanted = model.hidden(ids, 3)
    found: list[torch.Tensor] = []
    with model.at_layers("all", 4, lambda number, read, given: given + 1):
        other = threading.Thread(target=lambda: found.append(model.hidden(ids, 3)))
        other.start()
        other.join()
    assert len(found) == 1 and torch.equal(found[0], wanted)


def test_layers_whose_output_is_unused_or_that_do_not_run(make_model: Maker) -> None:
    network = make_model("Llama")
    for block in network.model.layers:
        block.mlp.idle = torch.nn.Linear(4, 4)
        block.mlp.spare = torch.nn.Linear(32, 6)
        inner = block.mlp.forward

        def forward(hidden: torch.Tensor, inner: Any = inner, spare: Any = block.mlp.spare) -> torch.Tensor:
            spare(hidden)
            return inner(hidden)

        block.mlp.forward = forward
    model = CausalLM(network)
    layers = named_layers(network, model)
    assert not any("idle" in name for name in layers) and sum("spare" in name for name in layers) == 3
    space = a_space(model)
    (gradient,), _ = gate_gradients(SteeredModel(model, [space], 2), a_batch())
    for name, part in zip(layers, gradient.split(6, dim=1), strict=True):
        assert bool((part == 0).all()) == ("spare" in name)
