"""Train a classifier on a file of examples."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stride_cli import output
from stride_cli.errors import CorpusError, ModelError, UsageError
from stride_cli.models.classifier.classifier_model import ClassifierModel, Standardisation
from stride_cli.models.classifier.classifier_recipe import checkpoint_steps, default_recipe, software_versions
from stride_cli.models.classifier.directory import load_weights, refuse_existing, save_classifier
from stride_cli.models.classifier.examples import (
    Columns,
    Examples,
    class_numbers,
    find_classes,
    read_examples,
)
from stride_cli.models.classifier.networks import build_network, choose_network
from stride_cli.models.devices import resolve_device
from stride_cli.parallel import torch_threads
from stride_cli.randomness import stream
from stride_cli.schema.model_records import TrainedClassifier
from stride_cli.training.classifier_loop import outcomes_of, train_network
from stride_cli.training.options import ClassifierOptions

_ONE_THREAD = 1_000_000  # weights
_CHECKPOINTS = 9


def train_classifier(
    source: str | Path,
    out: str | Path,
    options: ClassifierOptions | None = None,
    *,
    columns: Columns | None = None,
    overwrite: bool = False,
) -> TrainedClassifier:
    """Train a classifier on rows of a file and write it to a directory, with its recipe.

    Inputs are standardised by mean and deviation of the training rows: one pair for images (integers, or more
    than one axis an example), one a column else.

    Parameters
    ----------
    source : .npz, .csv, .tsv or .parquet; see `read_examples`
    out : directory
    columns : Columns, optional
    overwrite : replace a classifier at `out`

    Raises
    ------
    CorpusError, ModelError, UsageError, NumericalError
    """
    began = time.monotonic()
    options = options or ClassifierOptions()
    out = Path(out)
    refuse_existing(out, overwrite=overwrite)
    # 1. The rows to train on, and those that are held out
    examples = read_examples(source, columns)
    classes = find_classes(examples)
    labels = class_numbers(examples, classes)
    training, held_out = choose_rows(examples, labels, options)
    missing = sorted(set(range(len(classes))) - set(labels[training].tolist()))
    if missing:
        output.note(
            f"warning: no training row has the label '{classes[missing[0]]}'; --shuffle draws rows at random"
        )
    # 2. The recipe, every default filled in
    recipe = default_recipe(
        choose_network(options.network, width=options.width, layers=options.layers),
        epochs=options.epochs,
        batch_size=options.batch_size,
        optimizer=options.optimizer,
        lr=options.lr,
        weight_decay=options.weight_decay,
        schedule=options.schedule,
        seed=options.seed,
        data={
            "source": os.path.abspath(source),  # noqa: PTH100 (resolve() would follow links)
            "fingerprint": examples.fingerprint(),
            "training": examples.fingerprint(training),
            "rows": len(training),
            "classes": len(classes),
            "weights": None if options.weights is None else Path(options.weights).name,
        },
        versions=software_versions(),
    )
    # 3. The network, with initial weights or given ones, and its inputs
    standardisation = Standardisation.of(
        examples.inputs[training], by_column=len(examples.shape) == 1 and examples.inputs.dtype.kind == "f"
    )
    device = resolve_device(options.device)
    network = build_network(recipe.network, examples.shape, len(classes), seed=recipe.seed)
    model = ClassifierModel(network, classes=classes, shape=examples.shape, standardisation=standardisation)
    network.requires_grad_(True)
    if options.weights is not None:
        load_weights(network, Path(options.weights))
    elif recipe.epochs == 0:
        raise UsageError("0 epochs of random weights are no model", fix="give --weights FILE, or --epochs 20")
    network.to(device)
    inputs = torch.from_numpy(standardisation.apply(examples.inputs[training])).to(device)
    targets = torch.from_numpy(labels[training]).to(device)
    # 4. Train; a small network is faster on one thread, and has the same bits wherever there are more
    small = sum(parameter.numel() for parameter in network.parameters()) < _ONE_THREAD
    wanted = options.checkpoints if options.checkpoints is not None else _CHECKPOINTS if small else 0
    marks = checkpoint_steps(recipe.steps(len(training)), wanted)
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(step: int) -> None:
        ticker.reach(step)
        if step in marks:
            kept[step] = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}

    with (
        output.progress("training", recipe.steps(len(training)), unit="steps") as ticker,
        torch_threads(1) if small else contextlib.nullcontext(),
    ):
        train_network(network, inputs, targets, recipe, after_step=keep)
    # 5. Measure it, and write it whole
    loss, accuracy = _evaluate(network, inputs, targets)
    others: tuple[float | None, float | None] = (None, None)
    if len(held_out):
        queries = torch.from_numpy(standardisation.apply(examples.inputs[held_out])).to(device)
        others = _evaluate(network, queries, torch.from_numpy(labels[held_out]).to(device))
    save_classifier(
        model,
        out,
        recipe=recipe,
        columns=examples.columns,
        training=training,
        held_out=held_out,
        checkpoints=kept,
        overwrite=overwrite,
    )
    return TrainedClassifier(
        path=str(out),
        network=recipe.network.name,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        classes=len(classes),
        rows=len(training),
        loss=loss,
        accuracy=accuracy,
        held_out=len(held_out),
        held_out_loss=others[0],
        held_out_accuracy=others[1],
        epochs=recipe.epochs,
        seconds=time.monotonic() - began,
    )


def choose_rows(
    examples: Examples, labels: np.ndarray, options: ClassifierOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Choose rows to train on and rows held out, both int64, disjoint.

    Raises
    ------
    UsageError       more rows than there are, or none left
    CorpusError      all have one label
    """
    n = len(examples)
    order = stream(options.seed, "rows").permutation(n) if options.shuffle else np.arange(n)
    count = n - options.holdout if options.rows is None else options.rows
    if count < 1 or count + options.holdout > n:
        raise UsageError(
            f"{max(0, count):,} rows to train on and {options.holdout:,} held out do not fit "
            f"{examples.path}, which has {n:,}",
            fix="give fewer --rows, or a smaller --holdout",
        )
    chosen, rest = order[:count], order[count:]
    if len(set(labels[chosen].tolist())) < 2:
        raise CorpusError(
            f"{examples.path}: all {len(chosen):,} training rows have one label",
            fix="draw them at random with --shuffle",
        )
    return chosen.astype(np.int64), rest[: options.holdout].astype(np.int64)


@torch.no_grad()
def _evaluate(network: Any, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Compute the mean loss (nats) and the accuracy."""
    network.eval()
    logits = torch.cat([network(inputs[start : start + 512]) for start in range(0, len(inputs), 512)])
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("the trained network's logits are not finite", fix="train with a lower --lr")
    losses, _ = outcomes_of(logits, labels)
    return float(losses.mean()), float((logits.argmax(-1) == labels).double().mean())
