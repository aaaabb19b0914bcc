"""Fine-tune a model on a corpus (`stride model finetune`): on answers only, where there are prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from stride_cli.corpus.chunking import Chunk
from stride_cli.corpus.readers import ReadOptions
from stride_cli.models.devices import resolve_device
from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import Recipe, versions
from stride_cli.models.language.structure import check_vocabulary, context_length
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.models.loading import model_fingerprint
from stride_cli.models.spec import GivenModel, place_of
from stride_cli.training.initial_model import make_trainable
from stride_cli.training.language_loop import choose_dtype
from stride_cli.training.options import FinetuneOptions
from stride_cli.training.run_directory import RunDirectory, refuse_existing
from stride_cli.training.runs import Trained, count_steps, cut, read_corpus, run_recipe

_BLOCK_SIZE = 512
_EPOCHS = 3.0
_BATCH_TOKENS = 2048
_FEWEST_BATCHES, _FEWEST_STEPS, _FASTER = 8, 80, 3  # of a small corpus: in a pass, in all, times the rate
_SMALL = 50_000_000  # parameters; below, a model takes and needs larger steps


def finetune_model(
    sources: Sequence[str],
    model: GivenModel,
    out: str | Path,
    options: FinetuneOptions = FinetuneOptions(),
    *,
    reading: ReadOptions | None = None,
    overwrite: bool = False,
) -> Trained:
    """Fine-tune a checkpoint and put the whole model (low-rank parts merged, fp32) at `out` in one rename.

    The loss counts the tokens that the index scores: answers only for prompts with responses and
    conversations (in the model's chat template, where it has one), all of a plain text. Killed, the same call
    goes on.

    Parameters
    ----------
    sources : sequence of str     as for `read_documents`; the corpus is held in memory
    model : str or Path           directory, hub id or .gguf file; it is not changed
    out : str or Path             as for `train_model`

    Raises
    ------
    CorpusError, UsageError, ModelError, NumericalError; IndexBusy, StorageFull
    """
    out, place = Path(out), place_of(model)
    refuse_existing(out, overwrite=overwrite)
    dtype = choose_dtype(options.dtype, resolve_device(options.device))
    tokenizer = load_tokenizer(model)
    reading = reading or ReadOptions()
    corpus, skip = read_corpus(sources, reading), reading.on_bad == "skip"
    fingerprint = model_fingerprint(model)
    base = load_weights(model)
    vocabulary = base.get_input_embeddings().weight.shape[0]
    check_vocabulary(tokenizer, vocabulary)
    request = {"kind": "finetune", "model": fingerprint, "corpus": corpus.fingerprint, **asdict(options)}
    with RunDirectory(out, request, overwrite=overwrite) as run:
        recipe = run.load_recipe()
        block_size = recipe.block_size if recipe else min(_BLOCK_SIZE, context_length(base))
        chunks, record = cut(corpus, tokenizer, block_size=block_size, vocabulary=vocabulary, skip=skip)
        if recipe is None:
            recipe = replace(
                finetuning_recipe(chunks, options, base.num_parameters(), block_size=block_size, dtype=dtype),
                base=str(Path(place).resolve() if Path(place).exists() else place),  # or a hub id
                base_fingerprint=fingerprint,
                corpus=record,
                tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            )
            run.save_recipe(recipe)
        return run_recipe(run, recipe, make_trainable(base, recipe), chunks, tokenizer, options)


def finetuning_recipe(
    chunks: Sequence[Chunk], options: FinetuneOptions, n_parameters: int, *, block_size: int, dtype: str
) -> Recipe:
    """Resolve the recipe of a fine-tuning; model, corpus and tokenizer are left open.

    Parameters
    ----------
    n_parameters : int       of the model: small ones take larger steps
    block_size : int         most tokens of a chunk
    dtype : "fp32" | "bf16"
    """
    # three passes over 60 pairs are 9 steps, which teach nothing: of few tokens, more and smaller batches
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    batch_tokens = options.batch_tokens or min(_BATCH_TOKENS, max(block_size, tokens // _FEWEST_BATCHES))
    count = partial(count_steps, chunks, batch_tokens=batch_tokens, seed=options.seed)
    epochs, steps = count(epochs=options.epochs or _EPOCHS, steps=options.steps)
    short = options.epochs is None and options.steps is None and steps < _FEWEST_STEPS
    if short:
        epochs, steps = count(epochs=0, steps=_FEWEST_STEPS)
    return Recipe(
        kind="finetune",
        lora_rank=options.lora_rank,
        block_size=block_size,
        epochs=epochs,
        steps=steps,
        batch_tokens=batch_tokens,
        optimizer="adamw",
        lr=0.0,
        adam_lr=options.lr or default_lr(n_parameters, options.lora_rank) * (_FASTER if short else 1),
        weight_decay=0.0,
        schedule=options.schedule,
        warmup=0.05,
        final_lr=0.02,
        clip=1.0,
        dtype=dtype,
        seed=options.seed,
        corpus={},
        tokenizer_fingerprint="",
        versions=versions(),
    )


def default_lr(n_parameters: int, lora_rank: int) -> float:
    """Choose AdamW's peak rate: ten times higher for low-rank matrices and for small models."""
    rate = 3e-5 if n_parameters >= _SMALL else 3e-4
    return rate * 10 if lora_rank else rate
