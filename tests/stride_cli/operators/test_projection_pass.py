"""`stride train --project` where operators are there: only projections are added, of what has none yet."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from index_format.errors import IndexExists
from index_format.reader import Index
from index_format.verify import verify
from stride_cli import api, parallel
from stride_cli.attribution.estimates import Estimate
from stride_cli.corpus.build import append_to_index
from stride_cli.data.query_set import QuerySet
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.models.spec import ModelSpec
from stride_cli.operators import corpus_pass, gradient_sums
from stride_cli.operators.options import FitRunOptions
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from tests.prepared import Prepared
from tests.same_fit import assert_same_fit

QUICK = {"space": "mlp-matrix+logit", "rank": 8}
BYTES = 64


@pytest.fixture(scope="module")
def other(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model of the same tokenizer, its weights a little off."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(trained / "model", folder)
    weights = folder / "model.safetensors"
    save_file({name: 1.01 * values for name, values in load_file(weights).items()}, weights, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def fitted(trained: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with operators of two models, without projections."""
    index = tmp_path_factory.mktemp("fitted") / "run.stride"
    shutil.copytree(trained / "run.stride", index)
    (index.parent / "model").symlink_to(trained / "model")
    api.fit_index(
        index,
        api.ClosedOptions(**QUICK, checkpoints=[other], project=0),
        model=ModelSpec(device="cpu", dtype="fp32"),
    )
    return index


@pytest.fixture
def copied(fitted: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").symlink_to(fitted.parent / "model")
    return Path(shutil.copytree(fitted, tmp_path / "run.stride"))


def project(index: Path, size: int = BYTES, **options):
    return api.fit_index(
        index, api.ClosedOptions(project=size, **options), model=ModelSpec(device="cpu", dtype="fp32")
    )


def test_the_result_is_that_of_a_fit_with_them(
    trained: Path, other: Path, copied: Path, tmp_path: Path
) -> None:
    record = project(copied)
    anew = Path(shutil.copytree(trained / "run.stride", tmp_path / "anew.stride"))
    options = api.ClosedOptions(**QUICK, checkpoints=[other], project=BYTES)
    expected = api.fit_index(anew, options, model=ModelSpec(device="cpu", dtype="fp32"))
    changing = ("index", "seconds", "checkpoints")
    assert {k: v for k, v in record.items() if k not in changing} == {
        k: v for k, v in expected.items() if k not in changing
    }
    assert (record["project"], record["projected"]) == (BYTES, Index.open(copied).n_chunks)
    assert verify(copied) == []
    attributes = [Index.open(index).group_attributes("operators") for index in (copied, anew)]
    for each in attributes:
        del each["build_key"]
    assert attributes[0] == attributes[1]
    for name in Index.open(anew).names("operators"):
        np.testing.assert_array_equal(Index.open(copied).array(name), Index.open(anew).array(name), name)
    # mapped, not read
    projections = Operators.from_index(Index.open(copied), 1).projections
    assert projections is not None and isinstance(projections.codes, np.memmap)


def test_chunks_that_were_appended_get_theirs_and_no_other_is_read(
    trained: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(copied)
    before = Index.open(copied).n_chunks
    text = "The Directory followed the Convention, and bread was dear in Paris that winter. "
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"id": "later", "text": text * 8}) + "\n")
    tokenizer = load_tokenizer(trained / "model")
    fingerprint = tokenizer_fingerprint(tokenizer)
    append_to_index(copied, [str(more)], tokenizer=tokenizer, tokenizer_fingerprint=fingerprint)
    n_chunks = Index.open(copied).n_chunks
    assert n_chunks > before
    apart = Path(shutil.copytree(copied, tmp_path / "apart.stride"))

    def estimates() -> np.ndarray:
        session = api.Session.open(copied, model=api.open_model(Index.open(copied), ModelSpec(device="cpu")))
        query = api.as_query(session.model, "The Directory", response="followed the Convention")
        steered = SteeredModel.of(session.model, session.operators)
        asked = QuerySet.from_queries([query])
        found = Estimate.of(steered, asked, [query.batch()], session.workspace)[0].asked
        return found.estimates(0, n_chunks)[0]

    session = api.Session.open(copied, model=api.open_model(Index.open(copied), ModelSpec(device="cpu")))
    assert not session.pipeline().settings.estimated  # not every chunk has a projection
    real, read = gradient_sums.chunk_gradients, []
    monkeypatch.setattr(
        gradient_sums,
        "chunk_gradients",
        lambda steered, batch: (read.append(batch.rows), real(steered, batch))[1],
    )
    record = project(copied)
    assert record["projected"] == n_chunks and record["coverage"] == pytest.approx(before / n_chunks)
    assert sorted(np.concatenate(read)) == sorted([*range(before, n_chunks)] * 2)  # by both models
    assert estimates().argmax() >= before  # the text that the query repeats
    operators = Operators.from_index(Index.open(copied))
    assert operators.seen.shape == (before,)  # the fit's own coverage stays
    assert operators.shared is not None and len(operators.shared.vectors) == n_chunks
    with pytest.raises(IndexExists, match="every chunk already"):
        project(copied)
    read.clear()
    project(copied, 128)  # of another size: all of them
    assert len(np.concatenate(read)) == 2 * n_chunks
    # and by ranges, as workers do it
    monkeypatch.setattr(
        corpus_pass, "Workers", lambda task, count, **named: parallel.Workers(task, 1, **named)
    )
    monkeypatch.setattr(parallel, "available_cores", lambda: 1)
    for size in (BYTES, 128):
        read.clear()
        run = FitRunOptions(workers=2)
        api.fit_index(
            apart, api.ClosedOptions(project=size), run=run, model=ModelSpec(device="cpu", dtype="fp32")
        )
        assert len(np.concatenate(read)) == 2 * (n_chunks - before if size == BYTES else n_chunks)
    assert_same_fit(apart / "operators", copied / "operators")


KILLED = "train --project 64 --save-seconds 0 --device cpu --dtype fp32 --index"


@pytest.fixture(scope="module")
def undisturbed(fitted: Path, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `KILLED` makes where nothing kills it."""
    whole = tmp_path_factory.mktemp("undisturbed") / "whole.stride"
    shutil.copytree(fitted, whole)
    (whole.parent / "model").symlink_to(fitted.parent / "model")
    prepared.run(["stride", *KILLED.split(), str(whole)], check=True)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=["alone", "workers"])
def test_killed_at_any_moment_it_ends_with_the_same_bits(
    copied: Path, undisturbed: Path, prepared: Prepared, workers: list[str]
) -> None:
    command = ["stride", *KILLED.split()]
    finished, kills = copied / "operators" / "projection_codes", 0
    for pause in (0.05, 0.2, 0.4):
        process = prepared.start([*command, str(copied), *workers])
        while process.poll() is None and not (copied / "operators.partial").exists():
            time.sleep(0.02)
        time.sleep(pause)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if finished.exists():
            break
    if not finished.exists():
        assert prepared.start([*command, str(copied), *workers]).wait() == 0
    assert kills > 0
    assert_same_fit(copied / "operators", undisturbed / "operators")
    assert verify(copied) == []
