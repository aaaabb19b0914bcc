"""Retraining a classifier's task: outcomes by definition, together as alone, and tasks that cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stride_cli.data.example_queries import read_examples
from stride_cli.data.workspace import Workspace
from stride_cli.models.classifier.classifier_recipe import read_classifier_recipe
from stride_cli.models.classifier.networks import build_network
from stride_cli.research.training.classifier_trainer import open_classifier_trainer
from stride_cli.training.classifier_loop import train_network
from stride_cli.training.jobs import Job


def jobs(n: int, count: int = 4, size: int = 200) -> list[Job]:
    random = np.random.default_rng(0)
    masks = np.zeros((count, n), bool)
    for mask in masks:
        mask[random.permutation(n)[:size]] = True
    return [Job(mask, 10 + number) for number, mask in enumerate(masks)]


def test_outcomes_are_those_of_a_model_trained_alone(task: Workspace) -> None:
    model: Any = task.model
    queries = read_examples(model, "held-out")
    trainer = open_classifier_trainer(task, queries)
    assert trainer.at_once > 1 and trainer.n_chunks == 500
    wanted = jobs(500)
    outcomes = trainer.run(wanted)
    recipe = read_classifier_recipe(model.path)
    inputs, targets = torch.from_numpy(trainer.inputs), torch.from_numpy(trainer.labels)
    ids = torch.from_numpy(np.stack(queries.ids))
    for job, outcome in zip(wanted, outcomes, strict=True):
        network = build_network(recipe.network, model.shape, 10, seed=job.seed)
        train_network(network, inputs, targets, recipe, members=np.flatnonzero(job.mask), seed=job.seed)
        with torch.no_grad():
            logits = network(model.inputs(ids)).double()
        expected = torch.nn.functional.cross_entropy(logits, ids[:, 1], reduction="none").numpy()
        np.testing.assert_allclose(outcome.losses, expected, rtol=2e-3, atol=1e-5)
        # the margin is log p / (1 − p)
        np.testing.assert_allclose(outcome.margins, -np.log(np.expm1(outcome.losses)), rtol=1e-6)


def test_the_whole_mask_and_the_recipes_seed_give_the_model_itself(task: Workspace) -> None:
    model: Any = task.model
    queries = read_examples(model, "held-out")
    trainer = open_classifier_trainer(task, queries)
    (outcome,) = trainer.run([Job(np.ones(500, bool), 0)])
    ids = torch.from_numpy(np.stack(queries.ids))
    own = torch.nn.functional.cross_entropy(model.predict(ids).double(), ids[:, 1], reduction="none")
    np.testing.assert_allclose(outcome.losses, own.numpy(), rtol=5e-3, atol=1e-5)
