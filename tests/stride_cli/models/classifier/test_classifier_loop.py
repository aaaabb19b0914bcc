"""Training: by the recipe, and many at once as one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.errors import CorpusError, ModelError, NumericalError, UsageError
from stride_cli.models.classifier.classifier_recipe import (
    ClassifierRecipe,
    default_recipe,
    read_classifier_recipe,
)
from stride_cli.models.classifier.networks import NetworkSpec, build_network, choose_network
from stride_cli.permissions import name_code
from stride_cli.research.training.classifier_stack import FunctionalSteps, train_stacked
from stride_cli.training.classifier_loop import outcomes_of, train_network


def examples(n: int = 60, shape: tuple[int, ...] = (5,), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, *shape, generator=generator)
    return inputs, (inputs.flatten(1)[:, :3]).argmax(1)


def recipes() -> list[ClassifierRecipe]:
    mlp = choose_network("mlp", width=7, layers=2)
    return [
        default_recipe(mlp, epochs=3, batch_size=8),
        default_recipe(mlp, epochs=3, batch_size=8, optimizer="adamw"),
        default_recipe(choose_network("logistic"), epochs=3, batch_size=16, schedule="linear"),
        default_recipe(choose_network("resnet9", width=8), epochs=1, batch_size=16),
        default_recipe(choose_network("resnet9", width=8), epochs=1, batch_size=16, optimizer="sgd"),
    ]


@pytest.mark.parametrize("recipe", recipes(), ids=lambda r: f"{r.network.name}-{r.optimizer}")
def test_stacked_equals_one_by_one(recipe: ClassifierRecipe) -> None:
    shape = (4, 4) if recipe.network.name == "resnet9" else (5,)
    inputs, labels = examples(shape=shape)
    random = np.random.default_rng(0)
    # subsets of other sizes, one smaller than a batch, so that networks end at different steps
    members = [np.sort(random.permutation(60)[:size]) for size in (40, 40, 25, 6)]
    seeds = [3, 4, 3, 5]
    stack = train_stacked(recipe, inputs, labels, members, seeds, n_classes=3)
    together = stack.logits(inputs)
    for number, (rows, seed) in enumerate(zip(members, seeds, strict=True)):
        network = build_network(recipe.network, shape, 3, seed=seed)
        train_network(network, inputs, labels, recipe, members=rows, seed=seed)
        with torch.no_grad():
            alone = network(inputs)
        # AdamW divides by the root of tiny second moments: rounding weighs more
        tolerance = 1e-4 if recipe.optimizer == "sgd" else 5e-3
        torch.testing.assert_close(together[number], alone, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(stack.network(number)(inputs), together[number], rtol=1e-4, atol=1e-5)


def test_written_out_steps_equal_those_of_torch_func() -> None:
    recipe = recipes()[0]
    inputs, labels = examples()
    members = [np.arange(40), np.arange(20, 60)]
    template = build_network(recipe.network, (5,), 3, seed=0)
    drawn = [build_network(recipe.network, (5,), 3, seed=seed).state_dict() for seed in (0, 1)]
    parameters = {name: torch.stack([one[name] for one in drawn]) for name, _ in template.named_parameters()}
    steps = FunctionalSteps(template, parameters, recipe)
    for step in range(recipe.steps(40)):
        epoch, place = divmod(step, 5)
        rows = np.stack([recipe.order_of(own, s, epoch)[place] for s, own in enumerate(members)])
        index = torch.from_numpy(rows)
        weight = torch.full((2, 8), 1 / 8)
        steps.step(inputs[index], labels[index], weight, torch.full((2,), recipe.rate(step, 40)))
    stack = train_stacked(recipe, inputs, labels, members, [0, 1], n_classes=3)
    for name, values in stack.parameters.items():
        torch.testing.assert_close(values, parameters[name], rtol=1e-4, atol=1e-6)


def test_logistic_regression_reaches_the_optimum_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    inputs, labels = examples(200)
    noisy = torch.where(torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.2, 0, labels)
    decay = 0.02
    recipe = replace(
        default_recipe(choose_network("logistic"), epochs=300, batch_size=200, lr=0.5), weight_decay=decay
    )
    network = build_network(recipe.network, (5,), 3, seed=0)
    train_network(network, inputs, noisy, recipe)
    # scikit-learn: C Σ loss + ½‖W‖²; as a column of ones, the intercept is decayed as ours is
    ones = np.concatenate([inputs.numpy(), np.ones((200, 1))], axis=1)
    reference = LogisticRegression(C=1 / (decay * 200), tol=1e-8, max_iter=1000, fit_intercept=False)
    expected = reference.fit(ones, noisy).predict_proba(ones)
    found = network(inputs).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_dropout_and_batch_norm_train_one_by_one(tmp_path: Path) -> None:
    source = (
        "def network(shape, n_classes):\n"
        "    from torch.nn import BatchNorm1d, Dropout, Linear, ReLU, Sequential\n"
        "    return Sequential(BatchNorm1d(5), Linear(5, 9), Dropout(0.2), ReLU(), Linear(9, n_classes))\n"
    )
    recipe = default_recipe(NetworkSpec("adapter", adapter=source), epochs=4, batch_size=10)
    inputs, labels = examples()
    name_code(source, "network.py")
    found = []
    for _ in range(2):
        network = build_network(recipe.network, (5,), 3, seed=1)
        train_network(network, inputs, labels, recipe, seed=1)
        found.append(network(inputs))
    assert isinstance(network[0], nn.BatchNorm1d) and not network.training
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_rates_rise_fall_and_end() -> None:
    recipe = ClassifierRecipe(NetworkSpec("mlp", 4, 1), epochs=10, batch_size=10, lr=0.1)
    rates = [recipe.rate(step, 45) for step in range(recipe.steps(45) + 2)]
    assert recipe.steps(45) == 40 and rates[40:] == [0.0, 0.0]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.05)


def test_every_row_at_most_once_an_epoch() -> None:
    recipe = ClassifierRecipe(NetworkSpec("mlp", 4, 1), batch_size=10)
    order = recipe.order_of(np.arange(100, 147), 0, 3)
    assert order.shape == (4, 10) and len(set(order.ravel())) == 40
    assert (order >= 100).all()
    assert recipe.order_of(np.arange(7), 0, 0).shape == (1, 7)
    assert not np.array_equal(order, recipe.order_of(np.arange(100, 147), 0, 4))


def test_a_part_of_the_rows_comes_in_the_order_of_all() -> None:
    recipe = ClassifierRecipe(NetworkSpec("mlp", 4, 1), batch_size=1)
    whole = recipe.order_of(np.arange(200), 5, 2).ravel()
    part = np.array([3, 7, 8, 100, 140])
    expected = [row for row in whole.tolist() if row in part]
    assert recipe.order_of(part, 5, 2).ravel().tolist() == expected


def test_outcomes_against_the_definitions() -> None:
    logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 0])
    losses, margins = outcomes_of(logits, labels)
    for g in range(2):
        for b, label in enumerate(labels.tolist()):
            values = logits[g, b].double().numpy()
            probability = np.exp(values[label]) / np.exp(values).sum()
            assert losses[g, b] == pytest.approx(-math.log(probability))
            assert margins[g, b] == pytest.approx(math.log(probability / (1 - probability)))


def test_refusals() -> None:
    inputs, labels = examples()
    recipe = recipes()[0]
    with pytest.raises(CorpusError, match="no row"):
        train_stacked(recipe, inputs, labels, [np.zeros(0, np.int64)], [0], n_classes=3)
    with pytest.raises(NumericalError, match="finite") as caught:
        train_network(build_network(recipe.network, (5,), 3, seed=0), inputs * 1e20, labels, recipe)
    assert "--lr" in str(caught.value.fix)
    with pytest.raises(NumericalError):
        train_stacked(recipe, inputs * 1e20, labels, [np.arange(60)], [0], n_classes=3)
    with pytest.raises(UsageError, match="muon"):
        default_recipe(recipe.network, optimizer="muon+adamw")
    with pytest.raises(UsageError, match="epochs"):
        default_recipe(recipe.network, epochs=-1)


def test_recipe_round_trip(tmp_path: Path) -> None:
    recipe = replace(recipes()[0], data={"source": "a.npz", "rows": 3}, seed=4)
    assert ClassifierRecipe.from_json(recipe.to_json()) == recipe
    moved = replace(recipe, data={"source": "b.npz", "rows": 3}, seed=5)
    assert recipe.digest() == moved.digest() != replace(recipe, lr=0.2).digest()
    with pytest.raises(ModelError, match="no recipe"):
        read_classifier_recipe(tmp_path)
    (tmp_path / "classifier_recipe.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        read_classifier_recipe(tmp_path)
