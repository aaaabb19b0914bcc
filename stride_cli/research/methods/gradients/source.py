"""SOURCE: influence by unrolling the training in segments (Bae et al. 2024, arXiv:2405.12186).

Written here: kronfluence has no training paths, and bergson's reads checkpoints of language models only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of_index
from stride_cli.options import option
from stride_cli.research.methods.gradients.graddot import QueryBank, shared_passes
from stride_cli.research.methods.gradients.kronecker import corrected_curvature
from stride_cli.research.methods.gradients.passes import (
    LABELS,
    MethodOptions,
    Passes,
    load_checkpoint,
    open_capture,
)
from stride_cli.research.methods.protocol import in_blocks, takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


@dataclass(frozen=True)
class SourceOptions(MethodOptions):
    method = "source"
    segments: int = option(
        3, "Of the training, of as many kept checkpoints each (its end among them).", low=1
    )
    labels: str = option("sampled", "Drawn from the model, or the corpus's own.", choices=LABELS)
    draws: int = option(1, "Sets of labels that are drawn.", low=1)
    layers: str | None = option(None, "Linear layers that count, see `Capture`; default: all.")
    batch_tokens: int = option(2048, "Padded tokens of one pass.", low=1)
    query_bytes: int | None = option(
        None, "Most memory for gradients of queries; default: an eighth of what is free.", low=1
    )


class Source:
    """g_qᵀ Σ_l (Π_{k>l} exp(−t_k H_k)) (1 − exp(−t_l H_l)) H_l⁻¹ ḡ_il over segments l of the training.

    Within a segment, curvature H and gradients ḡ are means over its checkpoints. t is the sum of the
    segment's learning rates (of momentum's total effect), g_q the query's gradient at the end. H is the
    Gauss–Newton matrix in EK-FAC's eigenbasis, plus the weight decay. There is no damping: directions that
    training had no time for are left out.

    Raises
    ------
    UsageError
        An option out of range; a language model, or a classifier not trained by SGD from its initial weights;
        fewer checkpoints than segments; a layer whose covariance is too large.
    ModelError
        A checkpoint's step is not one of the recipe's.
    """

    name = "source"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    @takes(SourceOptions)
    def __init__(self, **given: Any) -> None:
        self.options = SourceOptions(**given)
        self.segments = self.options.segments

    def fit(self, workspace: Workspace) -> None:
        self._task = workspace
        models, times, self._decay = _training(workspace)
        if len(models) < self.segments:
            raise UsageError(
                f"{self.name}: the training kept {len(models) - 1} checkpoints, {self.segments} segments "
                f"need {self.segments - 1}",
                fix="train with more --checkpoints, or write segments=1",
            )
        self._segments = [
            [partial(self._open, models[place]) for place in places]
            for places in np.array_split(np.arange(len(models)), self.segments)
        ]
        self._times = [float(np.sum(part)) for part in np.array_split(np.array(times), self.segments)]
        self._curvatures = [
            corrected_curvature(
                members,
                workspace,
                f"SOURCE {number}/{self.segments}",
                labels=self.options.labels,
                draws=self.options.draws,
            )
            for number, members in enumerate(self._segments, 1)
        ]

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        final = self._segments[-1][-1]()
        for start, stop in shared_passes(final, queries, self.options.query_bytes):
            bank = QueryBank(final, queries, start, stop)
            remaining = dict(bank.matrices)  # g_q, and what the segments behind let through of it
            scores = np.zeros((stop - start, self._task.n_chunks), np.float32)
            for number in reversed(range(self.segments)):
                members, curvature = self._segments[number], self._curvatures[number]
                time = self._times[number]
                for layer, matrices in remaining.items():
                    values = curvature[layer].values + self._decay
                    bank.matrices[layer] = curvature[layer].scaled(matrices, _learned(values, time))
                    remaining[layer] = curvature[layer].scaled(matrices, torch.exp(-time * values))
                for open_model in members:
                    products = bank.dot_corpus(open_model(), self._task, f"SOURCE: products {number + 1}")
                    scores += products / len(members)
            yield from in_blocks(scores)

    def _open(self, path: Path | None) -> Passes:
        workspace = self._task
        model = workspace.model if path is None else load_checkpoint(workspace, path)
        capture = open_capture(workspace, self.options.layers, model)
        return Passes(capture, self.options.batch_tokens, "sum", workspace.seed)


def _learned(values: Tensor, time: float) -> Tensor:
    """Compute (1 − exp(−t σ)) / σ; t where σ is 0."""
    return torch.where(values > 0, -torch.expm1(-time * values) / values.clamp_min(1e-30), time)


def _training(workspace: Workspace) -> tuple[list[Path | None], list[float], float]:
    """Find the models along a classifier's training, its own (None) last; each one's time since the one
    before; and the weight decay."""
    from stride_cli.models.classifier.classifier_recipe import read_classifier_recipe, training_path

    if kind_of_index(workspace.index) != "classifier":
        raise UsageError(
            "source unrolls the training of a classifier, and the index is of a language model",
            fix="choose another method: ekfac:checkpoints=…, tracin",
        )
    model: Any = workspace.model
    path = training_path(model)
    if path is None:
        raise UsageError(
            "source unrolls plain gradient descent from initial weights, and the model was trained otherwise",
            fix="train it with --optimizer sgd, or choose another method: ekfac, tracin",
        )
    times = [share * path.time for _, share in path.checkpoints]
    models: list[Path | None] = [*(Path(directory) for directory, _ in path.checkpoints), None]
    return models, [*times, path.time - sum(times)], read_classifier_recipe(model.path).weight_decay
