"""The recipe of a classifier: enough to train it again, on its rows or on a subset of them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import ModelError, UsageError
from stride_cli.models.classifier.networks import NetworkSpec
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.classifier.classifier_model import ClassifierModel

FILE_NAME = "classifier_recipe.json"
RECIPE_VERSION = 1
OPTIMIZERS = ("sgd", "adamw")
_RATES = {"sgd": {"lr": 0.05, "weight_decay": 5e-4}, "adamw": {"lr": 3e-3, "weight_decay": 1e-2}}
SCHEDULES = ("cosine", "linear", "constant")

ORDER_RULE = (
    "epoch e: sort the rows by the numbers that stride_cli.randomness.stream(seed, 'order', e).random gives, "
    "one for every row of the file; consecutive batches of batch_size rows, what is left over at the end is "
    "not used in this epoch"
)


@dataclass(frozen=True)
class ClassifierRecipe:
    """All that decides the weights that training gives, on one machine and number of threads.

    Attributes
    ----------
    network : NetworkSpec
    epochs : int                      passes over the rows (of the subset, when on a subset)
    batch_size : int                  rows
    optimizer : "sgd" | "adamw"       sgd: momentum, with weight decay in the gradient
    lr : float                        peak learning rate
    momentum : float                  of sgd
    weight_decay : float              sgd: added to the gradient; adamw: decoupled
    schedule : "cosine" | "linear" | "constant"
    warmup_epochs : float             the rate rises linearly meanwhile
    seed : int                        of the initial weights and of the order
    data : dict                       source, fingerprint, rows, classes
    versions : dict                   of stride and torch
    """

    network: NetworkSpec
    epochs: int = 20
    batch_size: int = 64
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup_epochs: float = 1.0
    seed: int = 0
    data: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    order: str = ORDER_RULE

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"--optimizer {self.optimizer} is unknown for classifiers",
                fix=f"one of {', '.join(OPTIMIZERS)}",
            )
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule {self.schedule} is unknown", fix=f"one of {', '.join(SCHEDULES)}")
        if self.epochs < 0 or self.batch_size < 1:
            raise UsageError(
                f"{self.epochs} epochs of batches of {self.batch_size} rows cannot be trained",
                fix="give --epochs 20 --batch-size 64",
            )
        for name, value in (("lr", self.lr), ("weight-decay", self.weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"--{name} is {value}, expected 0 or more", fix=f"try --{name} 0.01")

    def to_json(self) -> str:
        record = asdict(self) | {"network": self.network.to_record()}
        return json.dumps({"recipe_version": RECIPE_VERSION, **record}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ClassifierRecipe:
        """Raises ValueError for anything that is not a recipe of this version."""
        record = json.loads(text)
        if not isinstance(record, dict) or record.pop("recipe_version", None) != RECIPE_VERSION:
            raise ValueError(f"not a recipe of version {RECIPE_VERSION}")
        if unknown := set(record) - {field.name for field in fields(cls)}:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        try:
            return cls(**{**record, "network": NetworkSpec(**record["network"])})
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from error

    def digest(self) -> str:
        """SHA-256 in hex of all but the seed, and of the data all but where it lies."""
        data = {key: value for key, value in (self.data or {}).items() if key != "source"}
        text = replace(self, seed=0, data=data).to_json()
        return hashlib.sha256(text.encode()).hexdigest()

    def steps(self, n_rows: int) -> int:
        """Optimizer steps over `n_rows` rows."""
        return self.epochs * max(1, n_rows // self.batch_size)

    def rate(self, step: int, n_rows: int) -> float:
        """Learning rate at a step (from 0) of a training over `n_rows` rows; 0 after its end."""
        total, per_epoch = self.steps(n_rows), max(1, n_rows // self.batch_size)
        if step >= total:
            return 0.0
        warm = self.warmup_epochs * per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        done = step / total
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (1 - done) if self.schedule == "linear" else self.lr

    def training_time(self, n_rows: int) -> float | None:
        """Time that gradient flow would take: Σ of the learning rates over the steps, with momentum's effect.

        In a direction of curvature λ training has gone 1 − exp(−λ time) of the way. None for optimizers that
        rescale gradients.
        """
        if self.optimizer != "sgd":
            return None
        total = sum(self.rate(step, n_rows) for step in range(self.steps(n_rows)))
        return total / (1 - self.momentum)

    def order_of(self, members: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The batches of one epoch: (steps, batch_size) row numbers, or (1, m) for fewer than a batch.

        A part of the rows comes in the order in which it comes among all.
        """
        turn = stream(seed, "order", epoch).random(int(members.max(initial=0)) + 1)
        order = members[np.argsort(turn[members], kind="stable")]
        per_epoch, size = max(1, len(members) // self.batch_size), min(self.batch_size, len(members))
        return order[: per_epoch * size].reshape(per_epoch, size)


def default_recipe(network: NetworkSpec, **given: Any) -> ClassifierRecipe:
    """A recipe with what suits the network, where `given` has None.

    The MLP's is that of the MNIST benchmark: 20 epochs of batches of 64, SGD with momentum 0.9 and a cosine
    schedule from 0.05. Convolutions and users' networks take AdamW.
    """
    chosen: dict[str, Any] = {}
    if network.name in ("resnet9", "adapter"):
        chosen = {"optimizer": "adamw", **_RATES["adamw"]}
    if network.name == "logistic":
        chosen = {"epochs": 40}
    chosen |= {key: value for key, value in given.items() if value is not None}
    if given.get("optimizer") in _RATES and given.get("lr") is None:
        own = _RATES[given["optimizer"]]
        chosen |= {**own, "weight_decay": given.get("weight_decay") or own["weight_decay"]}
    return ClassifierRecipe(network=network, **chosen)


def read_classifier_recipe(model_path: str | Path) -> ClassifierRecipe:
    """The recipe that is stored with a classifier.

    Raises ModelError: there is none, or it cannot be read.
    """
    file = Path(model_path).expanduser() / FILE_NAME
    try:
        return ClassifierRecipe.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"'{model_path}' has no recipe ({FILE_NAME}), so it cannot be trained again",
            fix="train it with `stride model train`",
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(f"the recipe {file} cannot be read: {error}", fix="train the model again") from error


def software_versions() -> dict[str, str]:
    """Versions of the software that decides the weights."""
    import torch

    from stride_cli.version import __version__

    return {"stride": __version__, "torch": torch.__version__}


@dataclass(frozen=True)
class TrainingPath:
    """Training time of a classifier, Σ of learning rates (`ClassifierRecipe.training_time`), and checkpoints:
    path and share of the time that each stands for, that since the one before. What is left is the finished
    model's."""

    time: float
    checkpoints: tuple[tuple[str, float], ...]


def training_path(model: ClassifierModel) -> TrainingPath | None:
    """Time and checkpoints of a model's training; None where no recipe of plain gradient descent is known.

    Raises ModelError: a checkpoint's step is not one of the recipe's.
    """
    if model.path is None:
        return None
    try:
        recipe = read_classifier_recipe(model.path)
    except ModelError:
        return None
    n_rows = int((recipe.data or {}).get("rows", 0))
    time = recipe.training_time(n_rows) if n_rows and recipe.epochs else None
    if not time or (recipe.data or {}).get("weights"):
        return None  # the way to weights that training started from is not known
    steps = recipe.steps(n_rows)
    checkpoints, before = [], 0
    for directory in sorted(Path(model.path).expanduser().glob("checkpoints/step-*")):
        step = int(directory.name.partition("-")[2])
        if not 0 < step < steps:
            raise ModelError(
                f"checkpoint '{directory}' is of step {step} (expected 1 to {steps - 1}, the recipe's)",
                fix="train the model again, with --overwrite",
            )
        passed = sum(recipe.rate(at, n_rows) for at in range(before, step)) / (1 - recipe.momentum)
        checkpoints.append((str(directory), passed / time))
        before = step
    return TrainingPath(time, tuple(checkpoints))


def checkpoint_steps(steps: int, count: int) -> list[int]:
    """Steps after which `count` checkpoints are kept, evenly spaced, before the last."""
    found = {round(steps * (place + 1) / (count + 1)) for place in range(count)}
    return sorted(step for step in found if 0 < step < steps)
