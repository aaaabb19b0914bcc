"""Removal of a query's documents: against a trainer whose losses are known, and on a real small model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stride_cli.errors import ModelError, QueryError, UsageError
from stride_cli.models.spec import ModelSpec
from stride_cli.prove.options import HitOptions
from stride_cli.prove.verify_hit import DEPENDED, TOO_FEW, HitCheck, matched_documents, verify_documents
from stride_cli.training.command_trainer import _identity
from stride_cli.training.jobs import Job, Outcome

N, D = 90, 60  # chunks and documents: the first 30 documents have two chunks


class NoisyTrainer:
    """loss = 3 − Σ influence of the members + noise of the seed and the mask."""

    digest = "noisy"
    device, peak_bytes, on_one_gpu = "cpu", 0, 1
    n_chunks = N
    at_once = 4

    def __init__(self, influence: np.ndarray, noise: float = 0.0) -> None:
        self.influence, self.noise, self.trained = influence, noise, 0

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.trained += len(jobs)
        found = []
        for job in jobs:
            key = int(np.packbits(job.mask).sum()) + job.seed
            noise = self.noise * np.random.default_rng([job.seed, key]).normal()
            found.append(Outcome(np.array([3 - self.influence @ job.mask + noise])))
        return found


@pytest.fixture
def owners() -> np.ndarray:
    return np.sort(np.concatenate([np.arange(D), np.arange(30)]))


def check(
    trainer: NoisyTrainer,
    owners: np.ndarray,
    store: Path,
    documents: Sequence[int] = (3, 40, 8),
    seeds: int = 3,
) -> HitCheck:
    options = HitOptions(seeds=seeds, random=4, workers=1)
    lengths = np.full(N, 10)
    return verify_documents(
        trainer, documents, options, chunk_document=owners, chunk_lengths=lengths, store=store
    )


def test_every_chunk_of_the_documents_is_removed(owners: np.ndarray, tmp_path: Path) -> None:
    """Without noise: the rises are the influences of the documents' chunks, the interval a point."""
    influence = np.zeros(N)
    influence[np.isin(owners, [3, 40, 8])] = [0.2, 0.1, 0.05, 0.3, 0.15]
    trainer = NoisyTrainer(influence)
    found = check(trainer, owners, tmp_path)
    assert found.without - found.full == pytest.approx(np.full(3, 0.8))
    assert found.random - found.full[:, None] == pytest.approx(np.zeros((3, 4)))
    assert found.difference.mean == pytest.approx(0.8) and found.verdict == DEPENDED
    assert found.exceeded == 1.0 and found.removed_tokens == 50 and found.random_tokens.mean() == 50
    assert (found.trained, found.reused) == (18, 0) and trainer.trained == 18
    assert "depended on them" in found.sentence() and "+0.800" in found.sentence()
    rows = found.runs()
    assert len(rows) == 18 and {row["removed"] for row in rows} == {"nothing", "hits", "random"}
    assert [row["rise"] for row in rows if row["removed"] == "hits"] == pytest.approx([0.8] * 3)
    more = check(trainer, owners, tmp_path, seeds=4)
    assert (more.trained, more.reused) == (6, 18)  # only the new seed


def test_interval_is_students_t_over_seeds(owners: np.ndarray, tmp_path: Path) -> None:
    trainer = NoisyTrainer(np.zeros(N), noise=0.05)
    # once more is the same look; more seeds are the next
    for look, (seeds, level) in ((1, (3, 0.96)), (2, (4, 0.996)), (1, (3, 0.96)), (3, (2, 0.9996))):
        found = check(trainer, owners, tmp_path, seeds=seeds)
        values = found.without - found.random.mean(axis=1)
        low, high = stats.t.interval(level, seeds - 1, values.mean(), stats.sem(values))
        assert (found.look, found.level) == (look, pytest.approx(level))
        assert (found.difference.low, found.difference.high) == pytest.approx((low, high))
    assert check(trainer, owners, tmp_path, (3, 40)).look == 1  # other documents


def test_verdicts_err_as_often_as_stated_however_often_one_looks() -> None:
    """Where nothing depends on the documents, and as many more seeds are trained as are said to tell."""
    random, wrong, looks, runs = np.random.default_rng(1), 0, 0, 1000
    for _ in range(runs):
        losses, found = np.zeros((0, 7)), None
        while found is None or ((found.seeds_needed or 1000) < 400 and found.verdict == TOO_FEW):
            look, count = (1, 3) if found is None else (found.look + 1, found.seeds_needed)
            losses = np.concatenate([losses, 0.1 * random.normal(size=(count - len(losses), 7))])
            full, without, others = losses[:, 0], losses[:, 1], losses[:, 2:]
            found = HitCheck(np.arange(count), full, without, others, 1, others.astype(int), look=look)
        looks += found.look
        wrong += found.verdict == DEPENDED
    assert wrong / runs <= 0.025 + 2 * np.sqrt(0.025 * 0.975 / runs) and looks > 1.3 * runs


@given(st.lists(st.integers(1, 5000), min_size=25, max_size=300), st.integers(1, 12), st.integers(0, 9))
def test_random_documents_are_others(lengths: list[int], count: int, seed: int) -> None:
    sizes = np.array(lengths)
    chosen = np.random.default_rng(seed).permutation(len(sizes))[:count]
    found = matched_documents(sizes, chosen, np.random.default_rng(seed))
    assert len(np.unique(found)) == count and not np.isin(found, chosen).any()
    assert (found == matched_documents(sizes, chosen, np.random.default_rng(seed))).all()


def test_random_documents_have_as_many_tokens() -> None:
    random = np.random.default_rng(0)
    sizes = np.round(np.exp(random.normal(5, 1, size=3000))).astype(int)
    chosen = np.argsort(-sizes)[20:200:20]  # long ones: uniform draws would have a third of their tokens
    sums = [sizes[matched_documents(sizes, chosen, np.random.default_rng(s))].sum() for s in range(20)]
    assert np.abs(np.array(sums) / sizes[chosen].sum() - 1).max() < 0.04
    alone = {int(matched_documents(sizes, chosen[:1], np.random.default_rng(s))[0]) for s in range(20)}
    assert len(alone) > 2  # nor always the one that fits best
    draws = [set(matched_documents(sizes, chosen, np.random.default_rng(s)).tolist()) for s in range(5)]
    assert len(draws[0] & draws[1]) < len(chosen)


class ComparingTrainer(NoisyTrainer):
    """Two queries a job: what was said, and what it is compared with, which no chunk moves."""

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [Outcome(np.append(found.losses, 4.0)) for found in super().run(jobs)]


def test_losses_of_parts_are_added_up_by_their_shares(owners: np.ndarray, tmp_path: Path) -> None:
    influence = np.zeros(N)
    influence[np.isin(owners, [3])] = 0.5
    trainer, options = ComparingTrainer(influence), HitOptions(seeds=3, random=2, workers=1)
    of = {"chunk_document": owners, "chunk_lengths": np.full(N, 10), "store": tmp_path}
    found = verify_documents(trainer, [3], options, **of, shares=[1.0, -1.0])
    assert found.full == pytest.approx(np.full(3, 3 - 1.0 - 4.0))  # log-odds × -1
    assert found.difference.mean == pytest.approx(1.0) and found.compared
    assert "log-odds fall by more" in found.sentence() and "+1.000 nats, 96%" in found.sentence()


@pytest.mark.slow
def test_several_prompts_are_tested_as_one(trained: Path, tmp_path: Path) -> None:
    """The log-odds, by hand: of the losses of the two tokens, in two prompts apart."""
    from stride_cli import api
    from stride_cli.data.workspace import WorkspacePath

    documents = [json.loads(line) for line in (trained / "corpus.jsonl").read_text().splitlines()]
    index = tmp_path / "run.stride"
    shutil.copytree(trained / "run.stride", index)
    place = WorkspacePath(index, ModelSpec(str(trained / "model"), device="cpu", dtype="fp32"))
    api.fit_index(index, model=place.model)
    asked = [
        {"prompt": document["text"][:40], "response": document["text"][40:90], "instead": " zebra"}
        for document in documents[:2]
    ]
    given = {"documents": [documents[0]["id"]], "check": HitOptions(seeds=2, random=1, workers=1)}
    found = api.verify_hit(place, asked, **given)
    assert found["pooled"] == 2 and found["compared"] and "instead" not in found
    alone = [api.verify_hit(place, [each], **given) for each in asked]
    assert [each["instead"].strip() for each in alone] == ["zebra", "zebra"]
    both = np.mean([[run["loss"] for run in each["runs"]] for each in alone], axis=0)
    assert [run["loss"] for run in found["runs"]] == pytest.approx(both.tolist(), abs=1e-4)
    # an answer's query is the same question
    session = api.Session.open(index, model=place.model)
    answer = session.query_pooled(asked, api.QueryOptions(top=1))
    again = api.verify_hit(place, answer.query, **given)
    assert again["trained"] == 0 and again["runs"] == found["runs"]
    own = api.verify_hit(place, asked, api.QueryOptions(top=1), given["check"])
    assert own["documents"][0]["document"] == answer.document_ids[answer.supporters[0].document]
    with pytest.raises(UsageError, match="beside prompts that have their own"):
        api.verify_hit(place, asked, response="a", **given)
    with pytest.raises(QueryError, match="no prompt to ask"):
        api.verify_hit(place, [], **given)


@pytest.mark.slow
def test_a_real_model_forgets_what_it_no_longer_reads(trained: Path, tmp_path: Path) -> None:
    """Retrained for real: the text of a document is less likely without that document, and not without
    others."""
    from dataclasses import replace

    from stride_cli import api
    from stride_cli.data.workspace import WorkspacePath

    documents = [json.loads(line) for line in (trained / "corpus.jsonl").read_text().splitlines()]
    wanted = documents[7]
    index = tmp_path / "run.stride"
    index.symlink_to(trained / "run.stride")
    place = WorkspacePath(index, ModelSpec(str(trained / "model"), device="cpu", dtype="fp32"))
    given = {"response": wanted["text"][40:120], "check": HitOptions(seeds=3, random=2, workers=1)}
    found = api.verify_hit(place, wanted["text"][:40], documents=[wanted["id"]], **given)
    assert found["documents"][0]["document"] == wanted["id"] and found["documents"][0]["influence"] is None
    assert found["trained"] == 12 and len(found["runs"]) == 12
    other = api.verify_hit(place, wanted["text"][:40], documents=[documents[20]["id"]], **given)
    assert found["difference"]["mean"] > other["difference"]["mean"]
    again = api.verify_hit(place, wanted["text"][:40], documents=[wanted["id"]], **given)
    assert again["trained"] == 0 and again["runs"] == found["runs"]
    with pytest.raises(UsageError, match="there is no document 'nobody'"):
        api.verify_hit(place, "a", documents=["nobody"], **given)
    with pytest.raises(QueryError, match="empty"):
        api.verify_hit(place, "  ", documents=[wanted["id"]], **given)
    bare = tmp_path / "bare"
    shutil.copytree(trained / "model", bare, ignore=shutil.ignore_patterns("stride_recipe.json"))
    with pytest.raises(ModelError, match="has no recipe") as caught:
        api.verify_hit(replace(place, model=ModelSpec(bare)), "a", documents=[wanted["id"]], **given)
    assert "--command" in str(caught.value.fix)


@pytest.mark.slow
def test_a_trainers_run_is_retrained_by_its_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's function, with LoRA: losses are those that transformers computes of the models it made."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from stride_cli import StrideCallback, api
    from tests.stride_cli.training.test_trainer_tokens import ROWS, datasets, make_tokenizer
    from tests.tiny_models import tiny_nanochat

    monkeypatch.chdir(tmp_path)
    tokenizer, made = make_tokenizer(None), []
    for saved in (tokenizer, tiny_nanochat(len(tokenizer))):
        saved.save_pretrained("base")
    quiet = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
    args = trl.SFTConfig(max_steps=20, learning_rate=0.03, **quiet)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    dataset = datasets.Dataset.from_list(ROWS["strings"])

    class Kept(trl.SFTTrainer):  # type: ignore[misc,name-defined]
        def train(self) -> None:
            super().train()
            made.append((self.train_dataset, self.model))

    given = {"train_dataset": dataset, "peft_config": lora, "callbacks": [StrideCallback("run")]}
    Kept(model="base", args=args, **given).train()
    api.build_index_of_run("run", out="run.stride", options=api.BuildOptions(n_subsets=4, degree=2))
    api.train("run.stride", calibration=None)
    page = (Path(__file__).parents[3] / "docs/guides/trainer.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(def retrain.*?)```", page, re.DOTALL)
    Path("block.py").write_text(block, encoding="utf-8")
    names = {"api": api, "set_seed": set_seed, "SFTTrainer": Kept}
    names |= {"args": args, "dataset": dataset, "lora": lora}
    exec(compile(block, "block.py", "exec"), names)
    found, runs = names["found"], names["found"]["runs"]
    assert len(runs) == found["trained"] == len(made) - 1 == 12
    asked = len(tokenizer(found["prompt"])["input_ids"])
    ids = torch.tensor([tokenizer(found["prompt"] + found["response"])["input_ids"]])
    labels = ids.clone()
    labels[:, :asked] = -100
    losses = [model.eval()(ids, labels=labels).loss.item() for _, model in made[1:]]
    assert [run["loss"] for run in runs] == pytest.approx(losses, abs=1e-4)
    rises = [loss - losses[start] for start in range(0, 12, 4) for loss in losses[start : start + 4]]
    assert [run["rise"] for run in runs] == pytest.approx(rises, abs=2e-4) and max(map(abs, rises)) > 0.1
    left = [{dataset["prompt"].index(each) for each in rows["prompt"]} for rows, _ in made[1:]]
    hits = {int(hit["document"]) for hit in found["documents"]}
    assert left[0] == set(range(10)) and left[1] == left[0] - hits and len(left[2]) == 7
    exec(compile(block, "block.py", "exec"), names)  # again: nothing is trained
    assert len(made) == 13 and names["found"]["runs"] == runs
    line: Any = ("run.stride", "The guardian of", names["top"], names["check"])
    same = api.verify_hit(*line, retrain=lambda stays, seed: Path("base"))["runs"]
    loss = AutoModelForCausalLM.from_pretrained("base")(ids, labels=labels).loss.item()
    assert [run["loss"] for run in same] == pytest.approx([loss] * 12, abs=1e-4)
    for wrong, said in ((lambda stays, seed: None, "returned NoneType"), (print, "source of retrain")):
        with pytest.raises(UsageError, match=said):
            api.verify_hit("run.stride", "The town of", names["top"], names["check"], retrain=wrong)


def test_a_function_of_other_settings_is_another() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def named(epochs: int, layers: set[str], place: str) -> tuple[str, ...]:
        args = transformers.TrainingArguments(place, num_train_epochs=epochs)
        lora = peft.LoraConfig(target_modules=layers)
        return _identity(lambda stays, seed: (args, lora))

    first = named(1, {"a", "b"}, "here")
    assert first == named(1, {"b", "a"}, "there")
    assert len({first, named(2, {"a", "b"}, "here"), named(1, {"a"}, "here")}) == 3
