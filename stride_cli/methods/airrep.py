"""AirRep: inner product of an encoder trained for attribution (Sun et al. 2025), given or trained here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.data.texts import TEXT_BLOCK, chunk_texts, query_texts, require_text
from stride_cli.errors import UsageError
from stride_cli.methods.embeddings import packaged_encoder
from stride_cli.methods.truth_folds import LearnsFromTruth, check_folds
from stride_cli.methods.vectors import VectorTable
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.methods.airrep_encoder import AirRepEncoder
    from stride_cli.methods.airrep_training import Split

TRAIN = ("truth", "proxy")
TUNE = ("all", "projector")


class AirRep(LearnsFromTruth):
    """Inner product between the vectors of a query's and a chunk's text.

    Either ``model``, a trained encoder, or ``train``, which trains one: on "proxy" subsets of the corpus as
    the paper does (splits of the corpus into examples and subsets; a model is trained on every subset by the
    recipe of the index's model), or on a part of the "truth" that the index has already, with the truth's
    queries as examples. What of the truth was trained on must not be scored on: `used_truth_rows`.

    Parameters
    ----------
    model : str, optional       directory or hub id; the released one is sunweiwei/AirRep-Flan-Small
    train : str, optional       "truth" or "proxy"
    base : str, optional        BERT that training starts from; default as `Embeddings` (the paper: gte-small)
    tune : str                  "all" of the encoder, or only its "projector", which takes seconds
    save : str, optional        directory that a trained encoder is written to, for ``model``
    attention : bool            weigh a chunk's score by softmax(|score|) over the corpus, as the group score
                                of the whole corpus does; off: the inner product itself
    fold, folds, alpha          as `Datamodels`, for "truth"
    splits, subsets, subset_size, examples : int
                                of "proxy": splits, subsets in each, chunks in a subset (at most half the
                                corpus), examples in a split (at most a tenth)
    epochs, learning_rate, top_k, pool : as `airrep_training.Settings`
    max_length, batch_size : int      tokens of a text that are read; texts encoded at once

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

    def __init__(
        self,
        *,
        model: str | None = None,
        train: str | None = None,
        base: str | None = None,
        tune: str = "all",
        save: str | None = None,
        attention: bool = False,
        fold: int = 0,
        folds: int = 2,
        alpha: float | None = None,
        splits: int = 10,
        subsets: int = 50,
        subset_size: int = 500,
        examples: int = 200,
        epochs: int = 50,
        learning_rate: float = 1e-4,
        top_k: int = 32,
        pool: int = 1000,
        max_length: int = 512,
        batch_size: int = 64,
    ) -> None:
        if model is not None and train is not None:
            raise UsageError("airrep: model is a trained encoder, train makes one", fix="give one of the two")
        for option, value, known in (("train", train, TRAIN), ("tune", tune, TUNE)):
            if value is not None and value not in known:
                raise UsageError(f"airrep: {option} should be {' or '.join(known)}, found '{value}'")
        check_folds(fold, folds, self.name)
        numbers = {
            "splits": splits,
            "subsets": subsets,
            "subset_size": subset_size,
            "examples": examples,
            "epochs": epochs,
            "top_k": top_k,
            "pool": pool,
            "max_length": max_length,
            "batch_size": batch_size,
        }
        for option, number in numbers.items():
            least = 2 if option in ("subsets", "top_k") else 1
            if number < least:
                raise UsageError(f"airrep: {option} should be {least} or more, found {number}")
        self.model, self.train, self.base, self.tune, self.save = model, train, base, tune, save
        self.attention = attention
        self.fold, self.folds, self.alpha = fold, folds, alpha
        self.splits, self.subsets, self.subset_size, self.examples = splits, subsets, subset_size, examples
        self.epochs, self.learning_rate, self.top_k, self.pool = epochs, learning_rate, top_k, pool
        self.max_length, self.batch_size = max_length, batch_size

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        if self.model is None and self.train is None:
            raise UsageError(
                "airrep needs an encoder (expected model=PATH, train=truth or train=proxy)",
                fix="airrep:model=sunweiwei/AirRep-Flan-Small, or airrep:train=truth",
            )
        from stride_cli.methods.airrep_encoder import load_airrep

        self._task = workspace
        if self.model is not None:
            self._encoder = load_airrep(self.model, device=workspace.model.device, max_length=self.max_length)
        else:
            self._encoder = self._trained(workspace)
        self._table = VectorTable(workspace.n_chunks, self._encoder.width, normalise=False)
        self.bytes_per_chunk = self._table.bytes_per_chunk
        for start in range(0, workspace.n_chunks, TEXT_BLOCK):
            rows = np.arange(start, min(start + TEXT_BLOCK, workspace.n_chunks))
            self._table.put(rows, self._embed(workspace.texts(rows)))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for start in range(0, len(queries), QUERY_BLOCK):
            rows = range(start, min(start + QUERY_BLOCK, len(queries)))
            block = self._table.products(self._embed(query_texts(self._task, queries, rows)))
            yield attended(block) if self.attention else block

    def _embed(self, texts: list[str]) -> np.ndarray:
        return self._encoder.embed(texts, batch_size=self.batch_size).cpu().numpy()

    def _trained(self, workspace: Workspace) -> AirRepEncoder:
        from stride_cli.methods.airrep_encoder import new_airrep
        from stride_cli.methods.airrep_training import Settings, train_encoder

        encoder = new_airrep(
            self.base or packaged_encoder(),
            device=workspace.model.device,
            seed=workspace.seed,
            max_length=self.max_length,
        )
        settings = Settings(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            top_k=self.top_k,
            examples=self.examples,
            pool=self.pool,
            whole_encoder=self.tune == "all",
            batch_size=self.batch_size,
        )
        splits = self._truth_split(workspace) if self.train == "truth" else self._proxy_splits(workspace)
        train_encoder(encoder, list(chunk_texts(workspace)), splits, settings, seed=workspace.seed)
        if self.save is not None:
            encoder.save(self.save)
        return encoder

    def _truth_split(self, workspace: Workspace) -> list[Split]:
        """The training part of the truth as one split, its queries the examples."""
        from stride_cli.methods.airrep_training import Split
        from stride_cli.training.truth import Truth

        part = self.use_truth(
            Truth.from_index(workspace.index),
            fold=self.fold,
            folds=self.folds,
            seed=workspace.seed,
            alpha=self.alpha,
            least=2,
            name=self.name,
        )
        texts = query_texts(workspace, part.queries, range(len(part.queries)))
        return [Split(texts, part.masks, part.losses.mean(1))]

    def _proxy_splits(self, workspace: Workspace) -> list[Split]:
        """Splits of the corpus itself, with a model trained on every subset; finished ones are kept."""
        from stride_cli.data.query_set import QuerySet
        from stride_cli.methods.airrep_training import Split
        from stride_cli.training.jobs import Job
        from stride_cli.training.retraining import open_trainer, retrain, store_of

        n_chunks = workspace.n_chunks
        scored = np.array(
            [row for row in range(n_chunks) if workspace.chunks.chunk(row)[1][1:].any()], np.int64
        )
        n_examples = min(self.examples, len(scored) // 10)
        size = min(self.subset_size, n_chunks // 2)
        if not n_examples or not size:
            raise UsageError(f"airrep: train=proxy needs a corpus of 10 chunks or more, this has {n_chunks}")
        splits = []
        for number in range(self.splits):
            random = stream(workspace.seed, "airrep split", number)
            examples = np.sort(random.permutation(scored)[:n_examples])
            rest = np.setdiff1d(np.arange(n_chunks), examples)
            jobs = []
            for _ in range(self.subsets):
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


def attended(block: np.ndarray) -> np.ndarray:
    """Scores (q, n) times n · softmax(|score|) over the chunks, so that sums follow the strongest members."""
    strength = np.abs(block, dtype=np.float64)
    weights = np.exp(strength - strength.max(1, keepdims=True, initial=0))
    share = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    return (block.shape[1] * share * block).astype(np.float32)
