"""A small trained classifier and its index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with digits.npz (300 rows), model/ (8 hidden units, 24 rows held out) and run.stride."""
    from sklearn.datasets import load_digits

    from stride_cli import api
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    np.savez(folder / "digits.npz", images=found.images[:300].astype(np.uint8), labels=found.target[:300])
    options = ClassifierOptions(width=8, rows=200, holdout=24, epochs=40)
    train_classifier(folder / "digits.npz", folder / "model", options)
    api.build_index(
        [str(folder / "digits.npz")],
        out=folder / "run.stride",
        options=api.BuildOptions(n_subsets=80, degree=4),
        model=str(folder / "model"),
    )
    return folder


@pytest.fixture
def run():
    """`stride LINE` in this process; see the tests of the commands."""
    from tests.stride_cli.commands.conftest import run_stride

    return run_stride
