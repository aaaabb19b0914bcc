"""Training time of a classifier, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.errors import ModelError
from stride_cli.models.classifier.classifier_recipe import read_classifier_recipe

if TYPE_CHECKING:
    from stride_cli.models.classifier.classifier_model import ClassifierModel


@dataclass(frozen=True)
class TrainingPath:
    """Training time and checkpoints of a classifier.

    Attributes
    ----------
    time : Σ of learning rates, see `ClassifierRecipe.training_time`
    checkpoints : path and share of the time that each stands for, that since the one before; what is left is
        the finished model's
    """

    time: float
    checkpoints: tuple[tuple[str, float], ...]


def training_path(model: ClassifierModel) -> TrainingPath | None:
    """Time and checkpoints of a model's training; None where no recipe of plain gradient descent is known.

    Raises
    ------
    ModelError      a checkpoint's step is not one of the recipe's
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
    checkpoints = []
    before = 0
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
