"""Retraining: what it gives, that it is kept, and that what does not fit is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.training.index_build import build_index_of_run
from stride_cli.training.initial_model import initial_model
from stride_cli.training.jobs import Job, OutcomeStore, job_key
from stride_cli.training.language_loop import train
from stride_cli.training.language_trainer import index_chunks, own_recipe, query_losses
from stride_cli.training.retraining import count_missing, open_trainer, retrain
from stride_cli.training.runs import cut, read_corpus


def _jobs(n: int, count: int) -> list[Job]:
    random = np.random.default_rng(0)
    return [Job(random.random(n) < 0.5, 10 + number) for number in range(count)]


def _read_all(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.glob("*.outcome")}


def test_index_chunks_are_those_of_training(task_and_queries, trained, tmp_path):
    task, _ = task_and_queries
    corpus = read_corpus([str(trained / "corpus.jsonl")], ReadOptions())
    expected, _ = cut(corpus, task.model.tokenizer, block_size=task.index.attributes["block_size"])
    found = index_chunks(task)
    assert len(found) == len(expected) > 60  # some documents are longer than a block
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert (ours.loss_start, ours.n_scored) == (theirs.loss_start, theirs.n_scored)
    recipe = own_recipe(task)
    for name in ("tokens", "scored_tokens"):  # in another form there are others
        with pytest.raises(ModelError, match=f"{name.replace('_', ' ')} 5 in the recipe"):
            own_recipe(task, replace(recipe, corpus=recipe.corpus | {name: 5}))
    with pytest.raises(UsageError, match="--form is what the training had"):
        build_index_of_run(task.model.path, out=tmp_path / "x", options=BuildOptions(form="text"))


def test_losses_are_the_models_own(task_and_queries):
    task, queries = task_and_queries
    losses = query_losses(task.model, queries)
    for number, (ids, weights) in enumerate(zip(queries.ids, queries.weights, strict=True)):
        logits = task.model.model(input_ids=torch.as_tensor(ids)[None]).logits[0].double()
        each = -logits.log_softmax(-1)[:-1].gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()
        assert losses[number] == pytest.approx(each[weights[1:] > 0].mean(), abs=1e-5)


def test_a_job_is_what_train_gives(task_and_queries, tmp_path, monkeypatch):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # importing which takes longer than the training
        found = retrain(trainer, jobs, store=tmp_path / "store", workers=1)
    recipe = read_recipe(task.model.path).with_seed(jobs[0].seed)
    model = initial_model(recipe)
    train(model, index_chunks(task), recipe, subset=jobs[0].mask)
    np.testing.assert_allclose(found[0].losses, query_losses(CausalLM(model), queries), rtol=0, atol=1e-3)


def test_the_base_model_comes_back(task_and_queries, tmp_path):
    """All chunks and the recipe's own seed: the training that made the model."""
    task, queries = task_and_queries
    job = Job(np.ones(task.n_chunks, bool), read_recipe(task.model.path).seed)
    found = retrain(open_trainer(task, queries), [job], store=tmp_path / "store", workers=1)
    np.testing.assert_allclose(found[0].losses, query_losses(task.model, queries), rtol=0, atol=1e-3)


def test_nothing_is_trained_twice(task_and_queries, tmp_path, monkeypatch):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 3)
    store = tmp_path / "store"
    first = retrain(trainer, [*jobs, jobs[0]], store=store, workers=1)
    assert len(list(store.glob("*.outcome"))) == 3
    assert count_missing(trainer, jobs, store=store) == 0
    monkeypatch.setattr(trainer, "run", None)  # it must not be called
    again = retrain(trainer, jobs, store=store, workers=1)
    for one, two in zip(first[:3], again, strict=True):
        assert one.losses.tobytes() == two.losses.tobytes()


@pytest.mark.parametrize("damage", ["flip", "empty"])
def test_a_damaged_outcome_is_trained_again(task_and_queries, tmp_path, damage, capsys):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 2)
    store = tmp_path / "store"
    retrain(trainer, jobs, store=store, workers=1)
    whole = _read_all(store)
    path = store / (job_key(trainer.digest, jobs[1]) + ".outcome")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content if damage == "flip" else b"")
    assert count_missing(trainer, jobs, store=store) == 1
    retrain(trainer, jobs, store=store, workers=1)
    assert "is damaged" in capsys.readouterr().err
    assert _read_all(store) == whole


def test_a_group_is_kept_whole_or_not_at_all(task_and_queries, tmp_path):
    task, queries = task_and_queries
    trainer = open_trainer(task, queries)
    jobs = _jobs(trainer.n_chunks, 3)
    keys = [job_key(trainer.digest, job) for job in jobs]
    outcomes = retrain(trainer, jobs, store=tmp_path / "one", workers=1)
    with OutcomeStore(tmp_path / "two") as kept:
        kept.add(keys, outcomes)
    assert _read_all(tmp_path / "two") == _read_all(tmp_path / "one")
    # killed after the group's file was written, before it was taken apart
    header = json.dumps([[key, len(_read_all(tmp_path / "one")[f"{key}.outcome"])] for key in keys])
    content = b"".join(_read_all(tmp_path / "one")[f"{key}.outcome"] for key in keys)
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "x.group").write_bytes(header.encode() + b"\n" + content)
    with OutcomeStore(tmp_path / "three"):
        assert _read_all(tmp_path / "three") == _read_all(tmp_path / "one")
        assert not list((tmp_path / "three").glob("*.group"))


def test_kept_weights_answer_new_queries(task_and_queries, tmp_path, monkeypatch):
    task, queries = task_and_queries
    jobs = _jobs(task.n_chunks, 2)
    keep = tmp_path / "weights"
    retrain(open_trainer(task, queries.take([0, 1]), keep=keep), jobs, store=tmp_path / "a", workers=1)
    files = sorted(keep.glob("*.safetensors"))
    assert len(files) == 2
    expected = retrain(open_trainer(task, queries), jobs, store=tmp_path / "b", workers=1)
    trainer = open_trainer(task, queries, keep=keep)
    with monkeypatch.context() as patch:
        patch.setattr("stride_cli.training.language_trainer.train", None)
        found = retrain(trainer, jobs, store=tmp_path / "c", workers=1)
    for one, two in zip(found, expected, strict=True):
        assert one.losses.tobytes() == two.losses.tobytes()
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 64
    files[0].write_bytes(bytes(content))
    again = retrain(trainer, jobs, store=tmp_path / "d", workers=1)
    assert [o.losses.tobytes() for o in again] == [o.losses.tobytes() for o in expected]
