"""Make the demo's model: `python -m stride_cli.demo.demo_model` trains it again and puts it here.

Half of the demo's time would be its training. So its model comes with STRIDE, in half precision (its losses
differ by less than 1e-4), with its recipe and its loss curve; `stride demo --train` trains it anew.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.training.options import TrainOptions

if TYPE_CHECKING:
    from stride_cli.training.runs import Trained

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus.jsonl"
PROMPTS = FOLDER / "prompts.json"
MODEL = FOLDER / "model"

# Two layers know as many of the facts as four, and take three quarters of the time to train; chosen among
# seven settings by how many of the listed prompts find their document (all ten, as with four). 12 passes are
# enough to know the facts; after 24 every loss is near zero, and no document's gradient stands out.
OPTIONS = TrainOptions(layers=2, epochs=12.0)


def train_demo_model(corpus: Path, out: Path) -> Trained:
    """Train the demo's model on a copy of its corpus; raises what `train_model` does."""
    from stride_cli.training.pretraining import train_model

    return train_model([str(corpus)], out, OPTIONS)


def copy_demo_model(out: Path) -> None:
    """Copy the model that comes with STRIDE to a directory that is not there yet, by one rename."""
    from index_format.durable import copy_file, rename_new

    made = out.with_name(f"{out.name}.copied")
    shutil.rmtree(made, ignore_errors=True)  # what a kill left
    made.mkdir()
    for file in sorted(MODEL.iterdir()):
        copy_file(file, made / file.name)
    rename_new(made, out)


def halve(model: Path) -> None:
    """Store a checkpoint's weights in half precision, in place."""
    import json

    from safetensors.torch import load_file, save_file

    weights = {name: value.half() for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "dtype": "float16"}, indent=2)
    (model / "config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Train the model elsewhere, so that its recipe names no path of this machine, and put it here."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        shutil.copyfile(CORPUS, CORPUS.name)
        train_demo_model(Path(CORPUS.name), Path("model"))
        halve(Path("model"))
        shutil.rmtree(MODEL, ignore_errors=True)
        shutil.copytree("model", MODEL)
        os.chdir(FOLDER)


if __name__ == "__main__":
    main()
