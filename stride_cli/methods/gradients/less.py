"""LESS: cosines of projected gradients over checkpoints, with Adam's update for the corpus (Xia et al. 2024,
arXiv:2402.04333).

Written here: the authors' code and `dattri` read the optimizer state of a Hugging Face trainer with peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.methods.gradients.capture import Capture, Factors
from stride_cli.methods.gradients.features import corpus_features, products, query_features
from stride_cli.methods.gradients.passes import Passes, check_choice, check_positive, find_checkpoints
from stride_cli.methods.gradients.projection import Projector, random_projector

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

FORMS = ("sgd", "adam")
PROJECTIONS = ("auto", "dense", "kronecker")
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


class LESS:
    """Σ_checkpoints η · cos(P ∇ loss(query), P Γ(chunk)).

    With ``form=sgd`` Γ is the gradient. With ``form=adam`` it is the update that Adam would make for the
    chunk, (β₁ m + (1 − β₁) g) / (√(β₂ v + (1 − β₂) g²) + ε). Optimizer states are not kept with models, so m
    and v are then the mean and mean square of the corpus's own gradients at the checkpoint.

    The publication takes gradients of LoRA matrices. Those are taken where the model has them as linear
    layers (peft: ``layers=lora_``); models of `stride model finetune` have them merged, and the gradients are
    those of the merged weights.

    Parameters
    ----------
    dim : int                numbers a gradient is projected to (app:baseline_details: 8,192)
    form : "sgd" | "adam"
    checkpoints, rates : str, optional      as for `find_checkpoints`; default: the task's model
    projection : str         "dense", "kronecker" or "auto"; see `random_projector`
    layers : str, optional   as for `Capture`; default "body" for language, "all" for classifiers
    batch_tokens : int       padded tokens of one pass

    Raises
    ------
    UsageError      an option out of range
    """

    name = "less"

    def __init__(
        self,
        *,
        dim: int = 8192,
        form: str = "sgd",
        checkpoints: str | None = None,
        rates: str | None = None,
        projection: str = "auto",
        layers: str | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        check_positive(self.name, dim=dim, batch_tokens=batch_tokens)
        self.form = check_choice(self.name, "form", form, FORMS)
        self.projection = check_choice(self.name, "projection", projection, PROJECTIONS)
        self.checkpoints = find_checkpoints(checkpoints, rates)
        self.dim, self.layers, self.batch_tokens = dim, layers, batch_tokens
        self.bytes_per_chunk = 0.0
        self._opened: tuple[Passes, Projector] | None = None  # kept where there is one model only

    def fit(self, workspace: Workspace) -> None:
        self._task, self._opened = workspace, None
        self._features: list[np.ndarray] = []  # (n, dim) per checkpoint, unit rows
        for number in range(len(self.checkpoints)):
            passes, projector = self._open(number)
            title = f"LESS: gradients {number + 1}/{len(self.checkpoints)}"
            if self.form == "adam":
                projector = _AdamUpdates(projector, *_moments(passes, workspace))
            features, _ = corpus_features(passes, workspace, projector, title)
            self._features.append(_unit(features))
        self.bytes_per_chunk = float(sum(f.shape[1] * f.itemsize for f in self._features))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        units: list[list[np.ndarray]] = []
        for number in range(len(self.checkpoints)):
            passes, projector = self._open(number)
            units.append([_unit(block) for block in query_features(passes, queries, projector)])
        for blocks in zip(*units, strict=True):
            total = np.zeros((len(blocks[0]), self._task.n_chunks), np.float32)
            for block, features, checkpoint in zip(blocks, self._features, self.checkpoints, strict=True):
                total += np.float32(checkpoint.rate) * products(block, features)
            yield total

    def _open(self, number: int) -> tuple[Passes, Projector]:
        if self._opened is not None:
            return self._opened
        workspace = self._task
        model = self.checkpoints[number].load(workspace)
        layers = self.layers or workspace.model.all_layers
        capture = Capture(model, workspace.chunks.batch(np.arange(1)), layers=layers)
        projector = random_projector(
            capture.layers, self.dim, workspace.seed, "less projection", number, model.device, self.projection
        )
        # the loss of instruction tuning is the mean over an answer's tokens, and so is the publication's
        opened = Passes(capture, self.batch_tokens, "mean", workspace.seed), projector
        if len(self.checkpoints) == 1:
            self._opened = opened
        return opened


class _AdamUpdates:
    """A projector of Adam's updates instead of gradients."""

    def __init__(self, inner: Projector, means: list[Tensor], squares: list[Tensor]) -> None:
        self.inner, self.width, self.spans = inner, inner.width, inner.spans
        self._means, self._squares = means, squares

    def add(self, found: Factors, target: Tensor) -> None:
        for block in found.blocks():
            self.add_matrices(found.layer, block.rows, block.gradients(), target)

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        first = _BETA1 * self._means[layer] + (1 - _BETA1) * matrices
        second = _BETA2 * self._squares[layer] + (1 - _BETA2) * matrices.square()
        self.inner.add_matrices(layer, rows, first / (second.sqrt() + _EPSILON), target)


def _moments(passes: Passes, workspace: Workspace) -> tuple[list[Tensor], list[Tensor]]:
    """Mean and mean square of the chunks' gradients, (n_out, n_in) float32 a layer."""
    shapes = [(layer.n_out, layer.n_in) for layer in passes.capture.layers]
    means = [torch.zeros(shape, device=workspace.model.device) for shape in shapes]
    squares = [torch.zeros_like(mean) for mean in means]

    def visit(found: Factors) -> None:
        for block in found.blocks():
            gradients = block.gradients()
            means[found.layer] += gradients.sum(dim=0) / workspace.n_chunks
            squares[found.layer] += gradients.square_().sum(dim=0) / workspace.n_chunks

    for _ in passes.corpus(workspace.chunks, visit, "LESS: moments"):
        pass
    return means, squares


def _unit(features: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(norms > 0, norms, 1.0)
