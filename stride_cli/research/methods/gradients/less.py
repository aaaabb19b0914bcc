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
from stride_cli.options import option
from stride_cli.research.methods.gradients.features import corpus_features, products, query_features
from stride_cli.research.methods.gradients.passes import Passes, PassOptions, open_capture
from stride_cli.research.methods.gradients.projection import Projector, random_projector
from stride_cli.research.methods.gradients.warmup import AdamUpdates, LowRank, Warmup, warm_up
from stride_cli.research.methods.protocol import takes
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


class LESS:
    """Σ_checkpoints η · cos(P ∇ loss(query), P Γ(chunk)).

    ``form=lora`` is the publication's: a LoRA adapter is trained on a random part of the corpus, starting
    from the model that the workspace's was fine-tuned from (see `warm_up`), and kept after every epoch with
    Adam's moments. Gradients are those of its matrices, Γ is the update that Adam would make for the chunk,
    and η is the epoch's mean learning rate. With ``form=sgd`` Γ is the gradient, at the weights of the
    workspace's model. Default layers: of lora "attention"; else "body" for language, "all" for classifiers.

    Raises
    ------
    UsageError      an option out of range; lora of a classifier
    """

    name = "less"

    @takes(LESSOptions)
    def __init__(self, **given: Any) -> None:
        self.options = LESSOptions(**given)
        self.bytes_per_chunk = 0.0
        self._warm: Warmup | None = None

    def fit(self, workspace: Workspace) -> None:
        given = self.options
        self._task, self._warm, self._rates = workspace, None, [1.0]
        classifier = kind_of_index(workspace.index) == "classifier"
        if (given.form or ("sgd" if classifier else "lora")) == "lora":
            if classifier:
                raise UsageError(
                    f"{self.name}: form=lora is of language models, and the index is of a classifier",
                    fix="leave form out, or write form=sgd",
                )
            self._warm = warm = warm_up(
                workspace,
                share=given.share,
                epochs=given.epochs,
                rank=given.rank,
                lr=given.lr,
                layers=given.layers,
            )
            capture, self._parts, self._rates = warm.capture, warm.matrices, warm.rates
        else:
            capture = open_capture(workspace, given.layers or workspace.model.all_layers)
            self._parts = capture.layers
        # the loss of instruction tuning is the mean over an answer's tokens, and so is the publication's
        self._passes = Passes(capture, given.batch_tokens, "mean", workspace.seed)
        self._features: list[np.ndarray] = []  # (n, dim) per checkpoint, unit rows
        for number in range(len(self._rates)):
            title = f"LESS: gradients {number + 1}/{len(self._rates)}"
            projector = self._projector(number, updates=True)
            features, _ = corpus_features(self._passes, workspace, projector, title)
            self._features.append(unit(features))
        self.bytes_per_chunk = float(sum(f.shape[1] * f.itemsize for f in self._features))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        units: list[list[np.ndarray]] = []
        for number in range(len(self._rates)):
            projector = self._projector(number, updates=False)
            units.append([unit(block) for block in query_features(self._passes, queries, projector)])
        for blocks in zip(*units, strict=True):
            total = np.zeros((len(blocks[0]), self._task.n_chunks), np.float32)
            for block, features, rate in zip(blocks, self._features, self._rates, strict=True):
                total += np.float32(rate) * products(block, features)
            yield total

    def _projector(self, number: int, *, updates: bool) -> Projector:
        """Go to a checkpoint; project its gradients, or the updates that a warm-up's Adam would make."""
        device = self._passes.capture.model.device
        inner = random_projector(
            self._parts, self.options.dim, self._task.seed, "less projection", number, device
        )
        if self._warm is None:
            return inner
        moments = self._warm.at(number)
        return LowRank(AdamUpdates(inner, moments) if updates else inner, self._warm.capture.layers)
