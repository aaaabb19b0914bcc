"""Gate gradients against finite differences and autograd, and their independence of batching."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stride_cli.data.batches import ChunkReader, pad_batch
from stride_cli.errors import NumericalError
from stride_cli.models.linear_layers import layer_widths
from stride_cli.operators.bases import label_uniforms
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.layer_spaces import LayerMatrixSpace
from stride_cli.operators.pair_space import PairLogitSpace
from stride_cli.operators.spaces import SPACES, space_from_arrays
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.sgd import initial_space

INSIDE = ("mlp-matrix", "output-matrix", "linear-matrix")  # of which a sum has one
NAMES = ("residual", "residual-matrix", "logit", "token-logit", "pair-logit", *INSIDE)
LAYER = 2


def make_space(model, name: str, buckets: int = 4096):
    cls = SPACES[name]
    if issubclass(cls, LayerMatrixSpace):
        generator = torch.Generator().manual_seed(3)
        widths = [layer_widths(layer) for layer in model.linear_layers(cls.which)]
        V = [torch.randn(4, read, generator=generator) / read**0.5 for read, _ in widths]
        U = [torch.randn(given, 3, generator=generator) for _, given in widths]
        layers = None
        if name == "linear-matrix":  # two matrices a layer, as with adapters
            V = [v[rows] for v in V for rows in (slice(1), slice(1, 4))]
            U, layers = [u for u in U for _ in range(2)], [number // 2 for number in range(2 * len(U))]
        return cls.from_bases(V, U, layers).requires_grad_(False)
    if name == "pair-logit":  # half of all pairs
        V = model.vocab_size
        generator = torch.Generator().manual_seed(3)
        pairs = torch.nonzero(torch.rand(V * V, generator=generator) < 0.5).flatten()
        start = torch.searchsorted(pairs, torch.arange(V + 1) * V)
        return PairLogitSpace(start, pairs % V, 0.5 + torch.rand(len(pairs), generator=generator))
    return initial_space(
        name, d_model=model.d_model, vocab_size=model.vocab_size, rank=5, n_buckets=buckets, seed=3
    ).requires_grad_(False)


def steered_loss(model, space, batch, gates) -> torch.Tensor:
    """Loss of every row under its own gates, written out plainly; float64 from the logits on."""
    hidden = model.hidden(batch.ids, LAYER)
    if space.site == "residual":
        hidden = hidden + space(hidden, gates)
    handles = []
    if space.site == "layers":
        every = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
        names = {"mlp": ("fc2",), "outputs": ("o_proj", "fc2"), "all": every}[space.which]
        found = [
            getattr(block.self_attn if "proj" in name else block.mlp, name)
            for block in model.blocks
            for name in names
        ]
        for number, layer in enumerate(found):
            handles.append(
                layer.register_forward_hook(
                    lambda module, args, output, number=number: output + space(args[0], gates, number)
                )
            )
        final = model.continue_from(model.hidden(batch.ids, 0), 0)
    else:
        final = model.continue_from(hidden, LAYER)
    for handle in handles:
        handle.remove()
    logits = model.head(final)
    if space.site == "logit":
        logits = logits + space(space.reads(final, model.hidden(batch.ids, 0), batch.ids), gates)
    logits = 15 * torch.tanh(logits / 15)  # NanoChat's soft cap, behind the operators
    log_p = logits[:, :-1].double().log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
    return -(log_p * batch.weights[:, 1:]).sum(1) / batch.scored.clamp_min(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("buckets", [4096, 16])
def test_gate_gradient_equals_autograd_through_the_steered_model(
    model, chunks: ChunkReader, name: str, buckets: int
) -> None:
    space = make_space(model, name, buckets)
    batch = chunks.batch(np.arange(4))
    (gradient,), loss = gate_gradients(SteeredModel(model, [space], LAYER), batch)
    gates = torch.zeros(4, space.gate_size, requires_grad=True)
    losses = steered_loss(model, space, batch, gates)
    losses.sum().backward()
    torch.testing.assert_close(gradient, -gates.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, losses.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["logit", "token-logit", "pair-logit"])
@pytest.mark.parametrize("threads", [1, 3])
def test_loops_add_up_what_products_do(
    model, chunks: ChunkReader, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device features of each token are added up in its bucket, and pairs' entries are listed."""
    space = make_space(model, name, buckets=7)
    batch = chunks.batch(np.arange(5))
    read = space.reads(model.hidden(batch.ids, model.n_layers), model.hidden(batch.ids, 0), batch.ids)
    pull = torch.randn(*batch.ids.shape, model.vocab_size, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = space.gate_gradient(read, pull)
    if name != "pair-logit":
        torch.testing.assert_close(
            found, space._features_first(space.features(read), pull), rtol=1e-5, atol=1e-4
        )
        sums = torch.zeros(*pull.shape[:-1], space.n_buckets)
        sums.index_add_(2, space.bucket, pull * space.sign)  # torch's own
        expected = torch.bmm(sums.transpose(1, 2), space.features(read)).flatten(1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        return
    read[:, 3] = read[:, 1]  # the same token twice
    found = space.gate_gradient(read, pull)
    for entries in (1, 37, 1 << 21):
        monkeypatch.setattr("stride_cli.operators.pair_space._ENTRIES", entries)
        torch.testing.assert_close(found, space._by_entries(read, pull), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inside", INSIDE)
def test_gradients_do_not_depend_on_the_batch(model, chunks: ChunkReader, inside: str) -> None:
    spaces = [make_space(model, name) for name in NAMES if name not in INSIDE or name == inside]
    steered = SteeredModel(model, spaces, LAYER)

    def gradients(rows: list[int], drawn: bool) -> list[torch.Tensor]:
        batch = chunks.batch(np.asarray(rows))
        return gate_gradients(steered, batch, sampled=label_uniforms(0, batch) if drawn else None)[0]

    for drawn in (False, True):
        together = gradients(list(range(6)), drawn)
        for row in range(6):
            for one, whole in zip(gradients([row], drawn), together, strict=True):
                torch.testing.assert_close(one[0], whole[row], rtol=1e-4, atol=1e-6)


def test_a_fit_multiplies_in_bfloat16_and_points_the_same_way(
    model, chunks: ChunkReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor can; losses, as the head, stay in float32, of states that were rounded."""
    monkeypatch.setattr("stride_cli.operators.steered_model._WIDE", 0)
    monkeypatch.setattr("stride_cli.operators.steered_model.multiplies_bf16", lambda device: True)
    spaces = [make_space(model, name) for name in ("residual-matrix", "linear-matrix", "logit")]
    steered, batch = SteeredModel(model, spaces, LAYER), chunks.batch(np.arange(6))
    exact, loss = gate_gradients(steered, batch)
    rounded, near = gate_gradients(replace(steered, fitting=True), batch)
    for one, other in zip(exact, rounded, strict=True):
        assert other.dtype == torch.float32 and not torch.equal(one, other)
        assert torch.cosine_similarity(one, other).min() > 0.99
    torch.testing.assert_close(near, loss, rtol=0.01, atol=0)


def test_sampled_labels_follow_the_models_distribution(model, chunks: ChunkReader) -> None:
    """Averaged over many draws the sampled gradient vanishes: the score function has mean zero."""
    space = make_space(model, "residual-matrix")
    draws = 1000
    batch = chunks.batch(np.zeros(draws, dtype=np.int64))
    uniforms = np.random.default_rng(0).random(tuple(batch.ids.shape))
    drawn, _ = gate_gradients(SteeredModel(model, [space], LAYER), batch, sampled=uniforms)
    z = drawn[0].mean(0) / (drawn[0].std(0) / draws**0.5)
    assert float(z.abs().mean()) < 1.0  # |z| of a standard normal has mean 0.80
    assert float(z.abs().max()) < 4.5


def test_activations_that_are_not_finite_are_named(fresh_model, chunks: ChunkReader) -> None:

    broken = fresh_model()
    batch = chunks.batch(np.asarray([7]))
    with torch.no_grad():
        broken.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(NumericalError, match="row 7 is not finite"):
        gate_gradients(SteeredModel(broken, [make_space(broken, "residual")], LAYER), batch)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_single_tokens_has_no_gradient(model, name: str) -> None:
    batch = pad_batch(np.arange(2), [np.asarray([5]), np.asarray([7])], [np.zeros(1), np.zeros(1)])
    (gradient,), loss = gate_gradients(SteeredModel(model, [make_space(model, name)], LAYER), batch)
    assert not gradient.any() and not loss.any()


@pytest.mark.parametrize("name", ["residual-matrix", "logit"])
def test_gradients_survive_a_model_that_is_sure(fresh_model, name: str) -> None:
    """1 − p of 1e-9 is nothing next to 1 in float32; loss and gradient still agree with float64."""
    model, precise = fresh_model(), fresh_model()
    for each in (model, precise):
        with torch.no_grad():
            each.head.weight.mul_(180)
        each.model.config.final_logit_softcapping = None
    precise.model.double()
    prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        logits = precise.logits(precise.continue_from(precise.hidden(torch.tensor([prompt]), LAYER), LAYER))
    answer = int(logits[0, -1].argmax())
    batch = pad_batch(np.zeros(1, int), [np.asarray([*prompt, answer])], [np.asarray([0] * 5 + [1])])
    space = make_space(model, name)
    (found,), loss = gate_gradients(SteeredModel(model, [space], LAYER), batch)
    (wanted,), _ = gate_gradients(SteeredModel(precise, [space], LAYER), batch)
    probability = logits[0, -1].double().softmax(-1)
    true = float(probability.sum() - probability[answer])
    assert 0 < true < 1e-6
    assert float(loss) == pytest.approx(true, rel=1e-2)
    assert float(found.norm()) > 0
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(found.abs().max()))


@pytest.mark.parametrize("name", ["logit", "token-logit", "pair-logit"])
def test_logit_spaces_of_a_model_without_a_soft_cap(fresh_model, chunks: ChunkReader, name: str) -> None:
    """Most models have none: the error of the logits is taken as it is."""
    model = fresh_model()
    model.model.config.final_logit_softcapping = None
    space = make_space(model, name)
    batch = chunks.batch(np.arange(4))
    (gradient,), loss = gate_gradients(SteeredModel(model, [space], LAYER), batch)
    gates = torch.zeros(4, space.gate_size, requires_grad=True)
    final = model.continue_from(model.hidden(batch.ids, LAYER), LAYER)
    shift = space(space.reads(final, model.hidden(batch.ids, 0), batch.ids), gates)
    log_p = (model.head(final) + shift)[:, :-1].double().log_softmax(-1)
    log_p = log_p.gather(-1, batch.ids[:, 1:, None])[..., 0]
    losses = -(log_p * batch.weights[:, 1:]).sum(1) / batch.scored.clamp_min(1)
    losses.sum().backward()
    torch.testing.assert_close(gradient, -gates.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, losses.detach(), rtol=1e-5, atol=1e-6)


def test_the_matrices_of_a_layer_are_stored_with_it() -> None:
    generator = torch.Generator().manual_seed(0)
    V, U = [torch.randn(r, 5, generator=generator) for r in (2, 5)], torch.randn(4, 3, generator=generator)
    space = SPACES["linear-matrix"].from_bases(V, [U, U[:, :1]], [0, 0])
    again = space_from_arrays("linear-matrix", space.arrays())
    read, pull = torch.randn(2, 6, 5, generator=generator), torch.randn(2, 6, 4, generator=generator)
    found = space.gate_gradient(read, pull)
    whole = torch.einsum("bto,bti->boi", pull, read)  # the gradient in the layer's weights
    wanted = torch.cat([(U.T @ whole @ V[0].T).flatten(1), (U[:, :1].T @ whole @ V[1].T).flatten(1)], dim=1)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(found, again.gate_gradient(read, pull))
    # forward is its adjoint
    gates = torch.randn(2, space.gate_size, generator=generator)
    torch.testing.assert_close((again(read, gates) * pull).sum((1, 2)), (gates * found).sum(1))
