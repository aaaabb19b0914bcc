"""Training: by the recipe, and many at once as one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe, default_recipe
from stride_cli.models.classifier.networks import build_network, choose_network
from stride_cli.research.training.classifier_stack import train_stacked
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
