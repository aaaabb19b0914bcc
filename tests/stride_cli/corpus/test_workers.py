"""An index whose documents are tokenised by several workers is the index that one process builds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stride_cli.corpus.build import IndexedModel, build_index
from stride_cli.corpus.options import BuildOptions
from stride_cli.errors import CorpusError
from tests.same_fit import contents

from .test_build import some_records


@pytest.fixture
def model(make_tokenizer: Any, chatml: str) -> IndexedModel:
    return IndexedModel(make_tokenizer(chat_template=chatml), "t" * 64, "m" * 64)


def options(**given: Any) -> BuildOptions:
    return BuildOptions(**{"block_size": 12, "degree": 3} | given)


@pytest.mark.usefixtures("workers_here")
def test_workers_make_the_same_index(tmp_path: Path, model: IndexedModel, write_jsonl: Any) -> None:
    sources = [write_jsonl([*some_records(25), {"id": "long", "text": "Paris is " * 900}])]
    whole = build_index(sources, model, tmp_path / "whole", options())
    found = build_index(sources, model, tmp_path / "shared", options(workers=5))
    assert found.has("corpus/loss_mask") and contents(found.path) == contents(whole.path)
    twice = [write_jsonl([{"id": "a", "text": "x"}] * 2, "twice.jsonl")]
    with pytest.raises(CorpusError, match=r"twice.jsonl:2: expected ids that differ"):
        build_index(twice, model, tmp_path / "twice", options(workers=5))


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_batches(
    tmp_path: Path, model: IndexedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        for number in range(40):
            for record in some_records(200, seed=number):
                file.write(json.dumps(record) + "\n")
    whole = build_index([str(corpus)], model, tmp_path / "whole", options())
    killed: list[int] = []

    def kill_one() -> None:
        while not killed:
            for worker in multiprocessing.active_children():
                if (tmp_path / "shared.partial").exists() and worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.append(worker.pid)
                    break
            time.sleep(0.005)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    build_index([str(corpus)], model, tmp_path / "shared", options(workers=2, commit_seconds=0))
    killer.join(10)
    assert killed and "a worker was killed" in capsys.readouterr().err
    assert contents(tmp_path / "shared") == contents(whole.path)
    assert not multiprocessing.active_children()
