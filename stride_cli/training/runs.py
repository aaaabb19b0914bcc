"""Cut a corpus into a training set, train a model on it by a resolved recipe, and publish it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli import output
from stride_cli.corpus.chunking import Chunk, DocumentTokenizer
from stride_cli.corpus.documents import EMPTY_CORPUS, Document, chained
from stride_cli.corpus.readers import ReadOptions, open_documents
from stride_cli.errors import CorpusError
from stride_cli.models.devices import resolve_device
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.models.language.lora import merged_weights
from stride_cli.training.epoch_batches import plan_epoch
from stride_cli.training.language_loop import TrainingResult, mean_loss, train
from stride_cli.training.options import LanguageOptions
from stride_cli.training.run_directory import RunDirectory, save_model

_BATCH = 256
SAVE_SECONDS = 20.0  # how often the state to resume from is written


@dataclass(frozen=True)
class Corpus:
    """Documents in order, and their fingerprint (the index's: chained over ids and contents)."""

    sources: list[str]
    documents: list[Document]
    fingerprint: str
    n_bytes: int


def read_corpus(sources: Sequence[str], reading: ReadOptions) -> Corpus:
    """Read a corpus whole; CorpusError as from `read_documents`."""
    stream, _ = open_documents(sources, reading)
    documents = list(stream)
    n_bytes = sum(len(document.plain_text.encode()) for document in documents)
    return Corpus(list(sources), documents, chained(EMPTY_CORPUS, documents), n_bytes)


def cut(
    corpus: Corpus, tokenizer: Any, *, block_size: int, vocabulary: int | None = None, skip: bool = False
) -> tuple[list[Chunk], dict[str, Any]]:
    """Cut a corpus into chunks, as `DocumentTokenizer`; return them with the recipe's record of the corpus.

    Raises
    ------
    CorpusError
        No chunk has a scored token.
    """
    cutter = DocumentTokenizer(tokenizer, block_size=block_size, vocabulary=vocabulary, skip=skip)
    chunks: list[Chunk] = []
    for start in range(0, len(corpus.documents), _BATCH):
        for encoded in cutter.encode_batch(corpus.documents[start : start + _BATCH]):
            chunks += cutter.chunks(encoded)
    record = {
        "sources": corpus.sources,
        "fingerprint": corpus.fingerprint,
        "documents": len(corpus.documents),
        "chunks": len(chunks),
        "tokens": sum(len(chunk.tokens) for chunk in chunks),
        "scored_tokens": sum(chunk.n_scored for chunk in chunks),
    }
    if record["scored_tokens"] == 0:
        raise CorpusError(
            f"{', '.join(corpus.sources)}: no document has a token to train on",
            fix="give documents of two tokens or more, or prompts with a response",
        )
    return chunks, record


@dataclass(frozen=True)
class Trained:
    """A trained model that was published.

    Attributes
    ----------
    path : Path                   the model directory
    recipe : Recipe
    parameters : int              of the whole model
    loss : float                  mean nats per scored token of the finished model on its training set (or an
                                  even sample of it)
    result : TrainingResult
    chunks : sequence of Chunk    what it was trained on
    before : float or None        the same loss before it was fine-tuned; None: it was trained from scratch
    """

    path: Path
    recipe: Recipe
    parameters: int
    loss: float
    result: TrainingResult
    chunks: Sequence[Any] = ()
    before: float | None = None


def count_steps(
    chunks: Sequence[Any], *, epochs: float, steps: int | None, batch_tokens: int, seed: int
) -> tuple[float, int]:
    """Compute (passes, steps) of a training from either of them."""
    lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
    members = np.flatnonzero(np.array([chunk.n_scored for chunk in chunks]))
    a_pass = len(plan_epoch(lengths, members, batch_tokens=batch_tokens, seed=seed, epoch=0))
    if steps is not None:
        return steps / a_pass, steps
    return epochs, max(1, round(epochs * a_pass))


def run_recipe(
    run: RunDirectory,
    recipe: Recipe,
    model: Any,
    chunks: Sequence[Any],
    tokenizer: Any,
    options: LanguageOptions,
) -> Trained:
    """Train `model` (as from `initial_model(recipe)`) in a run directory, from its state if there is one, and
    publish it with `tokenizer` (see `save_model`)."""
    model = model.to(resolve_device(options.device))
    before = mean_loss(model, chunks, recipe) if recipe.kind == "finetune" else None
    marks = run.marks(recipe.steps, options.checkpoints)

    def save_checkpoint(step: int) -> None:
        if step in marks:
            save_model(model, tokenizer, run.checkpoint(step), merged_weights(model))

    with output.progress("training", recipe.steps, unit="steps") as ticker:
        result = train(
            model, chunks, recipe, kept=(run.state, SAVE_SECONDS), after_step=save_checkpoint, ticker=ticker
        )
    loss = mean_loss(model, chunks, recipe)
    run.clear()
    save_model(model, tokenizer, run.model, merged_weights(model))
    run.save_log(result.log)
    run.publish()
    parameters = sum(
        p.numel() for name, p in model.named_parameters() if not name.endswith((".lora_a", ".lora_b"))
    )
    return Trained(run.out, recipe, parameters, loss, result, chunks, before)
