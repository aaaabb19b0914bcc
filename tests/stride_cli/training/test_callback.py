"""`StrideCallback`: a training of transformers' own Trainer, recorded; and the index that is built of it."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from stride_cli import api
from stride_cli.corpus.options import BuildOptions
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.loading import load_model
from stride_cli.training.recording import find_run, refuse_other_adapters, write_corpus
from tests.tiny_models import random_model, tiny_nanochat

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
trains = pytest.mark.slow  # to import the Trainer and what comes with it takes five seconds
ASKED, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
STEPS = 10  # of four examples: a pass over thirty, and two steps of the next


def examples(documents: list[dict[str, str]], tokenizer: Any) -> Any:
    rows = []
    for document in documents:
        tokens = tokenizer(document["text"], add_special_tokens=False)["input_ids"]
        rows.append({**document, "input_ids": [tokenizer.bos_token_id or 0, *tokens]})
    return datasets.Dataset.from_list(rows)


def make_trainer(folder: Path, tokenizer: Any, data: Any, callback: Any, **changes: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer, model = copy.deepcopy(tokenizer), changes.pop("model", None)
    tokenizer.pad_token = tokenizer.bos_token
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no",
    } | changes  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    class Seen(Trainer):
        """Keeps which examples its batches are made of."""

        def collate(self, features: list[dict]) -> Any:
            self.rows += [known[tuple(each["input_ids"])] for each in features]
            return collator(features)

    known = {tuple(ids): row for row, ids in enumerate(data["input_ids"])}
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), logging_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=3, **settings,
    )  # fmt: skip
    trainer = Seen(
        model=tiny_nanochat(len(tokenizer)) if model is None else model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )
    trainer.rows, trainer.data_collator = [], trainer.collate
    return trainer


class Forgetting(TrainerCallback):
    """Forgets the examples that were looked at before the first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **given):
        if not state.global_step:
            self.trainer.rows.clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, documents, tokenizer) -> tuple[Path, Any]:
    """A recorded training, and the trainer that made it."""
    from stride_cli import StrideCallback

    folder = tmp_path_factory.mktemp("run")
    data = examples(documents, tokenizer)
    trainer = make_trainer(
        folder, tokenizer, data, StrideCallback(folder / "run", dataset=data, checkpoints=1)
    )
    trainer.add_callback(Forgetting(trainer))
    trainer.train()
    return folder / "run", trainer


@trains
def test_a_training_is_recorded_whole(run, documents) -> None:
    out, trainer = run
    assert {path.name for path in out.iterdir()} >= {
        "corpus.jsonl", "stride_recipe.json", "stride_run.json", "training_log.jsonl", "order",
        "checkpoints", "config.json", "tokenizer.json",
    }  # fmt: skip
    assert [path.name for path in out.parent.iterdir() if path.name.startswith("run")] == ["run"]
    lines = (out / "corpus.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    tokens = [record.pop("trained_on") for record in records]
    assert records == documents
    assert [each["input_ids"] for each in tokens] == trainer.train_dataset["input_ids"]
    recipe = read_recipe(out)
    assert recipe is not None and recipe.kind == "recorded" and recipe.base is None and recipe.steps == STEPS
    assert recipe.corpus["documents"] == len(documents) and recipe.adam_lr == 1e-3
    told = json.loads((out / "stride_run.json").read_text())
    assert told["examples_per_step"] == 4 and told["arguments"]["max_steps"] == STEPS
    assert not any("token" in name for name in told["arguments"])
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert [point["step"] for point in log] == [2, 4, 6, 8, 10] and log[-1]["loss"] > 0
    assert [path.name for path in out.glob("checkpoints/*")] == ["step-000005"]
    from transformers import AutoModelForCausalLM

    kept = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in trainer.model.state_dict().items())


@trains
def test_the_order_is_that_in_which_examples_came(run, documents) -> None:
    out, trainer = run
    first, second = (np.load(out / "order" / f"epoch-{epoch:03d}.npy") for epoch in range(2))
    assert first.dtype == np.int64 and sorted(first) == list(range(len(documents)))
    assert first.tolist() != sorted(first)
    drawn = [*first.tolist(), *second.tolist()]
    assert drawn[: len(trainer.rows)] == trainer.rows and len(trainer.rows) >= 38


@trains
def test_recording_changes_no_weight(run, documents, tokenizer, tmp_path: Path) -> None:
    _, trainer = run
    alone = make_trainer(tmp_path, tokenizer, examples(documents, tokenizer), None)
    alone.train()
    for one, other in zip(alone.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


@trains
def test_an_index_needs_nothing_else(run, tmp_path: Path) -> None:
    out, _ = run
    index = api.build_index_of_run(
        out, out=tmp_path / "run.stride", options=BuildOptions(n_subsets=8, degree=2)
    )
    recipe = read_recipe(out)
    assert recipe is not None and index.attributes["fingerprints"]["corpus"] == recipe.corpus["fingerprint"]
    assert index.attributes["block_size"] == recipe.block_size and index.n_documents == 30
    changed = Path(shutil.copytree(out, tmp_path / "changed"))
    lines = (changed / "corpus.jsonl").read_text().splitlines()
    (changed / "corpus.jsonl").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(ModelError, match="does not hold the chunks that its model was trained on: corpus"):
        api.build_index_of_run(
            changed, out=tmp_path / "b.stride", options=BuildOptions(n_subsets=8, degree=2)
        )
    with pytest.raises(ModelError, match="holds no recorded training"):
        find_run(tmp_path)


@trains
def test_a_killed_training_leaves_a_part_that_goes_on(documents, tokenizer, tmp_path: Path) -> None:
    from stride_cli import StrideCallback

    class Killed(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            if state.global_step == 3:
                raise KeyboardInterrupt

    data = examples(documents, tokenizer)
    changes = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, tokenizer, data, None, **changes)
    trainer.add_callback(StrideCallback(tmp_path / "run", dataset=data))
    trainer.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (tmp_path / "run").exists() and (tmp_path / "run.partial" / "model" / "order").is_dir()
    trainer = make_trainer(
        tmp_path, tokenizer, data, StrideCallback(tmp_path / "run", dataset=data), **changes
    )
    trainer.train(resume_from_checkpoint=True)
    assert read_recipe(tmp_path / "run").steps == STEPS and not (tmp_path / "run.partial").exists()  # type: ignore[union-attr]
    log = map(json.loads, (tmp_path / "run" / "training_log.jsonl").read_text().splitlines())
    assert [point["step"] for point in log] == [2, 4, 6, 8, 10]


@trains
def test_what_cannot_be_recorded_is_refused_before_the_first_step(
    documents, tokenizer, tmp_path: Path
) -> None:
    from stride_cli import StrideCallback

    data = examples(documents, tokenizer)
    for dataset, message in (
        (data.select(range(3)), "has 3 rows, the trainer's 30"),
        (datasets.Dataset.from_list([{"a": 1}] * 30), "example 0 of the training dataset has a "),
    ):
        trainer = make_trainer(tmp_path, tokenizer, data, StrideCallback(tmp_path / "run", dataset=dataset))
        with pytest.raises(UsageError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0
    assert not list(tmp_path.glob("run*"))
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        StrideCallback(tmp_path / "there")


@trains
def test_weights_that_are_not_finite_are_not_recorded(documents, tokenizer, tmp_path: Path) -> None:
    from stride_cli import StrideCallback

    data = examples(documents, tokenizer)
    trainer = make_trainer(tmp_path, tokenizer, data, StrideCallback(tmp_path / "run", dataset=data))
    next(trainer.model.parameters()).data[0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        trainer.train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"text": "a b"}, {"text": "a b"}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "response": "b"}),
        ({"prompt": [ASKED], "completion": [TOLD]}, {"messages": [ASKED, TOLD]}),
        (
            {"messages": [{**ASKED, "name": None}, {**TOLD, "weight": 0}]},
            {"messages": [ASKED, {**TOLD, "weight": 0}]},
        ),
    ],
)
def test_examples_of_every_form_become_documents(tokenizer, tmp_path: Path, example, expected) -> None:
    tokens = tokenizer("a b", add_special_tokens=False)["input_ids"], [[1, 3]]
    found = write_corpus([example], tokenizer, tmp_path / "corpus.jsonl", lambda row: tokens)
    record = json.loads((tmp_path / "corpus.jsonl").read_text())
    assert record.pop("trained_on")["input_ids"] == tokens[0] and record == {"id": "0", **expected}
    assert found.documents == 1


def test_tokens_become_the_texts_that_they_were(documents, tokenizer, tmp_path: Path, capsys) -> None:
    texts = [document["text"] for document in documents]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    out, rows = tmp_path / "corpus.jsonl", [{"input_ids": ids} for ids in tokens]
    write_corpus(rows, tokenizer, out, lambda row: (tokens[row], [[0, len(tokens[row])]]))
    lines = out.read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts and not capsys.readouterr().err
    write_corpus(rows[:1], tokenizer, out, lambda row: (tokens[0], [[4, len(tokens[0])]]))
    found = json.loads(out.read_text())
    assert found["prompt"] + found["response"] == texts[0] and found["prompt"]


@trains
def test_low_rank_parts_are_in_the_weights_that_are_kept(documents, tokenizer, run, tmp_path: Path) -> None:
    """An index needs the whole model; the one that is trained stays in two parts."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from stride_cli import StrideCallback

    base, data = run[0], examples(documents, tokenizer)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    callback = StrideCallback(tmp_path / "run", dataset=data, checkpoints=1)
    trainer = make_trainer(tmp_path, tokenizer, data, callback, model=model)
    trainer.train()
    assert any("lora_" in name for name, _ in trainer.model.named_parameters())
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    merged = trainer.model.merge_and_unload().state_dict()
    assert kept.keys() == merged.keys() and all(torch.equal(kept[name], merged[name]) for name in kept)
    assert any(not torch.equal(kept[name], before[name]) for name in kept)
    recipe = read_recipe(tmp_path / "run")
    assert recipe is not None and recipe.lora_rank == 4 and recipe.base == str(base.resolve())
    assert recipe.base_fingerprint is not None
    adapted, own = load_model(str(tmp_path / "run")).linear_layers("all"), recipe.lora_layers or []
    assert {name[-6:] for name in own} == {"q_proj", "v_proj"} and len(adapted) == len(own) > 2
    for name, more, refused in (
        ("Mixtral", {"target_parameters": ["mlp.experts.down_proj"]}, "fused experts"),
        ("Llama", {"lora_bias": True}, "lora_bias"),
        ("Llama", {"target_modules": ["q_proj", "lm_head"]}, "tied to another matrix"),
    ):
        config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **more})
        with pytest.raises(UsageError, match=refused):
            refuse_other_adapters(peft.get_peft_model(random_model(name, tied=name == "Llama"), config))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=True)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    callback = StrideCallback(tmp_path / "dora", dataset=data)
    with pytest.raises(UsageError, match="trained by DoRA"):
        make_trainer(tmp_path, tokenizer, data, callback, model=model).train()
