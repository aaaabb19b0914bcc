"""Retrain classifiers on subsets of their rows, many at once where the network allows it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stride_cli.errors import ModelError, QueryError, UsageError
from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe, read_classifier_recipe
from stride_cli.models.classifier.networks import build_network, is_stackable
from stride_cli.research.training.classifier_stack import choose_at_once, train_stacked
from stride_cli.training.classifier_loop import outcomes_of, train_network
from stride_cli.training.jobs import Job, Outcome

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


@dataclass
class ClassifierTrainer:
    """Trains classifiers on subsets of an index's chunks; see `jobs.Trainer`.

    Networks without dropout and batch statistics are trained together with stacked parameters, others one
    after the other.

    Attributes
    ----------
    recipe : ClassifierRecipe
    inputs : (n, …) float32          standardised, of the chunks in order
    labels : (n,) int64
    query_inputs : (Q, …) float32
    query_labels : (Q,) int64
    n_classes : int
    digest : str                     SHA-256 in hex of recipe, chunks and queries by content
    at_once : int
    device : str                     where training runs
    """

    recipe: ClassifierRecipe
    inputs: np.ndarray
    labels: np.ndarray
    query_inputs: np.ndarray
    query_labels: np.ndarray
    n_classes: int
    digest: str
    at_once: int
    device: str = "cpu"
    peak_bytes: int = 0  # `choose_at_once` keeps it small
    on_one_gpu: int = 1

    @property
    def n_chunks(self) -> int:
        return len(self.labels)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Train each job; return losses and margins of the queries, in order.

        Raises
        ------
        UsageError          a mask of another length than the chunks
        CorpusError         an empty mask
        NumericalError      training diverged
        """
        for job in jobs:
            if np.shape(job.mask) != (self.n_chunks,):
                raise UsageError(
                    f"a subset's mask has shape {np.shape(job.mask)} (expected ({self.n_chunks},), one entry "
                    "a chunk)",
                    fix="build the ground truth anew for this index",
                )
        inputs, labels, queries, query_labels = (
            torch.from_numpy(values).to(self.device)
            for values in (self.inputs, self.labels, self.query_inputs, self.query_labels)
        )
        found: list[Outcome] = []
        for start in range(0, len(jobs), self.at_once):
            group = jobs[start : start + self.at_once]
            members = [np.flatnonzero(job.mask) for job in group]
            seeds = [job.seed for job in group]
            if self.at_once > 1:
                stack = train_stacked(self.recipe, inputs, labels, members, seeds, n_classes=self.n_classes)
                logits = stack.logits(queries)
            else:
                shape = tuple(inputs.shape[1:])
                network = build_network(self.recipe.network, shape, self.n_classes, seed=seeds[0])
                network = network.to(self.device)
                train_network(network, inputs, labels, self.recipe, members=members[0], seed=seeds[0])
                with torch.no_grad():
                    logits = network(queries)[None]
            losses, margins = outcomes_of(logits, query_labels)
            found += [Outcome(own, margin) for own, margin in zip(losses, margins, strict=True)]
        return found


def open_classifier_trainer(
    workspace: Workspace, queries: QuerySet, *, recipe: ClassifierRecipe | str | Path | Any | None = None
) -> ClassifierTrainer:
    """Make the trainer of a classifier's workspace.

    Standardisation stays that of the model: it is part of what turns a row into an input, not of training.

    Parameters
    ----------
    workspace : Workspace
    queries : QuerySet      whose losses and margins are wanted
    recipe : ClassifierRecipe, or the path of a model directory that holds one; default: the model's own

    Raises
    ------
    ModelError      there is no recipe, it is of other data than the index, or it starts from given weights
    QueryError      a query's input is not in the model's table
    """
    model: Any = workspace.model
    if recipe is None:
        if model.path is None:
            raise ModelError("the classifier was not loaded from a directory", fix="give a recipe")
        recipe = read_classifier_recipe(model.path)
    elif isinstance(recipe, str | Path):
        place = Path(recipe)
        recipe = read_classifier_recipe(place.parent if place.is_file() else place)
    if not isinstance(recipe, ClassifierRecipe):
        raise ModelError(
            f"{type(recipe).__name__} is no recipe of a classifier", fix="give a classifier's directory"
        )
    if recipe.network.adapter and not recipe.network.trusted:
        recipe = replace(recipe, network=recipe.network.trusted_by(model.spec.permissions))
    data = recipe.data or {}
    if recipe.epochs == 0 or data.get("weights"):
        raise ModelError(
            f"the model began with given weights ({data.get('weights')}), so its training cannot be repeated "
            "on a subset",
            fix="train one from scratch: stride model train DATA --network …",
        )
    corpus = workspace.index.attributes["fingerprints"]["corpus"]
    if data.get("training", corpus) != corpus:
        raise ModelError(
            f"the recipe is of other rows ({data['training'][:12]}) than index '{workspace.index.path}' "
            f"({corpus[:12]})",
            fix="build the index from the rows that the model was trained on",
        )
    ids = torch.from_numpy(np.stack([np.asarray(row) for row in queries.ids]))
    if ids.shape[1] != 2:
        raise QueryError("the queries are no examples of a classifier", fix="give rows, or a file of rows")
    n = workspace.n_chunks
    chunks = np.asarray(workspace.chunks.tokens[: 2 * n]).reshape(n, 2).astype(np.int64)
    inputs = model.inputs(torch.from_numpy(chunks)).float().cpu().numpy()
    query_inputs = model.inputs(ids).float().cpu().numpy()
    shape = tuple(inputs.shape[1:])
    probe = build_network(recipe.network, shape, model.vocab_size, seed=0)
    digest = hashlib.sha256(recipe.digest().encode())
    for values in (inputs, chunks[:, 1], query_inputs, ids[:, 1].numpy()):
        digest.update(str(values.shape).encode() + np.ascontiguousarray(values).tobytes())
    return ClassifierTrainer(
        recipe=recipe,
        inputs=inputs,
        labels=chunks[:, 1].copy(),
        query_inputs=query_inputs,
        query_labels=ids[:, 1].numpy().copy(),
        n_classes=model.vocab_size,
        digest=digest.hexdigest(),
        at_once=choose_at_once(recipe, shape, model.vocab_size) if is_stackable(probe) else 1,
        device=str(model.device),
    )
