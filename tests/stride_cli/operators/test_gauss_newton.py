"""The Gauss–Newton matrix against every label's gradient written out, and what is corrected by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stride_cli.models.linear_layers import layer_widths
from stride_cli.operators import gauss_newton
from stride_cli.operators.exact_response import Entrance, token_losses
from stride_cli.operators.gauss_newton import DAMPING, Corrections, GaussNewton, gauss_newton_product
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.layer_spaces import LayerMatrixSpace
from stride_cli.operators.linear_response import gradients_with_loss, measure_linear
from stride_cli.operators.steered_model import SteeredModel
from tests.stride_cli.operators.test_gradients import LAYER, make_space
from tests.stride_cli.operators.test_responses import randomly_steered

SUMS = (
    ("linear-matrix", "logit", "token-logit", "pair-logit"),
    ("residual-matrix", "logit"),
    ("mlp-matrix", "residual"),
)


def steered_by(model, names: tuple[str, ...]) -> SteeredModel:
    return SteeredModel(model, [make_space(model, name, 32) for name in names], LAYER)


def written_out(steered: SteeredModel, chunks, rows: np.ndarray, vector: torch.Tensor) -> torch.Tensor:
    """(1/N) Σ_t Σ_c p_tc ∇ log p_tc (∇ log p_tc · v), (p,) float64."""
    sizes = [space.gate_size for space in steered.spaces]
    found, tokens = torch.zeros(sum(sizes), dtype=torch.float64), 0
    for row in rows:
        batch = chunks.batch(np.array([row]))
        scored = torch.nonzero(batch.weights[0, 1:]).flatten()
        tokens += len(scored)
        for label in range(steered.model.vocab_size):
            gates = [torch.zeros(1, size, requires_grad=True) for size in sizes]
            labels = torch.full((len(scored),), label)
            with torch.enable_grad():
                losses = token_losses(steered, Entrance.of(steered, batch.ids, scored, labels), gates)[0]
                for loss in losses:
                    own = torch.autograd.grad(loss, gates, retain_graph=True)
                    gradient = torch.cat(own, dim=1)[0].double()
                    found += float(torch.exp(-loss.detach())) * (gradient @ vector) * gradient
    return found / tokens


@pytest.mark.parametrize("names", SUMS, ids="+".join)
def test_products_are_those_of_the_matrix_written_out(model, chunks, names, monkeypatch) -> None:
    steered = steered_by(model, names)
    scored = chunks.batch(np.arange(chunks.n_chunks)).scored.numpy()
    rows = np.flatnonzero((chunks.lengths < 7) & (scored > 0))[:2]
    random = torch.Generator().manual_seed(0)
    vectors = [torch.randn(space.gate_size, generator=random) for space in steered.spaces]
    expected = written_out(steered, chunks, rows, torch.cat(vectors).double())
    # in one part, and a row at a time; through the bases of layers, and by their weights
    for logits, wide in ((gauss_newton._LOGITS, False), (61, True)):
        monkeypatch.setattr(gauss_newton, "_LOGITS", logits)
        monkeypatch.setattr(LayerMatrixSpace, "wide", wide)
        found = torch.cat(gauss_newton_product(steered, chunks, rows, vectors))
        assert float((found - expected).norm() / expected.norm()) < 2e-3


def test_a_gradient_is_corrected_along_what_the_matrix_holds_most_of(model, chunks) -> None:
    steered = steered_by(model, SUMS[0])
    matrix = GaussNewton.drawn(chunks, 12, 3)
    assert len(matrix._rows) == 12 and (GaussNewton.drawn(chunks, 12, 3)._rows == matrix._rows).all()
    assert (GaussNewton.drawn(chunks, 1000, 3)._rows == np.arange(chunks.n_chunks)).all()
    batch = chunks.batch(np.arange(3))
    plain = [each.cpu() for each in gate_gradients(steered, batch)[0]]
    corrected, losses = gradients_with_loss(replace(steered, curvature=matrix), batch)
    assert losses == pytest.approx(gradients_with_loss(steered, batch)[1])
    for query in range(3):
        own = torch.cat([each[query] for each in plain])
        curved = torch.cat(
            gauss_newton_product(steered, chunks, matrix._rows, [each[query] for each in plain])
        )
        height = float(curved @ curved) / float(own @ curved)
        expected = own - curved / (height + DAMPING)
        found = torch.cat([each[query] for each in corrected])
        assert torch.allclose(found, expected, atol=1e-6 * float(own.norm()))
        # along H g the quotient falls, and keeps its sign
        assert 0 < float(found @ curved) < float(own @ curved)


def test_nothing_is_corrected_twice(model, chunks, monkeypatch) -> None:
    asked = []
    plain = gauss_newton.gauss_newton_product

    def counted(*given):
        asked.append(1)
        return plain(*given)

    monkeypatch.setattr(gauss_newton, "gauss_newton_product", counted)
    corrections = Corrections(chunks, 0)
    steered = replace(randomly_steered(model, fit="closed"), curvature=corrections.of(0, 8))
    batch = chunks.batch(np.arange(3))
    first = measure_linear(steered, batch)
    assert len(asked) == 3 and corrections.of(0, 8) is steered.curvature
    assert (measure_linear(steered, batch) == first).all() and len(asked) == 3
    measure_linear(replace(steered, curvature=corrections.of(1, 8)), batch)  # another model's
    assert len(asked) == 6
    monkeypatch.setattr(gauss_newton, "_KEPT_BYTES", 4 * steered.gate_size)
    kept = GaussNewton(chunks, np.arange(8))
    measure_linear(replace(steered, curvature=kept), batch)
    assert len(kept._kept) == 1


def test_a_gradient_of_zero_stays(model, chunks) -> None:
    steered = steered_by(model, ("linear-matrix", "logit"))
    nothing = [torch.zeros(1, space.gate_size) for space in steered.spaces]
    found = GaussNewton(chunks, np.arange(4)).corrected(steered, nothing)
    assert not any(each.any() for each in found)


def test_gates_of_all_directions_go_by_weights(model) -> None:
    widths = [layer_widths(layer) for layer in model.linear_layers("all")]
    for share, wide in ((1, True), (4, False)):
        V = [torch.randn(read // share, read) for read, _ in widths]
        U = [torch.randn(given, given // share) for _, given in widths]
        assert LayerMatrixSpace.from_bases(V, U).wide == wide
