"""Training a directory, loading it, indexing its rows, and everything that does not fit together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from index_format.errors import IndexMismatch
from index_format.reader import Index
from index_format.verify import verify
from stride_cli import api
from stride_cli.data.example_queries import register
from stride_cli.errors import CorpusError, ModelError
from stride_cli.models.classifier.directory import find_row, load_classifier
from stride_cli.models.classifier.examples import Columns, read_examples
from stride_cli.models.loading import load_model, model_fingerprint
from stride_cli.models.spec import ModelSpec
from stride_cli.training.classifiers import ClassifierOptions, train_classifier

TABLE = Columns(label="status", id="name", drop=("remark",))


def test_a_directory_loads_as_it_was_trained(digits_model: Path, digits_file: Path) -> None:
    model = load_model(digits_model)
    assert model.fingerprint == model_fingerprint(digits_model)
    assert model.vocab_size == 10 and model.n_layers == 1 and model.d_model == 32
    file = np.load(digits_file)
    queries = register(model, file["images"][500:560], file["labels"][500:560])  # type: ignore[attr-defined]
    rows = queries.batch(np.arange(60))
    accuracy = (model.predict(rows.ids).argmax(-1) == rows.ids[:, 1]).double().mean()  # type: ignore[attr-defined]
    assert accuracy > 0.85
    assert load_classifier(ModelSpec(digits_model, dtype="fp64")).dtype == torch.float64


def test_the_index_holds_the_training_rows(digits_index: Path, digits_file: Path) -> None:
    index = Index.open(digits_index)
    assert index.n_chunks == index.n_documents == 500 and not verify(digits_index)
    labels = np.load(digits_file)["labels"]
    assert [index.chunk_tokens(row).tolist() for row in (0, 499)] == [[0, labels[0]], [499, labels[499]]]
    assert index.document_id(17) == "17"
    assert index.attributes["config"]["kind"] == "classifier"
    model = api.open_model(index)
    assert model.held_out.tolist() == list(range(500, 560))  # type: ignore[attr-defined]


def test_a_table_is_indexed_by_its_ids(table_file: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(width=8, holdout=20, shuffle=True, epochs=40)
    trained = train_classifier(table_file, tmp_path / "model", options, columns=TABLE)
    assert trained.held_out_accuracy is not None and trained.held_out_accuracy > 0.7
    index = api.build_index([str(table_file)], out=tmp_path / "i.stride", model=str(tmp_path / "model"))
    model = api.open_model(index)
    names = read_examples(table_file, TABLE).ids
    held_out = {names[row] for row in model.held_out}  # type: ignore[attr-defined]
    indexed = {index.document_id(row) for row in range(100)}
    assert len(held_out) == 20 and held_out | indexed == set(names)
    # one mean and deviation a column, of the training rows
    inputs = model.inputs(torch.tensor([[row, 0] for row in range(100)]))  # type: ignore[attr-defined]
    assert inputs.mean(0).abs().max() < 1e-5 and (inputs.std(0, unbiased=False) - 1).abs().max() < 1e-5
    assert find_row(model, "p7") == 7 and find_row(model, 7) == 7  # type: ignore[arg-type]


def test_other_data_or_another_model_is_refused(
    digits_model: Path, digits_file: Path, tmp_path: Path
) -> None:
    data, other = tmp_path / "digits.npz", tmp_path / "other"
    shutil.copy(digits_file, data)
    index = api.build_index([str(data)], out=tmp_path / "i.stride", model=str(digits_model))
    train_classifier(data, other, ClassifierOptions(width=32, rows=500, epochs=1))
    with pytest.raises(IndexMismatch, match="model"):
        api.open_model(index, str(other))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copytree(tmp_path / "i.stride", moved / "i.stride")
    data.rename(moved / "digits.npz")
    assert api.open_model(Index.open(moved / "i.stride")).n_layers == 1  # found beside the index
    file = dict(np.load(digits_file))
    file["images"][3, 0, 0] += 1
    np.savez(moved / "digits.npz", **file)
    with pytest.raises(IndexMismatch, match="is not what index"):
        api.open_model(Index.open(moved / "i.stride"))
    (moved / "digits.npz").unlink()
    with pytest.raises(CorpusError, match="is gone"):
        api.open_model(Index.open(moved / "i.stride"))
    with pytest.raises(ModelError, match="is no classifier"):
        api.open_model(index, str(tmp_path))


def _other_version(copy: Path) -> None:
    file = copy / "classifier.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "classifier_version": 9}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda copy: (copy / "weights.safetensors").write_bytes(b"1234"), "cannot be loaded"),
        (lambda copy: (copy / "weights.safetensors").unlink(), "no weights"),
        (lambda copy: (copy / "classifier.json").write_text("{"), r"classifier.json cannot be read"),
        (_other_version, "version 9"),
    ],
)
def test_directories_that_are_damaged(
    damage: Callable[[Path], Any], message: str, digits_model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(digits_model, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(ModelError, match=message):
        load_classifier(copy)
