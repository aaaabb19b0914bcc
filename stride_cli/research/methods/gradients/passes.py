"""Passes over corpus and queries, and the options that gradient methods share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import ModelError, UsageError
from stride_cli.operators.device_memory import free_bytes
from stride_cli.operators.initial_residuals import load_initial_residuals
from stride_cli.options import Options, entries, option
from stride_cli.output import progress
from stride_cli.parallel import available_bytes
from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.capture import Capture, Outcome, Visitor

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel

REDUCTIONS = ("sum", "mean")
LABELS = ("true", "sampled")
ENDS = ("final", "average")
_LEAST_ROOM = 1 << 30
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class MethodOptions(Options):
    """Options of a method, each checked under the method's name."""

    method: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, entry in entries(type(self)).items():
            entry.check(getattr(self, name), f"{self.method}: {name}", f"write {name}={entry.example}")


@dataclass(frozen=True)
class PassOptions(MethodOptions):
    """Options of passes over corpus and queries."""

    layers: str | None = option(None, "Linear layers that count, see `Capture`.")
    batch_tokens: int = option(2048, "Padded tokens of one pass.", low=1)


@dataclass(frozen=True)
class SumOptions(PassOptions):
    """Passes whose losses are reduced over a chunk's tokens."""

    reduction: str = option("sum", "A chunk's loss: sum or mean over its tokens.", choices=REDUCTIONS)
    residuals: str = option("final", "Tokens count as at training's end, or on average.", choices=ENDS)


@dataclass(frozen=True)
class ProductOptions(SumOptions):
    """Passes over the corpus for as many queries as have room."""

    query_bytes: int | None = option(
        None, "Most memory for gradients of queries; default: an eighth of what is free.", low=1
    )


def query_room(asked: int | None, device: torch.device) -> int:
    """Return the bytes that gradients of queries may take: those asked for, or an eighth of the free memory,
    as a pass holds several times as much beside them."""
    if asked is not None:
        return asked
    free = available_bytes() if device.type == "cpu" else free_bytes(device)
    return max(_LEAST_ROOM, (free or 0) // 8)


def open_capture(workspace: Workspace, layers: str | None, model: AttributableModel | None = None) -> Capture:
    """Hook the chosen layers of the workspace's model, or of another checkpoint of it.

    Default: the feed-forward parts of a language model, as in the paper's runs, or its whole body where those
    are no linear layers (fused experts); all layers of a classifier.
    """
    probe = workspace.chunks.batch(np.arange(1))
    model = workspace.model if model is None else model
    *preferred, last = [layers] if layers is not None else workspace.model.capture_layers
    for chosen in preferred:
        with contextlib.suppress(UsageError):
            return Capture(model, probe, layers=chosen)
    return Capture(model, probe, layers=last)


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of one model.

    Attributes
    ----------
    capture : Capture
    batch_tokens : int       padded tokens of one pass
    reduction : "sum" | "mean"
        A chunk's loss is summed over its scored tokens, as training weighs chunks that averages over the
        tokens of a batch, or the mean. A query's loss is the mean.
    seed : int               of drawn labels
    averaged : bool          tokens of chunks count as on average over training (`average_residuals`)
    """

    capture: Capture
    batch_tokens: int
    reduction: str
    seed: int
    averaged: bool = False

    @classmethod
    def of(cls, options: SumOptions, capture: Capture, workspace: Workspace) -> Passes:
        """Open passes as a method's options have them."""
        load_residuals_once(workspace, options)
        averaged = options.residuals == "average"
        return cls(capture, options.batch_tokens, options.reduction, workspace.seed, averaged)

    def corpus(
        self,
        chunks: ChunkReader,
        visit: Visitor,
        title: str,
        *,
        output: str = "loss",
        labels: str = "true",
        draw: int = 0,
        rows: np.ndarray | None = None,
    ) -> Iterator[tuple[Batch, Outcome]]:
        """Yield every batch of chunks, after ``visit`` has seen its factors.

        With sampled labels, mean squares of the gradients estimate the Gauss–Newton matrix of the reduced
        loss; ``draw`` numbers independent sets of labels.
        """
        power = 0.0 if self.reduction == "sum" else (0.5 if labels == "sampled" else 1.0)
        batches = chunks.batches(self.batch_tokens, rows)
        with progress(title, chunks.n_chunks if rows is None else len(rows), unit="chunks") as ticker:
            for batch in batches:
                uniform = label_uniforms(self.seed, batch, draw) if labels == "sampled" else None
                averaged, run = self.averaged and uniform is None, self.capture.run
                yield batch, run(batch, visit, uniform=uniform, output=output, power=power, averaged=averaged)
                ticker.advance(len(batch.rows))

    def queries(self, batch: Batch, visit: Visitor, *, output: str = "loss") -> Outcome:
        """Take the gradients of one batch of queries, of the mean over scored tokens."""
        return self.capture.run(batch, visit, output=output, power=1.0)

    def query_batches(self, queries: QuerySet, start: int, stop: int) -> Iterator[tuple[slice, Batch]]:
        """Yield queries start … stop − 1 in batches of at most `batch_tokens` padded tokens."""
        for group in queries.groups(self.capture.model, self.batch_tokens, np.arange(start, stop)):
            yield slice(int(group[0]), int(group[-1]) + 1), queries.batch(group)


def load_residuals_once(workspace: Workspace, settings: Any) -> None:
    """Load initial-model residuals for all methods of a comparison; not where the index knows them."""
    if workspace.chunks.before is None:
        load_initial_residuals(workspace.model, workspace.chunks, settings)


def label_uniforms(seed: int, batch: Batch, draw: int) -> Tensor:
    """Draw uniforms (B, T) float64 for labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    rows = [stream(seed, "gradient labels", int(row), draw).random(length) for row in batch.rows]
    return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True)
class Checkpoint:
    """A model that a method averages over; `path` None is the workspace's own, `rate` its weight."""

    path: Path | None
    rate: float

    def load(self, workspace: Workspace) -> AttributableModel:
        """Open the model on the workspace's device in its dtype."""
        return workspace.model if self.path is None else load_checkpoint(workspace, self.path)


def load_checkpoint(workspace: Workspace, path: Path) -> AttributableModel:
    """Load another checkpoint of the workspace's model.

    Raises
    ------
    ModelError      it cannot be loaded, or has another vocabulary
    """
    from stride_cli.models.loading import Opener

    model = Opener.like(workspace.model).load(str(path))
    model.share_inputs(workspace.model)
    if model.vocab_size != workspace.model.vocab_size:
        raise ModelError(
            f"{path} has {model.vocab_size} outputs, the task's model {workspace.model.vocab_size}",
            fix="give checkpoints of the same training",
        )
    return model


def find_checkpoints(given: str | None, rates: str | None) -> list[Checkpoint]:
    """Find the checkpoints that a method's options name.

    Parameters
    ----------
    given : str, optional
        Paths separated by "|". A single directory of `stride model train --checkpoints` stands for all of its
        checkpoints and its final model. None: the workspace's model only.
    rates : str, optional
        A weight for each, separated by "|". Default: the learning rate that the training log records at the
        checkpoint's step, or 1 for all where one has none.

    Raises
    ------
    UsageError      a path is not there, or there are not as many rates, or rates only
    """
    if given is None:
        if rates is not None:
            raise UsageError(
                f"rates={rates} is given without checkpoints", fix="name them: checkpoints=PATH|PATH"
            )
        return [Checkpoint(None, 1.0)]
    paths = [Path(part).expanduser() for part in given.split("|")]
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(
            f"there is no checkpoint at '{missing[0]}'", fix="give paths of checkpoints, separated by '|'"
        )
    if len(paths) == 1:
        paths = [*sorted(paths[0].glob("checkpoints/step-*")), paths[0]]
    if rates is not None:
        try:
            weights = [float(part) for part in rates.split("|")]
        except ValueError as error:
            raise UsageError(
                f"rates={rates} should be numbers separated by '|'", fix="write for example rates=0.1|0.05"
            ) from error
        if len(weights) != len(paths):
            raise UsageError(
                f"there are {len(weights)} rates for {len(paths)} checkpoints",
                fix="give one rate for each checkpoint",
            )
    else:
        recorded = [_recorded_rate(path) for path in paths]
        known = [rate for rate in recorded if rate]
        weights = known if len(known) == len(paths) else [1.0] * len(paths)
    return [Checkpoint(path, weight) for path, weight in zip(paths, weights, strict=True)]


def _recorded_rate(path: Path) -> float | None:
    """Read the learning rate at a checkpoint's step from the run's log; None without one."""
    inside = path.parent.name == "checkpoints"
    log = (path.parent.parent if inside else path) / "training_log.jsonl"
    if not log.is_file():
        return None
    points = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    points = [point for point in points if "lr" in point and "step" in point]
    if not points:
        return None
    step = int(path.name.partition("-")[2]) if inside else int(points[-1]["step"])
    return float(min(points, key=lambda point: abs(point["step"] - step))["lr"])
