"""The published recipe: its losses against hand-written references, its loop against an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper import sgd
from stride_cli.research.paper.base_states import BaseStates
from stride_cli.research.paper.losses import fidelity_loss, linearity_residual, stability_loss
from stride_cli.research.paper.sgd import CURVES, SgdSettings, build_rows, fit_sgd

K = 10
SETTINGS = SgdSettings(
    spaces=("residual",), layer=2, ranks={"residual": 6, "logit": 3}, steps=12, warmup=2, lr=1e-2, lr_end=1e-3
)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    columns = np.stack([np.sort(random.choice(K, 3, replace=False)) for _ in range(40)]).astype(np.uint16)
    return build_rows(columns, K)


def test_stability_variants_on_a_hand_sized_table() -> None:
    base = torch.tensor([[[2.0, 1.0]]])
    steered = torch.tensor([[[1.0, 2.0]]])
    shift, weights = torch.tensor([[[3.0, 4.0]]]), torch.ones(1, 1)
    p = np.exp(2) / (np.exp(2) + np.exp(1))
    kl = p * np.log(p / (1 - p)) + (1 - p) * np.log((1 - p) / p)
    assert float(stability_loss("kl", base, steered, shift, weights)) == pytest.approx(kl, rel=1e-5)
    assert float(stability_loss("logit", base, steered, shift, weights)) == pytest.approx(2.0)
    assert float(stability_loss("norm", None, steered, shift, weights)) == pytest.approx(25.0)


def test_linearity_residual_is_the_ridge_residual() -> None:
    from sklearn.linear_model import Ridge

    random = np.random.default_rng(0)
    sketch, y = random.standard_normal((8, 3)), random.standard_normal(8)
    fitted = Ridge(alpha=0.05, fit_intercept=False).fit(sketch, y).predict(sketch)
    residual = linearity_residual(torch.from_numpy(sketch), ridge=0.05).numpy() @ y
    np.testing.assert_allclose(residual, y - fitted, rtol=1e-6)


@pytest.mark.parametrize("space", ["residual", "residual-matrix", "logit", "token-logit"])
def test_training_lowers_the_fidelity_loss(model, chunks: ChunkReader, rows, space: str) -> None:
    ranks = {"residual": 6, "residual-matrix": 4, "logit": 3, "token-logit": 3}
    settings = replace(SETTINGS, spaces=(space,), ranks=ranks, steps=30, lr=3e-2)
    operators = fit_sgd(model, chunks, *rows, settings)
    assert operators.log["gain"][0] == pytest.approx(0.0, abs=1e-6)  # gates start at zero
    assert operators.log["gain"][-10:].mean() > 0.004
    assert set(operators.log) == set(CURVES)
    assert 0 < operators.coverage <= 1


def test_one_step_has_the_gradient_of_the_written_out_objective(model, chunks: ChunkReader, rows) -> None:
    """L_fid + λ L_stab + λ_LDS L_LDS of one draw in one graph, against the micro-batched accumulation."""
    settings = replace(SETTINGS, linearity=0.7, stability=0.4, subsets_per_step=6)
    space = sgd.initial_space("residual", d_model=24, vocab_size=61, rank=6, n_buckets=64, seed=settings.seed)
    draw = sgd._draw(3, *rows, chunks.n_chunks, settings)
    sketches = sgd._sketch(*rows, chunks.n_chunks, settings)
    start = torch.randn(K, 6, generator=torch.Generator().manual_seed(0)) * 0.3
    gates = start.clone().requires_grad_(True)
    steered = SteeredModel(model, [space], 2)
    base = BaseStates(steered, chunks, top=20)
    values = sgd._step_losses(steered, [gates], chunks, draw, sketches, base, settings)
    assert set(np.flatnonzero(~np.isnan(base.losses))) == {*draw.fidelity.reshape(-1), draw.probe}
    expected = start.clone().requires_grad_(True)

    def logits_of(chunk: int, gate: torch.Tensor):
        batch = chunks.batch(np.asarray([chunk]))
        hidden = model.hidden(batch.ids, 2)
        shift = space(hidden, gate)

        def loss(logits: torch.Tensor) -> torch.Tensor:
            flat = logits.flatten(0, 1)
            return torch.nn.functional.cross_entropy(flat, batch.ids[:, 1:].flatten(), reduction="none")[None]

        base = model.logits(model.continue_from(hidden, 2)[:, :-1])
        steered = model.logits(model.continue_from(hidden + shift, 2)[:, :-1])
        return base, steered, shift[:, :-1], loss, batch.weights[:, 1:]

    losses, responses = [], []
    for position, subset in enumerate(draw.subsets):
        for kind, chosen in (("fid", draw.fidelity[position]), ("stab", draw.stability[position])):
            for chunk in chosen:
                base, steered, shift, loss, weights = logits_of(chunk, expected[subset : subset + 1])
                if kind == "fid":
                    losses.append(fidelity_loss(loss(steered), weights).sum() / 2)
                    continue
                top, tokens = base.topk(20, dim=-1)
                moved = steered.gather(-1, tokens)
                losses.append(0.4 * stability_loss("kl", top, moved, shift, weights).sum() / 2)
        base, steered, _, loss, weights = logits_of(draw.probe, expected[subset : subset + 1])
        responses.append(fidelity_loss(loss(base), weights) - fidelity_loss(loss(steered), weights))
    residual = linearity_residual(sketches[draw.subsets]) @ torch.cat(responses).double()
    total = sum(losses) + 0.7 * residual.square().sum()
    total.backward()
    torch.testing.assert_close(gates.grad, expected.grad, rtol=1e-3, atol=1e-6)
    assert values["loss"] == pytest.approx(float(total.detach()) / len(draw.subsets), rel=1e-4)


def test_an_interrupted_run_continues_to_the_same_bits(
    model, chunks: ChunkReader, rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit_sgd(model, chunks, *rows, SETTINGS)
    real = sgd._step_losses
    steps = []

    def dies(*arguments):
        steps.append(1)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sgd, "_step_losses", dies)
    with pytest.raises(KeyboardInterrupt):
        fit_sgd(model, chunks, *rows, SETTINGS, scratch=tmp_path, save_seconds=0)
    resumed = fit_sgd(model, chunks, *rows, SETTINGS, scratch=tmp_path, save_seconds=0)
    assert len(steps) == 7 + SETTINGS.steps - 6
    np.testing.assert_array_equal(whole.gates[0], resumed.gates[0])
    np.testing.assert_array_equal(whole.seen, resumed.seen)
    for name in CURVES:
        np.testing.assert_array_equal(whole.log[name], resumed.log[name])


def test_the_stability_loss_is_kl_of_the_steered_from_the_base() -> None:
    """KL(base ∥ steered), not the other way round; against torch's own."""
    generator = torch.Generator().manual_seed(0)
    base, steered = (3 * torch.randn(2, 5, 7, generator=generator) for _ in range(2))
    weights = torch.tensor([[1.0, 0, 1, 1, 0], [0, 0, 1, 0, 0]])
    found = stability_loss("kl", base, steered, torch.zeros(0), weights)
    each = torch.nn.functional.kl_div(
        steered.log_softmax(-1), base.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    expected = torch.stack([row[weight > 0].mean() for row, weight in zip(each, weights, strict=True)])
    torch.testing.assert_close(found, expected)
