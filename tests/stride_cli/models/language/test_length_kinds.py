"""Models whose rotary angles depend on a batch's length: sequences are read as each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stride_cli import api
from stride_cli.data.batches import ChunkReader, consecutive_groups, little_padding, row_losses
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.errors import ModelError
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.layer_spaces import LinearMatrixSpace
from stride_cli.operators.steered_model import SteeredModel
from tests.tiny_chunks import MemoryIndex
from tests.tiny_models import long_rope_config, tiny_sizes

BOUNDARY = 24
LENGTHS = [10, 14, 56, 59, 24, 25, 56]


def long_rope() -> Any:
    return long_rope_config(97, BOUNDARY)


def dynamic_ntk() -> Any:
    rotary = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    sizes = tiny_sizes(num_key_value_heads=2) | {"max_position_embeddings": BOUNDARY}
    return transformers.LlamaConfig(**sizes, rope_parameters=rotary)


def made(config: Any) -> Any:
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


KINDS = [(long_rope, 2), (dynamic_ntk, 4)]


@pytest.mark.parametrize(("config", "kinds"), KINDS)
def test_losses_and_gradients_are_those_of_each_sequence_alone(
    config: Callable[[], Any], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = made(config())
    monkeypatch.setattr(CausalLM, "context_length", 64)  # dynamic NTK is for more than a configuration has
    model = CausalLM(network)
    assert model.length_kinds is not None and len(set(model.length_kinds(LENGTHS))) == kinds
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 97, length) for length in LENGTHS]
    scored = [(np.arange(len(row)) > 0).astype(np.float32) for row in ids]  # all but the first
    queries = QuerySet(ids, scored, [str(row) for row in range(len(ids))])
    layers = model.linear_layers("all")
    space = LinearMatrixSpace.from_bases(
        [torch.eye(layer.in_features) for layer in layers],
        [torch.eye(layer.out_features) for layer in layers],
    )
    groups = queries.groups(model, 10**6)
    assert sorted(np.concatenate(groups)) == list(range(len(ids)))
    for group in groups:
        batch = queries.batch(group)
        (gradients,), losses = gate_gradients(SteeredModel(model, [space], 2), batch)
        sums = row_losses(model, batch)
        for place, row in enumerate(group):
            own = made(config())  # which remembers no longer sequence
            weights = [own.get_submodule(name).weight for name in names(network, layers)]
            logits = own(input_ids=torch.from_numpy(ids[row])[None], use_cache=False).logits[0, :-1].double()
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[row])[1:])
            wanted = torch.cat([each.flatten() for each in torch.autograd.grad(loss, weights)])
            assert float(losses[place]) == pytest.approx(float(loss.detach()), rel=1e-5)
            assert float(sums[place]) == pytest.approx(float(loss.detach()) * (len(ids[row]) - 1), rel=1e-5)
            torch.testing.assert_close(
                -gradients[place], wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())
            )


def names(network: Any, layers: list[torch.nn.Module]) -> list[str]:
    known = {module: name for name, module in network.named_modules()}
    return [known[layer] for layer in layers]


def test_every_way_to_batch_keeps_kinds_apart() -> None:
    model = CausalLM(made(long_rope()))
    kinds = model.length_kinds
    assert kinds is not None
    lengths = np.random.default_rng(1).integers(2, 60, 50)
    reader = ChunkReader(MemoryIndex(40), model)
    reader._kinds = type(kinds)(int(np.median(reader.lengths)), False)
    ways = [
        (lengths, kinds, consecutive_groups(lengths, 400, kinds)),
        (lengths, kinds, little_padding(list(lengths), kinds)),
        (reader.lengths, reader._kinds, reader.plan(400)),
    ]
    for given, own, groups in ways:
        assert sorted(np.concatenate([np.asarray(group) for group in groups])) == list(range(len(given)))
        assert len(groups) > 2 and all(len(set(own(np.asarray(given)[group]))) == 1 for group in groups)


def test_greedy_generation_across_the_boundary() -> None:
    network = made(long_rope())
    network.generation_config.eos_token_id = network.config.eos_token_id = None
    prompts = [list(range(1, 20)), [7, 5, 3], list(range(30, 60))]
    for ids, found in zip(prompts, CausalLM(network).generate_together(prompts, 12), strict=True):
        for token in found:
            with torch.no_grad():
                assert int(network(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_a_model_that_padding_changes_is_refused(
    make_model: Callable[..., Any], corpus: str, saved_model: Path, tmp_path: Path
) -> None:
    """One that nobody knows of: it divides positions by the longest sequence's length from 32 tokens on."""
    network = make_model("Llama")
    model = CausalLM(network)
    model.check_padding(64)
    inner = network.model.rotary_emb.forward

    def forward(hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        length = position_ids.shape[-1]
        return inner(hidden, position_ids / length if length > 32 else position_ids)

    network.model.rotary_emb.forward = forward
    model = CausalLM(network)
    model.check_padding(32)
    index = api.build([corpus], model=saved_model, out=tmp_path / "run.stride")
    assert index.attributes["block_size"] == 64
    # where an index is opened, unless it has operators: before these are fitted it is done as well
    for look in (lambda: model.check_padding(64), lambda: Workspace.open(index, model)):
        with pytest.raises(ModelError, match="padded from 32 to 64 tokens, a sequence has other") as caught:
            look()
        assert caught.value.fix and "--block-size 32" in caught.value.fix
