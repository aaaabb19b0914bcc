"""Prepare the demo's model, index and operators, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.demo.demo_model import CORPUS, PROMPTS, copy_demo_model, train_demo_model

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session


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
    return prepare([str(copy)], WorkspacePath(index_path, str(model_path)), say=say), prompts
