"""LESS: cosines of projected gradients over checkpoints, with Adam's update for the corpus (Xia et al. 2024,
arXiv:2402.04333).

Written here: the authors' code and `dattri` read the optimizer state of a Hugging Face trainer with peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of_index
from stride_cli.research.methods.gradients.capture import Capture
from stride_cli.research.methods.gradients.features import corpus_features, products, query_features
from stride_cli.research.methods.gradients.passes import (
    Passes,
    check_choice,
    check_positive,
    find_checkpoints,
)
from stride_cli.research.methods.gradients.projection import Projector, random_projector
from stride_cli.research.methods.gradients.warmup import AdamUpdates, Moments, Warmup, warm_up
from stride_cli.research.methods.vectors import unit

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

FORMS = ("lora", "sgd")
PROJECTIONS = ("auto", "dense", "kronecker")


class LESS:
    """Σ_checkpoints η · cos(P ∇ loss(query), P Γ(chunk)).

    ``form=lora`` is the publication's: a LoRA adapter is trained on a random part of the corpus, starting
    from the model that the task's was fine-tuned from (see `warm_up`), and kept after every epoch with Adam's
    moments. Gradients are those of its matrices, Γ is the update that Adam would make for the chunk, and η is
    the epoch's mean learning rate.

    With ``form=sgd`` Γ is the gradient, at the weights of the workspace's model or of ``checkpoints``.

    Parameters
    ----------
    dim : int                numbers a gradient is projected to (app:baseline_details: 8,192)
    form : "lora" | "sgd", optional    default "lora" for language, "sgd" for classifiers
    share : float            lora: of the chunks, for the warm-up
    epochs : int             lora: of the warm-up, each with a checkpoint
    rank : int               lora: of the matrices (α = 4 rank)
    lr : float, optional     lora: peak rate; default: that of `stride model finetune --lora`
    checkpoints, rates : str, optional      sgd: as for `find_checkpoints`; default: the workspace's model
    projection : str         "dense", "kronecker" or "auto"; see `random_projector`
    layers : str, optional   as for `Capture`; default: lora "attention"; else "body" for language, "all" for
                             classifiers
    batch_tokens : int       padded tokens of one pass

    Raises
    ------
    UsageError      an option out of range; lora of a classifier, or with checkpoints
    """

    name = "less"

    def __init__(
        self,
        *,
        dim: int = 8192,
        form: str | None = None,
        share: float = 0.05,
        epochs: int = 4,
        rank: int = 128,
        lr: float | None = None,
        checkpoints: str | None = None,
        rates: str | None = None,
        projection: str = "auto",
        layers: str | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        check_positive(
            self.name, dim=dim, batch_tokens=batch_tokens, share=share, epochs=epochs, rank=rank, lr=lr or 1.0
        )
        if share > 1:
            raise UsageError(f"{self.name}: share={share} is more than 1", fix="write share=0.05")
        self.form = None if form is None else check_choice(self.name, "form", form, FORMS)
        self.projection = check_choice(self.name, "projection", projection, PROJECTIONS)
        self.checkpoints = find_checkpoints(checkpoints, rates)
        self._given = checkpoints is not None
        self.share, self.epochs, self.rank, self.lr = share, epochs, rank, lr
        self.dim, self.layers, self.batch_tokens = dim, layers, batch_tokens
        self.bytes_per_chunk = 0.0
        self._warm: Warmup | None = None
        self._opened: tuple[Passes, Projector, Moments | None] | None = None  # kept where there is one model

    def fit(self, workspace: Workspace) -> None:
        self._task, self._opened, self._warm = workspace, None, None
        classifier = kind_of_index(workspace.index) == "classifier"
        form = self.form or ("sgd" if classifier else "lora")
        if form == "lora":
            self._warm = self._warm_up(workspace, classifier=classifier)
            self._rates = self._warm.rates
        else:
            self._rates = [checkpoint.rate for checkpoint in self.checkpoints]
        self._features: list[np.ndarray] = []  # (n, dim) per checkpoint, unit rows
        for number in range(len(self._rates)):
            passes, projector, moments = self._open(number)
            title = f"LESS: gradients {number + 1}/{len(self._rates)}"
            if self._warm is not None and moments is not None:
                projector = self._warm.projector(AdamUpdates(projector, moments))
            features, _ = corpus_features(passes, workspace, projector, title)
            self._features.append(unit(features))
        self.bytes_per_chunk = float(sum(f.shape[1] * f.itemsize for f in self._features))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        units: list[list[np.ndarray]] = []
        for number in range(len(self._rates)):
            passes, projector, _ = self._open(number)
            if self._warm is not None:
                projector = self._warm.projector(projector)
            units.append([unit(block) for block in query_features(passes, queries, projector)])
        for blocks in zip(*units, strict=True):
            total = np.zeros((len(blocks[0]), self._task.n_chunks), np.float32)
            for block, features, rate in zip(blocks, self._features, self._rates, strict=True):
                total += np.float32(rate) * products(block, features)
            yield total

    def _warm_up(self, workspace: Workspace, *, classifier: bool) -> Warmup:
        if classifier:
            raise UsageError(
                f"{self.name}: form=lora is of language models, and the index is of a classifier",
                fix="leave form out, or write form=sgd",
            )
        if self._given:
            raise UsageError(
                f"{self.name}: checkpoints are given, and form=lora makes its own",
                fix="leave checkpoints out, or write form=sgd",
            )
        return warm_up(
            workspace, share=self.share, epochs=self.epochs, rank=self.rank, lr=self.lr, layers=self.layers
        )

    def _open(self, number: int) -> tuple[Passes, Projector, Moments | None]:
        """Open a checkpoint: passes, the projection of its gradients and, of a warm-up's, Adam's moments."""
        if self._opened is not None:
            return self._opened
        workspace, moments = self._task, None
        if self._warm is not None:
            moments = self._warm.at(number)
            capture, parts = self._warm.capture, self._warm.matrices
        else:
            model = self.checkpoints[number].load(workspace)
            layers = self.layers or workspace.model.all_layers
            capture = Capture(model, workspace.chunks.batch(np.arange(1)), layers=layers)
            parts = capture.layers
        device = capture.model.device
        projector = random_projector(
            parts, self.dim, workspace.seed, "less projection", number, device, self.projection
        )
        # the loss of instruction tuning is the mean over an answer's tokens, and so is the publication's
        opened = Passes(capture, self.batch_tokens, "mean", workspace.seed), projector, moments
        if len(self._rates) == 1:
            self._opened = opened
        return opened
