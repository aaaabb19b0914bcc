"""`StrideCallback`: a training by transformers' `Trainer`, or TRL's, recorded so that an index can be built.

What is written is what `stride model train` writes: a directory that is the model, with its recipe, its loss
curve and checkpoints of the same kind; beside these the training set as a corpus, the order in which its
examples were drawn, and the moments of Adam. The loop stays its owner's: the recipe describes it, and is not
one that `stride evaluate` repeats.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from index_format.durable import make_directory, replace_file, sync_directory
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import RECORDED, Recipe, versions
from stride_cli.models.language.structure import context_length
from stride_cli.models.loading import model_fingerprint
from stride_cli.output import note
from stride_cli.training.adapters import lora_rank, refuse_other_adapters, whole_model
from stride_cli.training.recorded_corpus import CORPUS, Recorded, write_corpus
from stride_cli.training.recorded_order import RecordedOrder
from stride_cli.training.run_directory import RunDirectory, refuse_existing, save_model

RUN = "stride_run.json"
_ORDER_RULE = (
    "order/epoch-NNN.npy: the examples of each pass, by number (int64), in the order they were drawn"
)
_BLOCK_SIZE = 512
_MOMENTS = ("exp_avg", "exp_avg_sq")
_unfinished: dict[Path, RunDirectory] = {}  # of this process; a notebook trains again after Ctrl-C


class StrideCallback(TrainerCallback):
    """Give it to a `Trainer` (``callbacks=[StrideCallback("run")]``), then: stride index build --from-run run

    Parameters
    ----------
    out : str or Path
        A directory that appears, whole, when the training ends (until then OUT.partial): the model and its
        tokenizer, ``corpus.jsonl``, ``stride_recipe.json``, ``stride_run.json``, ``training_log.jsonl``,
        ``order/epoch-NNN.npy``, ``moments/step-NNNNNN.safetensors``, ``checkpoints/step-NNNNNN``.
    dataset : sequence of mappings, optional
        The training set with its texts, row i being the trainer's example i; default: what the trainer has,
        whose examples are decoded where only tokens are left.
    checkpoints : int
        Kept on the way, at even distances: `stride train --checkpoints` measures with them too.
    moments : bool
        Keep Adam's first and second moments (twice the trained weights' bytes), at the end and with each
        checkpoint.
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
        self,
        out: str | Path,
        dataset: Any = None,
        *,
        checkpoints: int = 0,
        moments: bool = True,
        overwrite: bool = False,
    ) -> None:
        if checkpoints < 0:
            raise UsageError(f"checkpoints is {checkpoints} (expected 0 or more)", fix="checkpoints=3")
        self._out, self._dataset = Path(out), dataset
        self._checkpoints, self._moments, self._overwrite = checkpoints, moments, overwrite
        refuse_existing(self._out, overwrite=overwrite)
        self._run: RunDirectory | None = None
        self._marks: set[int] = set()
        self._order: RecordedOrder | None = None
        self._log: list[dict[str, Any]] = []

    # ---- what the trainer calls ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        model, tokenizer = given["model"], given.get("processing_class")
        _refuse_unknown(args, tokenizer)
        refuse_other_adapters(model)
        loader = given["train_dataloader"]
        self._order = RecordedOrder.of(loader)
        examples = _examples(self._dataset, loader)
        staged = self._out.with_name(self._out.name + f".{CORPUS}")
        make_directory(staged.parent)
        corpus = write_corpus(examples, tokenizer, staged)
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
        self._run, self._log = run, []
        _unfinished[self._out.absolute()] = run
        parts = self._checkpoints + 1
        self._marks = {round(state.max_steps * part / parts) for part in range(1, parts)} - {0}
        self._record_arguments(args, corpus)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._run is not None and self._order is not None:
            self._order.epoch = math.floor((state.epoch or 0) + 1e-6)
            self._save_order()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._run is None or state.global_step not in self._marks:
            return
        directory = self._run.model / "checkpoints" / f"step-{state.global_step:06d}"
        shutil.rmtree(directory, ignore_errors=True)  # what a kill left of it
        self._save_model(given, directory)
        self._save_moments(state.global_step, given)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        logs = given.get("logs") or {}
        if self._run is not None and "loss" in logs:
            self._log.append(
                {
                    "step": state.global_step,
                    "epoch": math.floor(state.epoch or 0),
                    "loss": float(logs["loss"]),
                    "lr": float(logs.get("learning_rate", math.nan)),
                    "tokens": int(state.num_input_tokens_seen or 0),
                }
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._save_order()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._run is None:
            return
        run = self._run
        recipe = run.load_recipe()
        assert recipe is not None
        run.save_recipe(replace(recipe, steps=state.global_step, epochs=float(state.epoch or recipe.epochs)))
        self._save_order()
        self._save_moments(state.global_step, given)
        self._save_model(given, run.model)
        run.save_log(self._log)
        run.publish()
        _unfinished.pop(self._out.absolute(), None)
        self._run = None
        note(f"recorded the training in {self._out}; next: stride index build --from-run {self._out}")

    # ---- what is written ----

    def _save_model(self, given: dict[str, Any], directory: Path) -> None:
        model, weights = whole_model(given["model"])
        save_model(model, given["processing_class"], directory, weights)

    def _record_arguments(self, args: TrainingArguments, corpus: Recorded) -> None:
        """What decides the weights beside the recipe, in the trainer's own words; no token is among it."""
        assert self._run is not None
        told = {
            name: value
            for name, value in args.to_sanitized_dict().items()
            if "token" not in name and not name.endswith(("_dir", "_url"))
        }
        record = {
            "run_version": 1,
            "by": "transformers.Trainer",
            "documents": corpus.documents,
            "examples_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "arguments": told,
        }
        replace_file(self._run.model / RUN, json.dumps(record, indent=1, default=str).encode())

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

    def _save_moments(self, step: int, given: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        if not self._moments or self._run is None:
            return
        found = adam_moments(given["model"], given.get("optimizer"))
        if not found:
            return
        folder = self._run.model / "moments"
        make_directory(folder)
        file = folder / f"step-{step:06d}.safetensors"
        save_file(found, file.with_suffix(".new"), metadata={"step": str(step)})
        file.with_suffix(".new").replace(file)
        sync_directory(folder)


def adam_moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Adam's moments as NAME.exp_avg and NAME.exp_avg_sq of every parameter that it has stepped, on the CPU;
    empty where the optimizer has none under these names."""
    states = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
    found = {}
    for name, parameter in model.named_parameters():
        state = states.get(parameter, {})
        for key in _MOMENTS:
            if isinstance(state.get(key), torch.Tensor):
                found[f"{name}.{key}"] = state[key].detach().cpu().contiguous()
    return found


def _refuse_unknown(args: TrainingArguments, tokenizer: Any) -> None:
    """UsageError where what the trainer does cannot be recorded."""
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
    """The training set: as it was given, or as the loader has it."""
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
    """How the model is trained, in a recipe's words."""
    base = str(getattr(model, "name_or_path", "") or "")
    block_size = min(_BLOCK_SIZE, context_length(model))
    together = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = max(1, state.max_steps)
    return Recipe(
        kind=RECORDED,
        base=(str(Path(base).resolve()) if base and Path(base).exists() else base) or None,
        base_fingerprint=_base_fingerprint(base),
        block_size=block_size,
        epochs=float(args.num_train_epochs if args.max_steps <= 0 else state.num_train_epochs),
        steps=steps,
        batch_tokens=together * block_size,
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
        lora_rank=lora_rank(model),
        order=_ORDER_RULE,
        corpus={"sources": [CORPUS], "fingerprint": corpus.fingerprint, "documents": corpus.documents},
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        versions=versions(),
    )


def _base_fingerprint(base: str) -> str | None:
    """Of the checkpoint that training began from; None where there is none, or it is not on this machine."""
    if not base:
        return None
    try:
        return model_fingerprint(base)
    except ModelError:
        return None
