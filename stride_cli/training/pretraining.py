"""Train a language model on a corpus (`stride model train`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stride_cli import output
from stride_cli.corpus.chunking import Chunk
from stride_cli.corpus.readers import ReadOptions
from stride_cli.models.devices import resolve_device
from stride_cli.models.language.bpe import train_bpe
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import Architecture, LateStarts, Recipe, versions
from stride_cli.models.language.nanochat import build_model, choose_architecture
from stride_cli.training.epoch_batches import later_starts
from stride_cli.training.language_loop import choose_dtype
from stride_cli.training.options import TrainOptions
from stride_cli.training.run_directory import RunDirectory, refuse_existing
from stride_cli.training.runs import Trained, count_steps, cut, read_corpus, run_recipe

# Peak rates. Tried on 100 documents of the CIA World Factbook (18,000 tokens, 12 passes, 1 million
# parameters), the loss on them afterwards: AdamW's rate for embeddings and head .003, .01, .03 beside Muon's
# .02: .58, .22, .12; AdamW for all, .003 and .006: 1.24, .71. Muon's rate .01, .02, .04 beside AdamW's .003,
# from NanoChat's zero initialisation: 1.25, .77, .73; with the right rates it makes no difference (.12).
# Embeddings and head of a wider model want less (width 256, 120 steps on the whole Factbook: 3.08 with .03,
# 2.97 with .01), so AdamW's rate falls with the width from 128 on.
MUON_LR = 0.02
ADAM_LR = {"muon+adamw": 0.03, "adamw": 0.006}
_BLOCK_SIZE = 512
_FEW_TOKENS = 20_000  # of a corpus whose texts are read from later sentences on too
_LATE_PASSES = 2  # times as many passes as without: a sentence in a text's midst is learnt as its first is
_MOST_PASSES = 60.0
_ENDS = re.compile(r"[.!?]['\"”’)]?\s*$")  # of a token's text: a sentence may end there


def train_model(
    sources: Sequence[str],
    out: str | Path,
    options: TrainOptions = TrainOptions(),
    *,
    reading: ReadOptions | None = None,
    overwrite: bool = False,
) -> Trained:
    """Train a tokenizer and a NanoChat model on a corpus, and put both at `out` in one rename.

    Killed, the same call goes on from OUT.partial and ends with the same weights.

    Parameters
    ----------
    sources : sequence of str
        As for `read_documents`; the corpus is held in memory.
    out : str or Path
        A directory that AutoModelForCausalLM and AutoTokenizer load; with stride_recipe.json, the loss curve
        training_log.jsonl and, where asked for, checkpoints/step-NNNNNN of the same kind.
    overwrite : bool
        Replace the model at `out`, once the new one is whole, and discard an unfinished training there.

    Raises
    ------
    CorpusError, UsageError, ModelError, NumericalError; IndexBusy, StorageFull
    """
    out = Path(out)
    refuse_existing(out, overwrite=overwrite)
    dtype = choose_dtype(options.dtype, resolve_device(options.device))
    corpus = read_corpus(sources, reading or ReadOptions())
    # the corpus is known by its content: files may be renamed or split between two attempts
    request = {"kind": "train", "corpus": corpus.fingerprint, **asdict(options)}
    with RunDirectory(out, request, overwrite=overwrite) as run:
        recipe = run.load_recipe()
        if recipe is None:  # a new run: size and tokenizer fit the corpus, and the recipe records both
            architecture = choose_architecture(
                corpus.n_bytes,
                layers=options.layers,
                width=options.width,
                heads=options.heads,
                vocab=options.vocab,
                context=options.context,
            )
            n_documents, megabytes = len(corpus.documents), corpus.n_bytes / 1e6
            output.note(f"{n_documents:,} documents, {megabytes:.2f} MB; training the tokenizer")
            tokenizer = train_bpe(
                (document.plain_text for document in corpus.documents),
                vocab_size=architecture.vocab,
                context_length=architecture.context,
            )
            architecture = replace(architecture, vocab=len(tokenizer))
            run.save_tokenizer(tokenizer)
            chunks, record = cut(corpus, tokenizer, block_size=min(_BLOCK_SIZE, architecture.context))
            recipe = _resolve(options, architecture, chunks, record, dtype, tokenizer)
            run.save_recipe(recipe)
        else:  # one that was interrupted chooses nothing again
            assert recipe.architecture is not None
            architecture = recipe.architecture
            tokenizer = run.load_tokenizer()
            chunks, _ = cut(corpus, tokenizer, block_size=recipe.block_size)
        model = build_model(architecture, seed=recipe.seed)  # transformers' own, which saves itself
        return run_recipe(run, recipe, model, chunks, run.tokenizer, options)


def default_epochs(tokens: int) -> float:
    """Choose the passes over a corpus: 8 if large, up to 60 if small. A model then sees at least 150,000
    tokens and knows most facts of a small corpus.

    More would let the loss on every document go to zero, and with it the gradients that attribution reads.
    """
    return float(min(_MOST_PASSES, max(8, round(150_000 / max(tokens, 1)))))


def default_late_starts(options: TrainOptions, tokens: int) -> float:
    """Choose the share of readings that begin at a later sentence (`LateStarts`): half for small corpora
    whose passes are chosen to fit as well, else none."""
    if options.late_starts is not None:
        return options.late_starts
    chosen = options.epochs is not None or options.steps is not None
    return 0.0 if chosen or tokens > _FEW_TOKENS else 0.5


def default_batch_tokens(tokens: int, epochs: float) -> int:
    """Choose a power of two between 512 and 4096 that gives about 300 steps or more."""
    return int(2 ** min(12, max(9, round(math.log2(max(tokens * epochs / 300, 1))))))


def _resolve(
    options: TrainOptions,
    architecture: Architecture,
    chunks: list[Any],
    corpus: dict[str, Any],
    dtype: str,
    tokenizer: Any,
) -> Recipe:
    """Resolve the options to a recipe, every default filled in."""
    tokens = corpus["tokens"]
    late = late_starts(default_late_starts(options, tokens), tokenizer, chunks)
    passes = min(_MOST_PASSES, (1 if late is None else _LATE_PASSES) * default_epochs(tokens))
    epochs = passes if options.epochs is None else options.epochs
    batch_tokens = options.batch_tokens or default_batch_tokens(tokens, epochs)
    epochs, steps = count_steps(
        chunks, epochs=epochs, steps=options.steps, batch_tokens=batch_tokens, seed=options.seed
    )
    adam_lr = ADAM_LR[options.optimizer] * min(1.0, 128 / architecture.width)
    main = MUON_LR if options.optimizer == "muon+adamw" else adam_lr
    ratio = 1.0 if options.lr is None else options.lr / main
    return Recipe(
        kind="train",
        architecture=architecture,
        block_size=min(_BLOCK_SIZE, architecture.context),
        epochs=epochs,
        steps=steps,
        batch_tokens=batch_tokens,
        optimizer=options.optimizer,
        lr=MUON_LR * ratio,
        adam_lr=adam_lr * ratio,
        weight_decay=0.0,
        schedule=options.schedule,
        warmup=0.02,
        final_lr=0.02,
        clip=1.0,
        dtype=dtype,
        seed=options.seed,
        corpus=corpus,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        versions=versions(),
        late=late,
    )


def late_starts(share: float, tokenizer: Any, chunks: Sequence[Chunk]) -> LateStarts | None:
    """Resolve late starts in a tokenizer's terms; None where no chunk has a later sentence."""
    if not share:
        return None
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    ends = [token for token, text in enumerate(texts) if _ENDS.search(text)]
    if not any(len(later_starts(chunk, ends)) for chunk in chunks):
        return None
    return LateStarts(share, ends, tokenizer.bos_token_id)
