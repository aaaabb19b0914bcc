"""AirRep: inner product of an encoder trained for attribution (Sun et al. 2025), given or trained here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.data.query_set import query_texts
from stride_cli.errors import UsageError
from stride_cli.options import Options, entries, option
from stride_cli.randomness import stream
from stride_cli.research.methods.embeddings import packaged_encoder
from stride_cli.research.methods.protocol import chunk_texts, query_blocks, require_text, takes
from stride_cli.research.methods.truth_folds import LearnsFromTruth, check_folds, training_rows
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.methods.airrep_encoder import AirRepEncoder
    from stride_cli.research.methods.airrep_training import Split


@dataclass(frozen=True)
class AirRepOptions(Options):
    """Options of the encoder: its source, its training, its use."""

    model: str | None = option(
        None, "Directory or hub id of a trained encoder; the released one: sunweiwei/AirRep-Flan-Small."
    )
    train: str | None = option(None, "What an encoder is trained on here.", choices=("truth", "proxy"))
    base: str | None = option(
        None, "BERT that training starts from; default: as embeddings (paper: gte-small)."
    )
    tune: str = option(
        "all", "All of the encoder, or its projector, which takes seconds.", choices=("all", "projector")
    )
    save: str | None = option(None, "Directory that a trained encoder is written to, for model=.")
    fold: int = option(0, "Of the truth: the part that is kept for scoring.")
    folds: int = option(2, "Of the truth: in how many parts it is dealt.")
    alpha: float | None = option(
        None, "Of the truth: learn from the subsets of this share of the chunks only."
    )
    splits: int = option(10, "Of proxy: splits of the corpus.", low=1)
    subsets: int = option(50, "Of proxy: subsets in each split.", low=2)
    subset_size: int = option(500, "Of proxy: chunks in a subset, at most half the corpus.", low=1)
    examples: int = option(200, "Of proxy: examples in a split, at most a tenth of the corpus.", low=1)
    epochs: int = option(50, "Passes over each split's subsets.", low=1)
    learning_rate: float = option(1e-4, "Of AdamW.", above=0, high=1e6)
    top_k: int = option(32, "Subsets compared with each other in one step.", low=2)
    pool: int = option(1000, "Most chunks encoded in one step.", low=1)
    max_length: int = option(512, "Tokens of a text that are read.", low=1)
    batch_size: int = option(64, "Texts encoded at once.", low=1)

    def __post_init__(self) -> None:
        for name, entry in entries(AirRepOptions).items():
            entry.check(getattr(self, name), f"airrep: {name}", f"write {name}={entry.example}")
        if self.model is not None and self.train is not None:
            raise UsageError("airrep: model is a trained encoder, train makes one", fix="give one of the two")
        check_folds(self.fold, self.folds, AirRep.name)


class AirRep(LearnsFromTruth):
    """Inner product between the vectors of a query's and a chunk's text.

    Either ``model``, a trained encoder, or ``train``, which trains one. On "proxy" subsets of the corpus, as
    the paper does: a model is trained on every subset by the recipe of the index's model. Or on a part of the
    "truth" that the index has, with its queries as examples; `used_truth_rows` must not judge it.

    Parameters
    ----------
    given : options of `AirRepOptions`; fold, folds and alpha as for `Datamodels`

    Attributes
    ----------
    used_truth_rows : (R,) bool       after `fit` with train=truth

    Raises
    ------
    UsageError      neither or both of model and train, an option out of range, or a workspace without text
    ModelError      a checkpoint cannot be loaded
    StageMissing    the index has no truth
    """

    name = "airrep"
    bytes_per_chunk = 0.0

    @takes(AirRepOptions)
    def __init__(self, **given: Any) -> None:
        self.options = AirRepOptions(**given)

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        if self.options.model is None and self.options.train is None:
            raise UsageError(
                "airrep needs an encoder (expected model=PATH, train=truth or train=proxy)",
                fix="airrep:model=sunweiwei/AirRep-Flan-Small, or airrep:train=truth",
            )
        from stride_cli.research.methods.airrep_encoder import load_airrep

        self._task = workspace
        if self.options.model is not None:
            self._encoder = load_airrep(
                self.options.model, device=workspace.model.device, max_length=self.options.max_length
            )
        else:
            self._encoder = self._trained(workspace)
        self._table = VectorTable.of_texts(workspace, self._embed, normalise=False)
        self.bytes_per_chunk = self._table.bytes_per_chunk

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            yield self._table.products(self._embed(query_texts(self._task, queries, rows)))

    def _embed(self, texts: list[str]) -> np.ndarray:
        return self._encoder.embed(texts, batch_size=self.options.batch_size).cpu().numpy()

    def _trained(self, workspace: Workspace) -> AirRepEncoder:
        from stride_cli.research.methods.airrep_encoder import new_airrep
        from stride_cli.research.methods.airrep_training import train_encoder

        options = self.options
        encoder = new_airrep(
            options.base or packaged_encoder(),
            device=workspace.model.device,
            seed=workspace.seed,
            max_length=options.max_length,
        )
        splits = self._truth_split(workspace) if options.train == "truth" else self._proxy_splits(workspace)
        train_encoder(encoder, list(chunk_texts(workspace)), splits, options, seed=workspace.seed)
        if options.save is not None:
            encoder.save(options.save)
        return encoder

    def _truth_split(self, workspace: Workspace) -> list[Split]:
        """Make one split of the truth's training part, its queries the examples."""
        from stride_cli.research.methods.airrep_training import Split
        from stride_cli.research.training.truth import Truth

        options = self.options
        truth = Truth.from_index(workspace.index)
        used = training_rows(truth.alpha, options.fold, options.folds, workspace.seed, alpha=options.alpha)
        part = self.learn_from(truth, used, least=2, name=self.name)
        texts = query_texts(workspace, part.queries, range(len(part.queries)))
        return [Split(texts, part.masks, part.losses.mean(1))]

    def _proxy_splits(self, workspace: Workspace) -> list[Split]:
        """Split the corpus itself, with a model trained on every subset; finished ones are kept."""
        from stride_cli.data.query_set import QuerySet
        from stride_cli.research.methods.airrep_training import Split
        from stride_cli.training.jobs import Job
        from stride_cli.training.retraining import open_trainer, retrain, store_of

        n_chunks = workspace.n_chunks
        scored = np.array(
            [row for row in range(n_chunks) if workspace.chunks.chunk(row)[1][1:].any()], np.int64
        )
        n_examples = min(self.options.examples, len(scored) // 10)
        size = min(self.options.subset_size, n_chunks // 2)
        if not n_examples or not size:
            raise UsageError(
                f"airrep: train=proxy needs a corpus of 10 chunks or more, this has {n_chunks}",
                fix="index more documents, or choose another method: stride baseline --list",
            )
        splits = []
        for number in range(self.options.splits):
            random = stream(workspace.seed, "airrep split", number)
            examples = np.sort(random.permutation(scored)[:n_examples])
            rest = np.setdiff1d(np.arange(n_chunks), examples)
            jobs = []
            for _ in range(self.options.subsets):
                mask = np.zeros(n_chunks, bool)
                mask[random.permutation(rest)[:size]] = True
                jobs.append(Job(mask, int(random.integers(1 << 31))))
            ids, weights = zip(*(workspace.chunks.chunk(int(row)) for row in examples), strict=True)
            queries = QuerySet(ids, weights, [str(row) for row in examples])
            outcomes = retrain(open_trainer(workspace, queries), jobs, store=store_of(workspace.index))
            splits.append(
                Split(
                    workspace.texts(examples),
                    np.stack([job.mask for job in jobs]),
                    np.stack([outcome.losses for outcome in outcomes]),
                )
            )
        return splits
