"""Projections in the making, for `StrideCallback`: whose rows pass, at what rate, and what outlives kills."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stride_cli.errors import UsageError
from stride_cli.free_memory import available_bytes
from stride_cli.operators.layer_projections import GATHERED, GatheredProjections, ProjectedLayers, rank_for
from stride_cli.operators.saving import save_atomically
from stride_cli.output import note
from stride_cli.training.gradient_hooks import Gatherer, trained_layers
from stride_cli.training.recorded_order import RecordedOrder
from stride_cli.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


class Gathering:
    """Projections in the making: whose rows, at what rate, kept with the trainer's checkpoints.

    Parameters
    ----------
    size : bytes of an example
    run : where they are written
    """

    def __init__(
        self,
        size: int,
        args: TrainingArguments,
        state: TrainerState,
        model: Any,
        loader: Any,
        order: RecordedOrder,
        run: RunDirectory,
    ) -> None:
        self._size, self._run, self._order = size, run, order
        self._examples, self._batches = loader.dataset, len(loader)
        self._rate, self._compared = 0.0, False
        trained = trained_layers(model)
        rank = rank_for(size, len(trained))
        self._seed = int(args.data_seed if args.data_seed is not None else args.seed)
        self.layers = ProjectedLayers(
            tuple(layer.name for layer in trained), tuple(layer.widths for layer in trained), rank, self._seed
        )
        _refuse_large(len(self._examples), self.layers.size)
        self.gatherer = Gatherer(model, trained, self.layers, len(self._examples), self._rows)
        self._resumed = self._first = state.global_step
        if state.global_step:
            self._resume(state.global_step)

    def skipped(self, args: TrainingArguments, state: TrainerState) -> int:
        """Examples of the pass that begins which were trained on before the trainer's checkpoint."""
        resumed, self._resumed = self._resumed, 0
        self._compared = False
        if not resumed or args.ignore_data_skip:
            return 0
        together = args.gradient_accumulation_steps
        done = resumed % max(1, -(-self._batches // together)) * together
        return done * (self._order.batch_size or args.train_batch_size)

    def begin(self, optimizer: Any) -> None:
        """A step begins."""
        self._rate = float(optimizer.param_groups[0]["lr"])
        self.gatherer.expect()

    def end(self, *, more: bool = False) -> None:
        """A batch has passed; `more` of the same step are to come."""
        self.gatherer.add(self._rate)
        if more:
            self.gatherer.expect()

    def save(self, out: Path, step: int) -> None:
        """Keep the sums beside a checkpoint of the trainer, for as long as that is there."""
        state = {
            "sums": torch.from_numpy(self.gatherer.sums),
            "first": self._first,
            "lost": self.gatherer.lost,
        }
        save_atomically(state, self._place(step))
        for old in self._run.partial.glob(self._place(0).name.replace("000000", "*")):
            number = int(old.stem.rpartition("-")[2])
            if number != step and not (out / f"checkpoint-{number}").is_dir():
                old.unlink()

    def finish(self) -> None:
        """Write what was gathered into the run."""
        self.gatherer.remove()
        if self.gatherer.lost:
            note(f"{self.gatherer.lost:,} batches whose gradients were not finite are not in the projections")
        made = GatheredProjections.of(self.layers, self.gatherer.sums, self._size, self._seed)
        made.save(self._run.model / GATHERED, after_step=self._first)

    def _place(self, step: int) -> Path:
        return self._run.partial / f"projections-{step:06d}.pt"

    def _resume(self, step: int) -> None:
        """Go on from what was kept with the trainer's checkpoint of that step."""
        file = self._place(step)
        if file.is_file():
            state = torch.load(file, weights_only=True)
            if state["sums"].shape == self.gatherer.sums.shape:
                self.gatherer.sums[:] = state["sums"].numpy()
                self._first, self.gatherer.lost = state["first"], state["lost"]
                return
        note(
            f"warning: nothing was kept of the projections at step {step:,}, where training goes on: they "
            "hold what comes after it"
        )

    def _rows(self, count: int, called: Mapping[str, Any]) -> np.ndarray:
        """Numbers of the examples of a batch, the first of a pass compared with what the model sees."""
        rows = self._order.take(count)
        if not self._compared:
            self._compared = True
            self._compare(rows, called)
        return rows

    def _compare(self, rows: np.ndarray, called: Mapping[str, Any]) -> None:
        seen, mask = called["input_ids"].tolist(), called.get("attention_mask")
        kept = mask.tolist() if mask is not None and mask.shape == called["input_ids"].shape else None
        for place, row in enumerate(rows.tolist()):
            example = self._examples[row]
            if not isinstance(example, Mapping) or example.get("input_ids") is None:
                return
            told = [int(token) for token in example["input_ids"]]
            found = seen[place]
            if kept is not None:
                found = [token for token, there in zip(found, kept[place], strict=True) if there]
                there = example.get("attention_mask")
                told = told if there is None else [t for t, k in zip(told, there, strict=True) if k]
            together = min(len(told), len(found))  # a collator pads, or cuts
            if told[:together] != found[:together]:
                raise UsageError(
                    f"row {place} of a batch is not example {row} of the training dataset, which was drawn",
                    fix="a collator that changes the order or the tokens allows no projections",
                )


def refuse_unprojectable(args: TrainingArguments, order: RecordedOrder | None) -> None:
    """UsageError where gradients of single examples cannot be told."""
    several = args.world_size > 1 or args.n_gpu > 1
    for refused, what in (
        (several, f"training runs on {max(args.world_size, args.n_gpu)} processes or GPUs"),
        (bool(args.torch_compile), "the model is compiled (torch_compile)"),
        (bool(args.label_smoothing_factor), "the loss is smoothed (label_smoothing_factor)"),
        (order is None, "the order of the examples is not known"),
    ):
        if refused:
            raise UsageError(
                f"{what}, and projections of single examples cannot be gathered",
                fix="leave projections out: StrideCallback(out); stride train makes them of the model",
            )


def _refuse_large(examples: int, numbers: int) -> None:
    """UsageError where the sums would not fit into memory."""
    wanted, free = 4 * examples * numbers, available_bytes()
    if free is not None and wanted > free // 2:
        raise UsageError(
            f"projections of {examples:,} examples take {wanted / 1e9:.1f} GB while training lasts, and "
            f"{free / 1e9:.1f} GB are free",
            fix="give fewer bytes: StrideCallback(out, projections=512)",
        )
