"""Prepare the demo; make its model: `python -m stride_cli.demo.demo_model` trains it again and puts it here.

Half of the demo's time would be its training. So its model comes with STRIDE, in half precision (its losses
differ by less than 1e-4), with its recipe and its loss curve; `stride demo --train` trains it anew.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.training.options import TrainOptions

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session
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


def demo_corpus() -> tuple[Path, list[dict[str, Any]]]:
    """Return the embedded corpus file, and its prompts: ``{prompt, answer, documents, listed}``."""
    return CORPUS, json.loads(PROMPTS.read_text(encoding="utf-8"))


def prepare_demo(
    out: str | Path, *, train_anew: bool = False, say: Callable[[str], None] = lambda text: None
) -> tuple[Session, list[dict[str, Any]]]:
    """Prepare model, index and operators of the embedded corpus under `out`; use again what is there.

    Parameters
    ----------
    out : directory      gets ``corpus.jsonl``, ``model/`` and ``demo.stride/``
    train_anew : train the model, instead of taking the one that comes with STRIDE
    say : called with a line of text before each stage

    Returns
    -------
    session : Session, prompts : list of dict, as from `demo_corpus`
    """
    from index_format.durable import replace_file
    from stride_cli.attribution.prepare import prepare
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.models.spec import ModelSpec

    corpus, prompts = demo_corpus()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    copy, model_path, index_path = out / "corpus.jsonl", out / "model", out / "demo.stride"
    if not copy.exists():
        replace_file(copy, corpus.read_bytes())
    if not model_path.exists() and train_anew:
        say("training a small model on 408 short documents")
        train_demo_model(copy, model_path)
    elif not model_path.exists():
        say("taking a small model that was trained on 408 short documents (--train: train it here)")
        copy_demo_model(model_path)
    return prepare([str(copy)], WorkspacePath(index_path, ModelSpec(model_path)), say=say), prompts


if __name__ == "__main__":
    main()
