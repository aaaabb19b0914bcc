"""The scripts of examples/vision, end to end at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stride_cli.models.classifier.directory import load_classifier
from stride_cli.training.classifiers import ClassifierOptions, train_classifier
from tests.prepared import Prepared

ROOT = Path(__file__).parents[4]
VISION = ROOT / "examples/vision"


def run(prepared: Prepared, script: str, *arguments: str, **settings: str) -> list[dict]:
    """The records of a script, with `stride` and `python` of this environment."""
    done = prepared.script(["bash", str(VISION / script), *arguments], **settings)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_digits(tmp_path: Path, prepared: Prepared) -> None:
    settings = {
        "TRAIN": "--network mlp --width 8 --rows 80 --holdout 6 --epochs 5",
        "SUBSETS": "4",
        "SEEDS": "1",
        "ALPHAS": "0.5",
        "METHODS": "stride,chance",
        "RESPONSES": "margin",
    }
    records = run(prepared, "digits.sh", str(tmp_path / "digits.npz"), str(tmp_path / "out"), **settings)
    assert [record["method"] for record in records] == ["stride", "chance"]
    assert all(-1 <= record["spearman"]["mean"] <= 1 for record in records)
    assert (tmp_path / "out/compare-margin-0.5.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["mnist.sh", "parkinsons.sh"])
def test_suites_with_data_of_ones_own(script: str, tmp_path: Path, prepared: Prepared) -> None:
    noise = np.random.default_rng(0)
    labels = np.arange(80) % 2
    network = "--network mlp --width 8 --holdout 6 --epochs 5"
    if script == "mnist.sh":
        data, train = tmp_path / "digits.npz", network
        images = noise.integers(0, 17, (80, 4, 4)) + 9 * labels[:, None, None]
        np.savez(data, images=images.astype(np.uint8), labels=labels)
    else:
        data, train = tmp_path / "voices.csv", f"--field label=status --field id=name --shuffle {network}"
        rows = [f"r{n},{noise.normal() + label:.3f},{label}" for n, label in enumerate(labels)]
        data.write_text("\n".join(["name,pitch,status", *rows]) + "\n")
    small = {"SUBSETS": "4", "SEEDS": "1", "ALPHAS": "0.5", "METHODS": "stride,chance", "RESPONSES": "loss"}
    records = run(prepared, script, str(data), str(tmp_path / "out"), TRAIN=train, **small)
    assert [record["method"] for record in records] == ["stride", "chance"]
    assert (tmp_path / "out/compare-loss-0.5.html").is_file()


def test_the_adapter(digits_file: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(network=str(VISION / "adapter.py"), rows=300, holdout=50, epochs=15)
    trained = train_classifier(digits_file, tmp_path / "model", options)
    assert trained.held_out_accuracy is not None and trained.held_out_accuracy > 0.7
    # the directory carries the file: it loads where the original is not
    assert load_classifier(tmp_path / "model").n_layers == 6
