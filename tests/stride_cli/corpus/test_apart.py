"""An index built by several workers is the index that one process builds, whatever dies on the way."""

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

from index_format.errors import IndexIncomplete
from index_format.reader import Index
from index_format.writer import IndexWriter
from stride_cli.corpus import apart
from stride_cli.corpus.apart import build_apart
from stride_cli.corpus.build import IndexedModel, build_index
from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import CorpusError, UsageError

from .test_build import contents, some_records

SMALL = {"block_size": 12, "degree": 3}


@pytest.fixture
def model(make_tokenizer: Any, chatml: str) -> IndexedModel:
    return IndexedModel(make_tokenizer(chat_template=chatml), "t" * 64, "m" * 64)


def options(**given: Any) -> BuildOptions:
    return BuildOptions(**SMALL | {"workers": 5} | given)


@pytest.mark.parametrize("reading", [ReadOptions(), ReadOptions(number_ids=True)], ids=["read", "numbered"])
@pytest.mark.usefixtures("workers_here")
def test_ranges_make_the_same_index(
    tmp_path: Path, model: IndexedModel, write_jsonl: Any, reading: ReadOptions, monkeypatch: Any
) -> None:
    """Every byte of it, with conversations, and a text whose id is its name; a range without a document."""
    monkeypatch.chdir(tmp_path)
    write_jsonl([*some_records(25), {"id": "long", "text": "Paris is " * 900}, *some_records(9, seed=1)])
    Path("one.txt").write_text("Water boils at one hundred degrees")
    sources = ["corpus.jsonl", "one.txt"]
    whole = build_index(sources, model, "whole", options(workers=None), reading)
    found = build_apart(sources, model, "apart", options(), reading)
    assert found.has("corpus/loss_mask")
    assert contents(found.path) == contents(whole.path)
    assert not Path("apart.partial").exists()


@pytest.mark.usefixtures("workers_here")
def test_what_is_built_is_not_built_again(
    tmp_path: Path, model: IndexedModel, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write_jsonl(some_records(30))]
    whole = build_index(sources, model, tmp_path / "whole", options(workers=None))
    calls: list[str] = []

    def counted(*args: Any) -> Index:
        calls.append(args[3].range)
        if calls == ["1/5", "2/5", "3/5"]:
            raise KeyboardInterrupt
        return build_index(*args)

    monkeypatch.setattr(apart, "build_index", counted)
    with pytest.raises(KeyboardInterrupt):
        build_apart(sources, model, tmp_path / "apart", options())
    assert not (tmp_path / "apart").exists()
    build_apart(sources, model, tmp_path / "apart", options())
    assert calls[3:] == ["3/5", "4/5", "5/5"]
    assert contents(tmp_path / "apart") == contents(tmp_path / "whole") and whole.n_chunks


@pytest.mark.usefixtures("workers_here")
def test_two_ways_of_building_do_not_mix(tmp_path: Path, model: IndexedModel, write_jsonl: Any) -> None:
    sources, out = [write_jsonl(some_records(12))], tmp_path / "x"
    key = apart.settings_key(apart.settings_of_build(model, options(), 12))
    for state, fix in (
        ({"parts": 1, "digest": "00"}, "same --workers"),
        ({"documents": 3}, "without --workers"),
    ):
        with IndexWriter.create(out, build_key=key, overwrite=True) as writer:
            writer.commit(state)
        with pytest.raises(IndexIncomplete) as caught:
            if "parts" in state:
                build_index(sources, model, out, options(workers=None))
            else:
                build_apart(sources, model, out, options())
        assert fix in str(caught.value.fix)


@pytest.mark.usefixtures("workers_here")
def test_an_id_of_two_ranges(tmp_path: Path, model: IndexedModel, write_jsonl: Any) -> None:
    records = some_records(20, conversations=False)
    records[17]["id"] = records[2]["id"]
    sources = [write_jsonl(records)]
    with pytest.raises(CorpusError, match=r"corpus.jsonl:18: expected ids that differ.*corpus.jsonl:3"):
        build_apart(sources, model, tmp_path / "x", options())
    with pytest.raises(CorpusError, match="--on-bad skip skips") as caught:
        build_apart(sources, model, tmp_path / "y", options(), ReadOptions(on_bad="skip"))
    assert "without --workers" in str(caught.value.fix)


def test_what_cannot_be_divided(tmp_path: Path, model: IndexedModel) -> None:
    with pytest.raises(UsageError, match="the corpus is a stream"):
        build_apart(["-"], model, tmp_path / "x", options())
    with pytest.raises(UsageError, match="would divide it again"):
        options(range="1/2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_range(
    tmp_path: Path, model: IndexedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes; one of them is killed over a range that it has begun to write."""
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        for number in range(40):
            for record in some_records(200, seed=number):
                file.write(json.dumps(record) + "\n")
    whole = build_index([str(corpus)], model, tmp_path / "whole", options(workers=None))
    folder = tmp_path / "apart.partial/scratch/ranges"
    killed: list[int] = []

    def kill_one() -> None:
        while not killed:
            begun = [path for path in folder.glob("*.partial/lock") if path.read_text().strip()]
            mine = [int(path.read_text()) for path in begun]
            if mine and mine[0] in {worker.pid for worker in multiprocessing.active_children()}:
                os.kill(mine[0], signal.SIGKILL)
                killed.append(mine[0])
            time.sleep(0.005)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    build_apart([str(corpus)], model, tmp_path / "apart", options(workers=2, commit_seconds=0))
    killer.join(10)
    assert killed and "a worker was killed" in capsys.readouterr().err
    assert contents(tmp_path / "apart") == contents(whole.path)
    assert not multiprocessing.active_children()
