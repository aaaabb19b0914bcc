"""Files of examples, trained classifiers and an index with operators, small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread_each() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    from stride_cli.parallel import torch_threads

    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 of scikit-learn's digits, 8 × 8 pixels of 0 … 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    file = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(file, images=digits.images[:600].astype(np.uint8), labels=digits.target[:600])
    return file


@pytest.fixture(scope="session")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 rows of four measures, an id, a remark, and a label that depends on two of the measures."""
    random = np.random.default_rng(0)
    values = random.normal(size=(120, 4)) * [1, 10, 0.1, 1] + [0, 5, 0, 2]
    label = np.where(values[:, 0] + values[:, 1] / 10 > 0.5, "ill", "well")
    file = tmp_path_factory.mktemp("table") / "table.csv"
    lines = ["name,a,a,c,d,remark,status"]
    for row, (cells, name) in enumerate(zip(values.tolist(), label, strict=True)):
        lines.append(f"p{row}," + ",".join(f"{cell:.6f}" for cell in cells) + f",x{row},{name}")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="session")
def digits_model(digits_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP on 500 digits; 60 are held out."""
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    out = tmp_path_factory.mktemp("model") / "mlp"
    train_classifier(digits_file, out, ClassifierOptions(width=32, rows=500, holdout=60, epochs=20))
    return out


@pytest.fixture(scope="session")
def digits_index(digits_file: Path, digits_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its index, with operators."""
    from stride_cli import api

    out = tmp_path_factory.mktemp("index") / "run.stride"
    api.build_index([str(digits_file)], out=out, model=str(digits_model))
    api.fit_index(out)
    return out


@pytest.fixture
def task(digits_index: Path):
    from index_format.reader import Index
    from stride_cli import api
    from stride_cli.data.workspace import Workspace

    index = Index.open(digits_index)
    return Workspace.open(index, api.open_model(index))
