from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stride_cli.data.batches import pad_batch
from stride_cli.operators import head
from stride_cli.research.methods.gradients.capture import Capture, Factors
from stride_cli.research.methods.gradients.passes import label_uniforms


def _matrices(capture, batch, **options):
    """Gradients by layer name, (B, n_out, n_in)."""
    found = {layer.name: torch.zeros(len(batch.rows), layer.n_out, layer.n_in) for layer in capture.layers}

    def visit(factors: Factors) -> None:
        found[capture.layers[factors.layer].name][factors.rows] += factors.gradients()
        outside = factors.outputs[~factors.active]
        assert not outside.any()  # nothing a scored prediction does not read has a gradient

    outcome = capture.run(batch, visit, **options)
    return found, outcome


def _batch(lengths, vocabulary=41, seed=0, weights=None):
    random = np.random.default_rng(seed)
    ids = [random.integers(0, vocabulary, length) for length in lengths]
    given = [np.ones(length, np.float32) for length in lengths] if weights is None else weights
    return pad_batch(np.arange(len(ids)), ids, given)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    power=st.sampled_from([0.0, 0.5, 1.0]),
    head_bytes=st.sampled_from([1, 4000, 1 << 28]),
)
def test_equals_autograd_whatever_the_batch(nanochat_task, autograd, lengths, seed, power, head_bytes):
    random = np.random.default_rng(seed)
    weights = [(random.random(length) < 0.7).astype(np.float32) for length in lengths]
    batch = _batch(lengths, seed=seed, weights=weights)
    capture = Capture(nanochat_task.model, batch)
    kept, head._BYTES = head._BYTES, head_bytes
    try:
        found, outcome = _matrices(capture, batch, power=power)
    finally:
        head._BYTES = kept
    rows = [(batch.ids[row, :length].numpy(), weights[row]) for row, length in enumerate(lengths)]
    expected = autograd(
        nanochat_task, rows, [f"{layer.name}.weight" for layer in capture.layers], power=power
    )
    together = torch.cat([found[layer.name].flatten(1) for layer in capture.layers], dim=1)
    np.testing.assert_allclose(together, expected, rtol=1e-3, atol=2e-5 * max(1, np.abs(expected).max()))
    silent = [row for row, weight in enumerate(weights) if not weight[1:].any()]
    assert not together[silent].any()
    assert not outcome.loss[silent].any()


def test_drawn_labels_estimate_the_gauss_newton_matrix(softmax):
    """E[g gᵀ] over labels drawn from the model; and the same labels whatever the batch."""
    task = softmax.task
    batch = task.chunks.batch(np.arange(20))
    capture = Capture(task.model, batch)
    total = np.zeros((15, 15))
    for draw in range(600):
        found, outcome = _matrices(capture, batch, uniform=label_uniforms(0, batch, draw), power=0.5)
        flat = found["head"].flatten(1).double().numpy()
        total += flat.T @ flat / 20 / 600
    inputs = softmax.inputs[:20]
    p = (inputs @ softmax.weight.T).softmax(-1)
    spread = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nij,nk,nl->ikjl", spread, inputs, inputs).reshape(15, 15).numpy() / 20
    assert np.abs(total - expected).max() < 0.1 * np.abs(expected).max()
    true = -torch.log(p[torch.arange(20), softmax.labels[:20]])
    np.testing.assert_allclose(outcome.loss, true, rtol=1e-4)  # of the true labels
    np.testing.assert_allclose(outcome.doubt, 1 - torch.exp(-true), rtol=1e-4)
    one = task.chunks.batch(np.arange(7, 8))
    np.testing.assert_array_equal(label_uniforms(0, one, 3)[0], label_uniforms(0, batch, 3)[7])


def test_the_model_is_left_as_it_was(nanochat_task):
    batch = _batch([6, 4])
    before = nanochat_task.model.logits(
        nanochat_task.model.continue_from(nanochat_task.model.hidden(batch.ids, 0), 0)
    )
    capture = Capture(nanochat_task.model, batch)
    _matrices(capture, batch)
    with pytest.raises(ZeroDivisionError):
        capture.run(batch, lambda found: 1 / 0)
    after = nanochat_task.model.logits(
        nanochat_task.model.continue_from(nanochat_task.model.hidden(batch.ids, 0), 0)
    )
    assert torch.equal(before, after)
    assert not after.requires_grad
    assert all(not layer.module._forward_hooks for layer in capture.layers)


def test_tied_head_has_the_heads_part_only():
    """And bf16 weights: gradients come in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from stride_cli.models.language.causal_lm import CausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    for kind in (torch.float32, torch.bfloat16):
        model = CausalLM(network.to(kind))
        batch = _batch([6, 4])
        capture = Capture(model, batch)
        assert sum(layer.is_head for layer in capture.layers) == 1
        found, _ = _matrices(capture, batch)
        with torch.no_grad():
            final = model.continue_from(model.hidden(batch.ids, 0), 0)
            p = model.logits(final).float().softmax(-1)
        error = p[0, :5] - nn.functional.one_hot(batch.ids[0, 1:], 41)
        expected = error.T @ final[0, :5].float() / 5
        assert found["lm_head"].dtype == torch.float32
        tolerance = 1e-5 if kind == torch.float32 else 2e-2
        np.testing.assert_allclose(found["lm_head"][0], expected, atol=tolerance)


def _architectures(tf):
    sizes = {"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    gated = {**sizes, **ends, "intermediate_size": 48, "max_position_embeddings": 32}
    return {
        "Qwen2": tf.Qwen2Config(**gated, num_key_value_heads=2),
        "GPTNeoX": tf.GPTNeoXConfig(**gated),
        "Granite": tf.GraniteConfig(**gated, logits_scaling=3.0, tie_word_embeddings=False),
        "Mixtral": tf.MixtralConfig(**gated, num_local_experts=3, num_key_value_heads=2),
        "OPT": tf.OPTConfig(**sizes, **ends, ffn_dim=48, max_position_embeddings=32, word_embed_proj_dim=16),
    }


@pytest.mark.parametrize("name", ["Qwen2", "GPTNeoX", "Granite", "Mixtral", "OPT"])
def test_architectures(name, autograd):
    """Biases, parallel blocks, scaled logits, projections around the blocks, experts (whose weights are no
    linear layers)."""
    import transformers

    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.research.methods.gradients.passes import open_capture

    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(_architectures(transformers)[name])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = _batch([6, 3, 5])
    model = CausalLM(network)
    capture = Capture(model, batch, layers="body")
    found, _ = _matrices(capture, batch)
    rows = [(batch.ids[row, :length].numpy(), np.ones(length)) for row, length in enumerate((6, 3, 5))]
    for layer in capture.layers:
        expected = autograd(Workspace(None, model, None, 0), rows, [f"{layer.name}.weight"])
        gradients = found[layer.name][..., : layer.module.in_features].flatten(1)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(gradients, expected, rtol=1e-3, atol=1e-5 * scale, err_msg=layer.name)

    class Chunks:
        @staticmethod
        def batch(chosen):
            return batch

    class Index:
        attributes = MappingProxyType({})

    chosen = open_capture(Workspace(Index, model, Chunks, 0), None).layers
    assert all(not layer.is_head for layer in chosen)
    assert len(chosen) == {"Qwen2": 6, "GPTNeoX": 4, "Granite": 6, "Mixtral": 8, "OPT": 4}[name]
