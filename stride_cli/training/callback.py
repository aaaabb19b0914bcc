"""`StrideCallback`: record a training by transformers' `Trainer`, or TRL's, so that an index can be built.

It writes what `stride model train` writes: a directory that is the model, with its recipe, its loss curve
and checkpoints. Beside these stand the training set as a corpus and the order in which its examples
were drawn. The recipe describes the loop of the `Trainer`; `stride evaluate` does not repeat it.
"""

from __future__ import annotations

import io
import json
import math
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerState, TrainingArguments

from index_format.durable import make_directory, replace_file
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import RECORDED, Recipe, versions
from stride_cli.models.language.structure import context_length
from stride_cli.models.loading import model_fingerprint
from stride_cli.output import note
from stride_cli.training.recording import (
    CORPUS,
    RUN,
    Recorded,
    RecordedOrder,
    collated,
    lora_ranks,
    refuse_other_adapters,
    whole_model,
    write_corpus,
)
from stride_cli.training.run_directory import RunDirectory, refuse_existing, save_model

_ORDER_RULE = (
    "order/epoch-NNN.npy: the examples of each pass, by number (int64), in the order they were drawn"
)
_BLOCK_SIZE = 512
_unfinished: dict[Path, RunDirectory] = {}  # of this process; a notebook trains again after Ctrl-C


class StrideCallback(TrainerCallback):
    """Give it to a `Trainer` (``callbacks=[StrideCallback("run")]``), then: stride index build --from-run run

    Parameters
    ----------
    out : str or Path
        A directory that appears, whole, when the training ends (until then OUT.partial): the model and its
        tokenizer, ``corpus.jsonl``, ``stride_recipe.json``, ``stride_run.json``, ``training_log.jsonl``,
        ``order/epoch-NNN.npy``, ``checkpoints/step-NNNNNN``.
    dataset : sequence of mappings, optional
        The training set with its texts, row i being the trainer's example i; default: what the trainer has,
        whose examples are decoded where only tokens are left.
    checkpoints : int
        Models kept along the way, evenly spaced: `stride train --checkpoints` measures with them too.
    overwrite : bool
        Replace the model at `out`, and discard an unfinished recording of another training.

    Raises
    ------
    UsageError      when training begins: no tokenizer, a dataset without an order or a length, examples
                    without a text, sharded weights, something at `out`
    CorpusError     an example is empty
    IndexBusy, StorageFull
    """

    def __init__(
        self, out: str | Path, dataset: Any = None, *, checkpoints: int = 0, overwrite: bool = False
    ) -> None:
        if checkpoints < 0:
            raise UsageError(f"checkpoints is {checkpoints} (expected 0 or more)", fix="checkpoints=3")
        self._out, self._dataset = Path(out), dataset
        self._checkpoints, self._overwrite = checkpoints, overwrite
        refuse_existing(self._out, overwrite=overwrite)
        self._run: RunDirectory | None = None
        self._marks: set[int] = set()
        self._order: RecordedOrder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the corpus and the recipe; refuse what cannot be recorded before the first step."""
        if not state.is_world_process_zero:
            return
        model, tokenizer = given["model"], given.get("processing_class")
        _refuse_unknown(args, tokenizer)
        refuse_other_adapters(model)
        loader = given["train_dataloader"]
        self._order = RecordedOrder.of(loader)
        examples = _examples(self._dataset, loader)
        # the run directory is named by the corpus, which is not read before it is written
        staged = self._out.with_name(self._out.name + f".{CORPUS}")
        make_directory(staged.parent)
        corpus = write_corpus(examples, tokenizer, staged, collated(loader))
        try:
            recipe = _recipe(args, state, model, tokenizer, corpus)
            if (left := _unfinished.pop(self._out.absolute(), None)) is not None:
                left.release()
            request = {"kind": RECORDED, "recipe": json.loads(replace(recipe, versions={}).to_json())}
            run = RunDirectory(self._out, request, overwrite=self._overwrite)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        staged.replace(run.model / CORPUS)
        run.save_recipe(recipe)
        told = json.dumps(_arguments(args, corpus), indent=1, default=str)
        replace_file(run.model / RUN, told.encode())
        self._run = run
        _unfinished[self._out.absolute()] = run
        self._marks = run.marks(state.max_steps, self._checkpoints)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note which pass begins."""
        if self._order is not None:
            self._order.epoch = math.floor((state.epoch or 0) + 1e-6)
            self._save_order()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep a checkpoint where one is due."""
        if self._run is not None and state.global_step in self._marks:
            _save_whole(given, self._run.checkpoint(state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the order so far: the training may go on from here after a kill."""
        self._save_order()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the model, and let the directory appear."""
        if self._run is None:
            return
        self._save_order()
        run, self._run = self._run, None
        recipe = run.load_recipe()
        assert recipe is not None
        run.save_recipe(replace(recipe, steps=state.global_step, epochs=float(state.epoch or recipe.epochs)))
        _save_whole(given, run.model)
        run.save_log([_point(logged) for logged in state.log_history if "loss" in logged])
        run.publish()
        _unfinished.pop(self._out.absolute(), None)
        note(f"recorded the training in {self._out}; next: stride index build --from-run {self._out}")

    def _save_order(self) -> None:
        if self._run is None or self._order is None:
            return
        folder = self._run.model / "order"
        make_directory(folder)
        for epoch in [epoch for epoch in self._order.drawn if epoch <= self._order.epoch]:
            data = io.BytesIO()
            np.save(data, np.array(self._order.drawn[epoch], np.int64))
            replace_file(folder / f"epoch-{epoch:03d}.npy", data.getvalue())
            if epoch < self._order.epoch:  # it is over
                del self._order.drawn[epoch]


def _point(logged: dict[str, Any]) -> dict[str, Any]:
    """Return a point of the loss curve, as `stride model train` writes it."""
    point = {"step": logged["step"], "epoch": math.floor(logged.get("epoch") or 0)}
    point |= {"loss": float(logged["loss"]), "lr": float(logged.get("learning_rate", math.nan))}
    return point | {"tokens": int(logged.get("num_input_tokens_seen") or 0)}


def _save_whole(given: dict[str, Any], directory: Path) -> None:
    model, weights = whole_model(given["model"])
    parts = model.parameters() if weights is None else weights.values()
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ModelError(
            "the trained weights are not finite: nothing is recorded",
            fix='train again in float32 or bfloat16: from_pretrained(…, dtype="float32")',
        )
    save_model(model, given["processing_class"], directory, weights)


def _arguments(args: TrainingArguments, corpus: Recorded) -> dict[str, Any]:
    """Return what decides the weights beside the recipe, in the trainer's words; no access token is in it."""
    told = {
        name: value
        for name, value in args.to_sanitized_dict().items()
        if "token" not in name and not name.endswith(("_dir", "_url"))
    }
    return {
        "run_version": 1,
        "by": "transformers.Trainer",
        "documents": corpus.documents,
        "form": asdict(corpus.form),
        "examples_per_step": _examples_per_step(args),
        "arguments": told,
    }


def _examples_per_step(args: TrainingArguments) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _refuse_unknown(args: TrainingArguments, tokenizer: Any) -> None:
    """Refuse a training that cannot be recorded."""
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        raise UsageError(
            "the trainer has no tokenizer, and an index is made with it",
            fix="Trainer(…, processing_class=tokenizer)",
        )
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise UsageError(
            "the weights are sharded (deepspeed or fsdp), and StrideCallback saves whole ones",
            fix="save the model with trainer.save_model, and build the index of it and its corpus",
        )


def _examples(dataset: Any, loader: Any) -> Any:
    """Return the training set as it was given, or as the loader has it."""
    trained: Any = getattr(loader, "dataset", None)
    if not hasattr(trained, "__getitem__") or not hasattr(trained, "__len__"):
        raise UsageError(
            "the training dataset is a stream, whose examples have no numbers",
            fix="give the trainer a dataset of known length (datasets.Dataset)",
        )
    if dataset is None:
        return trained
    if len(dataset) != len(trained):
        raise UsageError(
            f"the dataset that was given has {len(dataset):,} rows, the trainer's {len(trained):,} examples",
            fix="give the very dataset that the trainer's was made of, row by row (packing joins rows)",
        )
    return dataset


def _recipe(
    args: TrainingArguments, state: TrainerState, model: Any, tokenizer: Any, corpus: Recorded
) -> Recipe:
    """Describe the training as a recipe."""
    base = str(getattr(model, "name_or_path", "") or "")
    block_size = min(max(_BLOCK_SIZE, corpus.longest), context_length(model))  # rows are never cut
    steps, ranks = max(1, state.max_steps), lora_ranks(model)
    return Recipe(
        kind=RECORDED,
        base=(str(Path(base).resolve()) if base and Path(base).exists() else base) or None,
        base_fingerprint=_base_fingerprint(base),
        block_size=block_size,
        epochs=float(args.num_train_epochs if args.max_steps <= 0 else state.num_train_epochs),
        steps=steps,
        batch_tokens=_examples_per_step(args) * block_size,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        lr=0.0,
        adam_lr=float(args.learning_rate),
        weight_decay=float(args.weight_decay),
        schedule=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        warmup=args.get_warmup_steps(steps) / steps,
        final_lr=0.0,
        clip=float(args.max_grad_norm or 0.0),
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        seed=int(args.data_seed if args.data_seed is not None else args.seed),
        lora_rank=max(ranks.values(), default=0),
        lora_layers=list(ranks) or None,
        order=_ORDER_RULE,
        corpus={"sources": [CORPUS], "fingerprint": corpus.fingerprint, "documents": corpus.documents},
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        versions=versions(),
    )


def _base_fingerprint(base: str) -> str | None:
    """Fingerprint the checkpoint that training began from; None: there is none, or it is elsewhere."""
    with suppress(ModelError):
        return model_fingerprint(base) if base else None
    return None
