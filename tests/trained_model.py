"""A tiny language model that is trained for a second, its index, and queries; truth and baselines use it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stride_cli.models.spec import ModelSpec
from tests.kept import kept, own_copy

DEMO = Path(__file__).parents[1] / "stride_cli" / "demo" / "corpus.jsonl"
N_DOCUMENTS = 60
N_QUERIES = 5


@pytest.fixture(scope="session")
def trained(kept_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of one's own as `make_trained` fills it."""
    return own_copy(kept(kept_home, make_trained), tmp_path_factory.mktemp("own") / "trained")


def make_trained(folder: Path) -> None:
    """corpus.jsonl (60 documents), model/ (2 layers × 32), run.stride, queries.jsonl."""
    from stride_cli import api
    from stride_cli.training.pretraining import TrainOptions, train_model

    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:N_DOCUMENTS]]
    short = [{"id": d["id"], "text": d["text"][:160]} for d in documents]
    questions = [{"id": f"q{i}", "text": d["text"][160:260]} for i, d in enumerate(documents[:N_QUERIES])]
    for name, rows in (("corpus", short), ("queries", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocab": 512, "context": 64}
    options = TrainOptions(**sizes, epochs=0.7, batch_tokens=256, device="cpu", dtype="fp32")
    train_model([str(folder / "corpus.jsonl")], folder / "model", options)
    api.build_index([str(folder / "corpus.jsonl")], out=folder / "run.stride", model=str(folder / "model"))


@pytest.fixture
def open_task(trained: Path, tmp_path: Path) -> Callable[[], tuple]:
    """() → (task, queries) of a fresh copy of the index, which has no truth yet."""
    shutil.copytree(trained / "run.stride", tmp_path / "run.stride")

    def open_copy() -> tuple:
        from index_format.reader import Index
        from stride_cli import api
        from stride_cli.data.query_files import read_texts
        from stride_cli.data.workspace import Workspace

        index = Index.open(tmp_path / "run.stride")
        model = api.open_model(index, ModelSpec(str(trained / "model"), device="cpu", dtype="fp32"))
        task = Workspace.open(index, model)
        queries = read_texts(model, trained / "queries.jsonl", block_size=index.attributes["block_size"])
        return task, queries

    return open_copy


@pytest.fixture
def task_and_queries(open_task: Callable[[], tuple]) -> tuple:
    return open_task()
