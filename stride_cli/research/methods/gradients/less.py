"""LESS: cosines of projected gradients over checkpoints, with Adam's update for the corpus (Xia et al. 2024,
arXiv:2402.04333).

Written here: the authors' code and `dattri` read the optimizer state of a Hugging Face trainer with peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of_index
from stride_cli.options import option, takes
from stride_cli.research.methods.gradients.capture import Capture
from stride_cli.research.methods.gradients.features import corpus_features, products, query_features
from stride_cli.research.methods.gradients.passes import Passes, PassOptions, find_checkpoints
from stride_cli.research.methods.gradients.projection import PROJECTIONS, Projector, random_projector
from stride_cli.research.methods.gradients.warmup import AdamUpdates, Moments, Warmup, warm_up
from stride_cli.research.methods.vectors import unit

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

FORMS = ("lora", "sgd")


@dataclass(frozen=True)
class LESSOptions(PassOptions):
    method = "less"
    dim: int = option(8192, "Numbers a gradient is projected to (app:baseline_details: 8,192).", low=1)
    form: str | None = option(None, "Default: lora for language, sgd for classifiers.", choices=FORMS)
    share: float = option(0.05, "Of lora: the warm-up's share of the chunks.", above=0, high=1)
    epochs: int = option(4, "Of lora: epochs of the warm-up, each with a checkpoint.", low=1)
    rank: int = option(128, "Of lora: rank of the matrices (α = 4 rank).", low=1)
    lr: float | None = option(
        None, "Of lora: peak rate; default: that of stride model finetune --lora.", above=0, example=2e-4
    )
    checkpoints: str | None = option(None, "Of sgd: models, separated by |; default: the index's.")
    rates: str | None = option(None, "Of sgd: a weight for each, separated by |.")
    projection: str = option("auto", "See `random_projector`.", choices=PROJECTIONS)


class LESS:
    """Σ_checkpoints η · cos(P ∇ loss(query), P Γ(chunk)).

    ``form=lora`` is the publication's: a LoRA adapter is trained on a random part of the corpus, starting
    from the model that the workspace's was fine-tuned from (see `warm_up`), and kept after every epoch with
    Adam's moments. Gradients are those of its matrices, Γ is the update that Adam would make for the chunk,
    and η is the epoch's mean learning rate. With ``form=sgd`` Γ is the gradient, at the weights of the
    workspace's model or of ``checkpoints``. Default layers: of lora "attention"; else "body" for language,
    "all" for classifiers.

    Raises
    ------
    UsageError      an option out of range; lora of a classifier, or with checkpoints
    """

    name = "less"

    @takes(LESSOptions)
    def __init__(self, **given: Any) -> None:
        self.options = LESSOptions(**given)
        self.checkpoints = find_checkpoints(self.options.checkpoints, self.options.rates)
        self.bytes_per_chunk = 0.0
        self._warm: Warmup | None = None
        self._opened: tuple[Passes, Projector, Moments | None] | None = None  # kept where there is one model

    def fit(self, workspace: Workspace) -> None:
        self._task, self._opened, self._warm = workspace, None, None
        classifier = kind_of_index(workspace.index) == "classifier"
        form = self.options.form or ("sgd" if classifier else "lora")
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
        if self.options.checkpoints is not None:
            raise UsageError(
                f"{self.name}: checkpoints are given, and form=lora makes its own",
                fix="leave checkpoints out, or write form=sgd",
            )
        given = self.options
        return warm_up(
            workspace,
            share=given.share,
            epochs=given.epochs,
            rank=given.rank,
            lr=given.lr,
            layers=given.layers,
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
            layers = self.options.layers or workspace.model.all_layers
            capture = Capture(model, workspace.chunks.batch(np.arange(1)), layers=layers)
            parts = capture.layers
        device = capture.model.device
        projector = random_projector(
            parts,
            self.options.dim,
            workspace.seed,
            "less projection",
            number,
            device,
            self.options.projection,
        )
        # the loss of instruction tuning is the mean over an answer's tokens, and so is the publication's
        opened = Passes(capture, self.options.batch_tokens, "mean", workspace.seed), projector, moments
        if len(self._rates) == 1:
            self._opened = opened
        return opened
