"""Benchmarks of building, measuring and fitting run at tiny sizes; their records hold what they promise."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from stride_cli.attribution.shared_influence import Shared
from stride_cli.data.workspace import WorkspacePath
from stride_cli.operators.redundancy import Redundancy
from stride_cli.training.language_trainer import index_chunks, query_losses
from stride_cli.training.truth import Truth
from tests.benchmarks import __main__ as command
from tests.benchmarks import (
    build,
    checks,
    coarse,
    fitting,
    load,
    measurement,
    preconditioning,
    projections,
    soak,
    unrolled,
)
from tests.benchmarks._machine import interleave, watched_memory
from tests.prepared import Prepared

WORDS = ["water", "stone", "river", "mountain", "history", "science", "treaty", "empire", "island", "planet"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "corpus.jsonl"
    texts = [" ".join(WORDS[(row * k + k) % 10] for k in range(1, 40)) for row in range(30)]
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": f"{n} {text}."}) + "\n" for n, text in enumerate(texts))
    )
    return path


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    from stride_cli import api
    from stride_cli.training.pretraining import TrainOptions, train_model

    model = corpus.parent / "model"
    train_model([str(corpus)], model, TrainOptions(steps=2, layers=2, width=32, vocab=300, context=32))
    out = corpus.parent / "run.stride"
    options = api.BuildOptions(block_size=16, n_subsets=20, degree=3)
    api.build_index([str(corpus)], model_path=str(model), out=out, options=options)
    api.train(out, api.ClosedOptions(rank=4, buckets=16))
    return out


def test_tasks_take_turns_and_memory_is_watched() -> None:
    order: list[str] = []
    tasks = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds, _ = interleave(tasks, 2)
    assert order == ["a", "b", "a", "b"] and [len(times) for times in seconds.values()] == [2, 2]
    with watched_memory() as held:
        # pages of its own: malloc may hand out again what earlier tests have left resident
        block = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * 50_000_000)
        time.sleep(0.5)
        block.close()
    assert held["peak_megabytes"] > 40


def test_variance_by_bands_finds_what_was_put_in() -> None:
    import numpy as np

    from tests.benchmarks.additivity import components

    random = np.random.default_rng(0)
    masks = np.stack([random.permutation(1000) < 500 for _ in range(64)])
    order = np.stack([random.permutation(1000) for _ in range(60)])
    edges, shares = [0, 10, 50, 200, 1000], [0.09, 0.04, 0.0, 0.16]
    values = np.empty((60, 64))
    for row, ranked in enumerate(order):
        sizes = np.repeat(
            [np.sqrt(s / n) for s, n in zip(shares, np.diff(edges), strict=True)], np.diff(edges)
        )
        effects = np.zeros(1000)
        effects[ranked] = random.normal(size=1000) * sizes
        values[row] = (2.0 * masks - 1) @ effects + 0.3 * random.normal(size=64)
    values -= values.mean(axis=1, keepdims=True)
    found, errors = components(masks, order, edges, values)
    assert np.all(np.abs(found - shares) < 3 * errors)
    assert np.all(errors < [0.02, 0.03, 0.05, 0.1])


def test_corrections_of_a_readout() -> None:
    random = np.random.default_rng(0)
    gradients, asked = random.normal(size=(12, 30)), random.normal(size=(4, 30))
    gradients[1] = gradients[0]
    parts = np.stack([asked[:, :10] @ gradients[:, :10].T, asked[:, 10:] @ gradients[:, 10:].T])
    found = preconditioning.Products(parts, asked @ gradients.T, gradients @ gradients.T)
    np.testing.assert_allclose(found.direct, asked @ gradients.T)
    # the query's gradient preconditioned by Gᵀ G + γ, brute force
    ridge = 2.0 * np.trace(found.kernel) / 12
    curvature = np.eye(30) + gradients.T @ gradients / ridge
    exact = np.linalg.solve(curvature, asked.T).T @ gradients.T
    np.testing.assert_allclose(preconditioning.corrected(found, 2.0), exact, atol=1e-9)
    # what `stride query` takes away: what chunks have in common, and not with themselves
    kernel = found.kernel / np.trace(found.kernel) * 12
    values, vectors = np.linalg.eigh(kernel - np.diag(np.diag(kernel)))
    common = Redundancy(vectors[:, ::-1][:, :5].astype(np.float32), values[::-1][:5])
    np.testing.assert_allclose(preconditioning.corrected(found, 2.0, 12), exact, atol=1e-9)
    taken = preconditioning.corrected(found, 2.0, 5, diagonal=False)
    for scores, products in zip(taken, found.direct, strict=True):
        shared = Shared.of([common], 2.0, [(np.arange(12), products, 1.0)])[:]
        np.testing.assert_allclose(scores - scores.mean(), products - products.mean() - shared, atol=1e-4)
    np.testing.assert_allclose(preconditioning.corrected(found, 1e12), found.direct, atol=1e-6)
    # weights of layers that retraining has are found
    masks = random.random((40, 12)) < 0.5
    losses = -np.tensordot([0.5, 2.0], parts, 1) @ masks.T  # (Q, R)
    truth = Truth(
        masks=masks,
        alpha=np.full(40, 0.5),
        losses=losses.T[:, None],
        margins=None,
        base_losses=np.zeros(4),
        queries=None,  # type: ignore[arg-type]
        seeds=np.zeros(1, np.int64),
    )
    scale = np.linalg.norm(found.direct @ (masks - masks.mean(axis=0)).T, axis=1)
    scale = scale / np.linalg.norm(losses - losses.mean(axis=1, keepdims=True), axis=1)
    one = np.arange(4) == 2
    weights = preconditioning.layer_weights(truth, parts, one)
    np.testing.assert_allclose(weights, scale[one] * [0.5, 2.0], rtol=1e-6)


def test_a_training_differentiated_is_what_weights_do(corpus: Path, index: Path, tmp_path: Path) -> None:
    """Against the same training with one chunk counting a little more, and a little less."""
    from stride_cli import api
    from stride_cli.data.query_files import read_texts
    from stride_cli.training.finetuning import finetune_model
    from stride_cli.training.options import FinetuneOptions

    model = tmp_path / "model"
    options = FinetuneOptions(epochs=2.0, batch_tokens=128, dtype="fp32", device="cpu")
    recipe = finetune_model([str(corpus)], index.parent / "model", model, options).recipe
    api.build_index([str(corpus)], model_path=str(model), out=tmp_path / "run.stride")
    task = WorkspacePath(tmp_path / "run.stride", None).open()
    chunks = index_chunks(task)
    (tmp_path / "queries.jsonl").write_text(json.dumps({"id": "q", "text": " ".join(WORDS)}) + "\n")
    asked = read_texts(task.model, tmp_path / "queries.jsonl", block_size=32)
    queries = [unrolled.asked(asked, 0, task.model.device)]
    whole = unrolled.Unrolled(chunks, recipe, np.arange(len(chunks)))
    assert whole.losses(queries) == pytest.approx(query_losses(task.model, asked), rel=1e-4)
    members = np.arange(3, len(chunks))

    def trained(counts: np.ndarray | None = None) -> unrolled.Unrolled:
        return unrolled.Unrolled(chunks, recipe, members, counts)

    (found,) = trained().influences(queries, len(chunks))
    assert not found[:3].any()
    strongest = np.argsort(-np.abs(found))[:4]
    for chunk in strongest:
        more, less = np.ones(len(chunks)), np.ones(len(chunks))
        more[chunk], less[chunk] = 1.05, 0.95
        (up,), (down,) = (trained(counts).losses(queries) for counts in (more, less))
        assert (down - up) / 0.1 == pytest.approx(found[chunk], rel=0.05)


@pytest.mark.slow
def test_building(corpus: Path, index: Path) -> None:
    from stride_cli.models.language.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(corpus.parent / "model")
    record = build.throughput(corpus, tokenizer, 16, repeats=1)
    assert record["documents"] == 30 and record["share_of_bare_tokenizer"] > 0
    held = build.memory(64, tokenizer)
    assert held["documents"] == 16 and held["chunks"] == 64


@pytest.mark.slow
def test_measuring(corpus: Path, index: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"id": "q", "text": " ".join(WORDS[:4])}) + "\n")
    given = Namespace(index=index, queries=queries, count=1, tokens=8, batch_size=8, repeats=1)
    agreement, linear, exact = measurement.run(given)
    assert agreement["pearson_least"] > 0.9
    assert linear["forward_passes"]["forward"] == 1
    assert exact["continuations"] == 40 and exact["gigaflop"] > 0


@pytest.mark.slow
def test_fitting(index: Path) -> None:
    given = Namespace(index=index, chunks=20, read=12, steps=1, repeats=1, parts=fitting.PARTS)
    closed, reading, shares, sgd = fitting.run(given)
    assert closed["share_of_bare_pass"] > 0 and closed["gate_megabytes"] > 0
    assert reading["read"] == 12 and reading["reading_by_bare_pass"] > 0
    assert shares["functions"] and shares["operations"]
    assert sgd["processor_seconds_per_step"] != 0


def test_projections_find_more_with_more_bytes(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"id": str(n), "text": f"{word} {WORDS[n - 1]}"} for n, word in enumerate(WORDS)]
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(json.dumps(row) + "\n" for row in asked))
    monkeypatch.setattr(projections, "READ", 12)
    monkeypatch.setattr(projections, "SIZES", (64, 1024))
    rows = list(projections.found(Namespace(index=index, model=None, queries=queries, first=2)))
    by = {(row["by"], row["bytes"]): row for row in rows}
    assert len(by) == len(rows) == 2 + 3 * 2
    assert by["direct", 0]["recall10"] == 1.0
    assert by["projections", 1024]["recall10"] > by["int8", 64]["recall10"]
    for row in rows:
        assert row["queries"] == 8 and 0 <= row["recall10"] <= 1 and -1 <= row["kept"] <= 1
    (fast,) = projections.speed(Namespace(chunks=50, bytes=64, at_once=[3], repeats=1))
    assert fast["ratio"] == pytest.approx(3 * fast["ratio_per_query"])


def test_what_could_be_left_unread(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = tmp_path / "queries.jsonl"
    asked = [{"id": str(n), "text": f"{word} {WORDS[n - 1]}"} for n, word in enumerate(WORDS)]
    queries.write_text("".join(json.dumps(row) + "\n" for row in asked))
    monkeypatch.setattr(coarse, "TOP", 5)
    monkeypatch.setattr(coarse, "LISTS", (8,))
    given = Namespace(index=index, queries=queries, sample=100, times=2, parts=None)
    rows = list(coarse.run(given))
    found = {(row["part"], row["what"], row.get("bytes_looked_at")): row for row in rows if "what" in row}
    size = rows[0]["bytes"]
    # the more is looked at, the fewer have to be looked at again
    shares = [found["screens", what, size]["share_for_90"] for what in ("two bits", "highest bit")]
    assert 0 < shares[0] <= shares[1] <= 1
    largest = [found["screens", "largest numbers", size / part]["share_for_90"] for part in (2, 8)]
    assert 0 < largest[0] <= largest[1] <= 1
    for what in ("cosine", "bounded", "augmented"):
        held = found["lists", what, None]
        assert 0 < held["share_for_90"] <= held["share_for_95"] <= held["share_for_99"] <= 1
    assert found["gradients", "gradients", None]["sample"] == 100
    (reading,) = (row for row in rows if row["part"] == "reading")
    assert reading["same_chunks"] == 1 and reading["scans"]["scan"] == 1


def test_where_wanted_chunks_are() -> None:
    """Places by other numbers, and in lists that are looked at one after the other."""
    wanted = np.array([[0, 3]])
    np.testing.assert_allclose(coarse.ranks(np.array([[4.0, 9.0, 1.0, 7.0]]), wanted), [[0.75, 0.5]])
    owner = np.array([1, 0, 0, 2, 1])  # lists of two, two and one
    np.testing.assert_allclose(coarse.held(owner, np.array([[2, 0, 1]]), wanted), [[1.0, 0.2]])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_queries_at_once_share_an_index_and_prompts_leave_nothing(
    index: Path, prepared: Prepared, tmp_path: Path
) -> None:
    given = Namespace(index=index, processes=2, prompts=4, read=1, prompt="water stone")
    with (tmp_path / "log").open("w") as log:
        shared = load.at_once(prepared, given, log)
        flat = load.one_after_another(prepared, given, log)
    assert (tmp_path / "log").read_text() == ""
    one, both = shared["mapped_rss_bytes"]["one"], shared["mapped_rss_bytes"]["all"]
    assert both == 2 * one > 0
    assert 0.9 < shared["copies"] < 1.1 and shared["private_bytes_of_index"] == 0
    assert list(flat["anonymous_bytes"]) == ["1", "2", "3", "4"] and flat["ratio"] > 0.5


def test_mapped_pages_are_counted_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    for name in ("a b/inside", "outside"):
        (tmp_path / name).write_bytes(bytes(1 << 16))
    with (
        (tmp_path / "a b/inside").open("rb") as inside,
        (tmp_path / "outside").open("rb") as outside,
        mmap.mmap(inside.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        mmap.mmap(outside.fileno(), 0, prot=mmap.PROT_READ) as other,
    ):
        assert mapped[:] == other[:]
        assert load.mapped(os.getpid(), tmp_path / "a b")["Rss"] == 1 << 16


@pytest.mark.slow  # a process that imports everything
def test_a_query_says_what_checking_cost_it(index: Path, tmp_path: Path) -> None:
    found = checks._ask(index, "water stone", tmp_path)
    assert found["digested_bytes"] > 0 and 0 < found["check"] < found["processor"]
    assert 0 < found["bounds_wall"] < found["wall"]


def test_what_a_soak_compares(tmp_path: Path) -> None:
    one = {"response": "a", "verdict": "clear", "hits": [("b", 0)], "influences": [1.0]}
    assert soak._same(one, {**one, "influences": [1.0001]}) and soak._same(None, None)
    for other in (None, {**one, "influences": [1.1]}, {**one, "hits": [("c", 0)]}, {"failed": "why"}):
        assert not soak._same(other, one)
    for name in ("whole", "found"):
        (tmp_path / name / "run.stride").mkdir(parents=True)
        (tmp_path / name / "run.stride" / "c").write_text("same")
    (tmp_path / "whole" / "lost").write_text("")
    (tmp_path / "found" / "run.stride" / "c").write_text("other")
    (tmp_path / "found" / "run.stride.partial").mkdir()
    found = soak.Soak(tmp_path, None, 0)  # type: ignore[arg-type]
    found._compare(tmp_path / "found", tmp_path / "whole", "loop")
    assert found.counts == {"differing_bytes": 2, "leftovers": 1}, found.failures


def test_a_soak_that_fails_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for failures, code in ((0, 0), (3, 1)):
        record = {"schema": "none", "failures": failures}
        monkeypatch.setattr(soak, "run", lambda minutes, seed, record=record: record)
        monkeypatch.setattr(soak, "emit", lambda record: print(json.dumps(record)))
        assert command.main(["soak", "--minutes", "0"]) == code
        assert json.loads(capsys.readouterr().out) == record
