"""The model that comes with STRIDE is what the script beside it makes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from stride_cli.corpus.readers import ReadOptions
from stride_cli.demo.demo_model import CORPUS, MODEL, OPTIONS, copy_demo_model
from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.training.language_loop import mean_loss
from stride_cli.training.runs import cut, read_corpus

ROOT = Path(__file__).parents[2]


def test_the_model_that_comes_along_was_trained_on_the_corpus_beside_it(tmp_path: Path) -> None:
    """With these settings and this tokenizer, to the loss that its curve ends with; in half precision."""
    recipe = read_recipe(MODEL)
    assert recipe is not None and recipe.architecture is not None
    assert (recipe.architecture.layers, recipe.epochs) == (OPTIONS.layers, OPTIONS.epochs)
    tokenizer = load_tokenizer(MODEL)
    chunks, record = cut(read_corpus([str(CORPUS)], ReadOptions()), tokenizer, block_size=recipe.block_size)
    assert {**record, "sources": ["corpus.jsonl"]} == recipe.corpus
    assert tokenizer_fingerprint(tokenizer) == recipe.tokenizer_fingerprint
    log = [json.loads(line) for line in (MODEL / "training_log.jsonl").read_text().splitlines()]
    assert len(log) == recipe.steps and log[0]["loss"] > 7
    # the last pass's mean, while it was training, is above what the finished model has
    last = sum(point["loss"] for point in log[-28:]) / 28
    loss = mean_loss(load_weights(MODEL), chunks, recipe, limit=8_000)
    assert loss == pytest.approx(last, abs=0.15) and loss < last
    copy_demo_model(tmp_path / "model")
    for file in MODEL.iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()


def test_whatever_is_no_code_is_installed_too() -> None:
    """Every file of the packages is Python or among what pyproject.toml names as data."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package, patterns in about["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package
        named = {path for pattern in patterns for path in folder.glob(pattern)}
        rest = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {path for path in rest if path.suffix != ".py"} <= named
