"""Projections that `StrideCallback` gathers, against gradients of single examples by autograd."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli.errors import ModelError, UsageError
from stride_cli.operators.layer_projections import (
    GATHERED,
    GatheredProjections,
    ProjectedLayers,
    layer_numbers,
)
from tests.tiny_models import random_model, tiny_nanochat

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
trains = pytest.mark.slow  # to import the Trainer and what comes with it takes five seconds
EXAMPLES, STEPS, BYTES = 10, 6, 64
VOCABULARY = 60


def pairs(vocabulary: int, *, masked: bool = True) -> Any:
    """Examples of different lengths, of which the first tokens are not scored."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(EXAMPLES):
        ids = random.integers(3, vocabulary, 6 + number).tolist()
        start = number % 4 if masked else 0
        rows.append({"input_ids": ids, "labels": [-100] * start + ids[start:], "text": f"example {number}"})
    return datasets.Dataset.from_list(rows)


def make_trainer(folder: Path, tokenizer: Any, data: Any, callback: Any, model: Any, **changes: Any) -> Any:
    """With `seen`: of every batch its examples, its step's learning rate, and the weights then."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.bos_token
    tokenizer.padding_side = changes.pop("side", "right")
    compute_loss, kind = changes.pop("compute_loss", None), changes.pop("kind", Trainer)
    collator = DataCollatorForSeq2Seq(tokenizer)
    known = {tuple(ids): row for row, ids in enumerate(data["input_ids"])}

    class Seen(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            trainer.rates.append(given["optimizer"].param_groups[0]["lr"])
            trainer.weights.append(copy.deepcopy(given["model"].state_dict()))

    def collate(features: list[dict]) -> Any:
        batch = collator([{name: each[name] for name in ("input_ids", "labels")} for each in features])
        trainer.batches.append(([known[tuple(each["input_ids"])] for each in features], batch))
        return batch

    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "seed": 3}
    settings |= {"save_strategy": "no", "lr_scheduler_type": "linear"} | changes
    trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=2,
            **settings,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=collate,
        compute_loss_func=compute_loss,
        callbacks=[callback, Seen()],
    )  # fmt: skip
    trainer.rates, trainer.weights, trainer.batches = [], [], []
    return trainer


def by_autograd(
    model: Any, trainer: Any, layers: ProjectedLayers, together: int = 1, steps: range = range(STEPS)
) -> np.ndarray:
    """−Σ_steps lr Qᵀ (∂ loss summed over scored tokens / ∂W) P, example by example, weight by weight."""
    found = np.zeros((EXAMPLES, layers.size), np.float32)
    model = copy.deepcopy(model).eval()
    sides = [layers.sides(number) for number in range(len(layers.names))]
    for step in steps:
        model.load_state_dict(trainer.weights[step])
        for batch in trainer.batches[step * together : (step + 1) * together]:
            for place, row in enumerate(batch[0]):
                labels = batch[1]["labels"][place]
                own = {name: batch[1][name][place : place + 1] for name in ("input_ids", "attention_mask")}
                model.zero_grad()
                logits = model(**own).logits[0, :-1]
                torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").backward()
                for name, span, (P, Q) in zip(layers.names, layers.spans, sides, strict=True):
                    layer = model.get_submodule(name)
                    gradient = layer.weight.grad if hasattr(layer, "in_features") else layer.weight.grad.T
                    found[row, span] -= trainer.rates[step] * (Q.T @ gradient @ P).flatten().numpy()
    return found


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was gathered, before signs are made of it."""
    kept: dict[str, Any] = {}
    make = GatheredProjections.of

    def keeping(layers: ProjectedLayers, found: np.ndarray, *rest: Any) -> GatheredProjections:
        kept.update(layers=layers, sums=found.copy())
        return make(layers, found, *rest)

    monkeypatch.setattr(GatheredProjections, "of", keeping)
    return kept


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 4},
    "padded on the left": {"side": "left"},
    "checkpointed": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "checkpointed, reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}  # fmt: skip


@trains
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_sums_are_those_of_single_examples_gradients(way, name, tokenizer, tmp_path: Path, sums) -> None:
    from stride_cli import StrideCallback

    model, changes = random_model(name).float(), dict(WAYS[way])
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = pairs(VOCABULARY)
    callback = StrideCallback(tmp_path / "run", projections=BYTES)
    trainer = make_trainer(tmp_path, tokenizer, data, callback, model, **changes)
    original = copy.deepcopy(model)
    trainer.train()
    steps = range(trainer.state.max_steps)
    together = changes.get("gradient_accumulation_steps", 1)
    if together > 1:  # five batches a pass: three, and two
        ends, seen = [0, 3, 5, 8, 10], trainer.batches
        expected = np.zeros_like(sums["sums"])
        for step in steps:
            part = copy.copy(trainer)
            part.batches = seen[ends[step] : ends[step + 1]]
            part.weights, part.rates = [trainer.weights[step]], [trainer.rates[step]]
            expected += by_autograd(original, part, sums["layers"], len(part.batches), range(1))
    else:
        expected = by_autograd(original, trainer, sums["layers"], 1, steps)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(sums["sums"], expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())
    kept = GatheredProjections.load(tmp_path / "run" / GATHERED)
    assert kept.codes.shape == (EXAMPLES, BYTES) and (kept.step > 0).all()


@trains
@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_a_trainer_may_add_up_log_probabilities_itself(loss: str, tokenizer, tmp_path: Path, sums) -> None:
    """As TRL's does: "nll" is the mean over tokens, "dft" weighs each by its probability."""
    from transformers import Trainer

    from stride_cli import StrideCallback

    class Summing(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            logarithms = model(**inputs).log_probs
            if loss == "dft":
                logarithms = logarithms * logarithms.exp().detach()
            return -logarithms.sum() / num_items_in_batch

    model = random_model("Llama").float()
    original, forward = copy.deepcopy(model), model.forward

    @functools.wraps(forward)
    def with_log_probs(**given: Any) -> Any:
        if (labels := given.pop("labels", None)) is None:
            return forward(**given)
        labels, logits = labels[:, 1:], forward(**given).logits[:, :-1]
        taken = logits.log_softmax(-1).gather(2, labels.clamp_min(0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=taken * (labels != -100))

    model.forward = with_log_probs
    callback = StrideCallback(tmp_path / "run", projections=BYTES)
    trainer = make_trainer(tmp_path, tokenizer, pairs(VOCABULARY), callback, model, kind=Summing)
    if loss == "dft":
        with pytest.raises(UsageError, match="another loss than the mean of the tokens'"):
            trainer.train()
        return
    trainer.train()
    expected = by_autograd(original, trainer, sums["layers"])
    np.testing.assert_allclose(sums["sums"], expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())


@trains
def test_sums_of_low_rank_training_are_of_whole_weights(tokenizer, tmp_path: Path, sums) -> None:
    peft = pytest.importorskip("peft")
    from stride_cli import StrideCallback

    data = pairs(VOCABULARY)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(random_model("Llama"), config)
    callback = StrideCallback(tmp_path / "run", projections=BYTES)
    trainer = make_trainer(tmp_path, tokenizer, data, callback, model)
    whole = random_model("Llama")
    trainer.train()
    last = copy.deepcopy(model)
    for step, weights in enumerate(trainer.weights):
        last.load_state_dict(weights)
        trainer.weights[step] = copy.deepcopy(last).merge_and_unload().state_dict()
    names = sums["layers"].names
    assert len(names) == 6 and all(name.endswith(("q_proj", "v_proj")) for name in names)
    expected = by_autograd(whole, trainer, sums["layers"])
    np.testing.assert_allclose(sums["sums"], expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())


@trains
def test_sums_in_16_bits_are_near_those_in_32(tokenizer, tmp_path: Path, sums) -> None:
    from stride_cli import StrideCallback

    callback, model = StrideCallback(tmp_path / "run", projections=BYTES), random_model("Llama")
    trainer = make_trainer(tmp_path, tokenizer, pairs(VOCABULARY), callback, model, bf16=True)
    original = copy.deepcopy(model)
    trainer.train()
    expected = by_autograd(original, trainer, sums["layers"])
    cosines = np.einsum("nj,nj->n", sums["sums"], expected)
    cosines /= np.linalg.norm(sums["sums"], axis=1) * np.linalg.norm(expected, axis=1)
    sizes = np.linalg.norm(sums["sums"], axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.99 and np.abs(sizes - 1).max() < 0.05


@trains
def test_a_killed_training_goes_on_with_what_its_checkpoint_kept(
    tokenizer, tmp_path: Path, sums, capsys
) -> None:
    from transformers import TrainerCallback

    from stride_cli import StrideCallback

    class Killed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    data, changes = pairs(VOCABULARY), {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}

    def trainer_of(folder: Path) -> Any:
        callback = StrideCallback(folder / "run", projections=BYTES)
        return make_trainer(folder, tokenizer, data, callback, random_model("Llama"), **changes)

    trainer_of(tmp_path / "whole").train()
    whole = sums["sums"]
    folder = tmp_path / "killed"
    trainer = trainer_of(folder)
    trainer.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    kept = folder / "run.partial" / "projections-000003.pt"
    assert [path.name for path in folder.glob("run.partial/projections-*")] == [kept.name]
    trainer_of(folder).train(resume_from_checkpoint=True)  # in the middle of a pass of five steps
    np.testing.assert_allclose(sums["sums"], whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    assert "nothing was kept" not in capsys.readouterr().err

    again = tmp_path / "again"
    trainer = trainer_of(again)
    trainer.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (again / "run.partial" / kept.name).unlink()
    trainer_of(again).train(resume_from_checkpoint=True)
    assert "nothing was kept of the projections at step 3" in capsys.readouterr().err
    assert not np.allclose(sums["sums"], whole)


@trains
def test_what_does_not_let_examples_be_told_apart_is_refused(tokenizer, tmp_path: Path) -> None:
    from transformers import DataCollatorWithFlattening

    from stride_cli import StrideCallback
    from stride_cli.training.gathering import refuse_unprojectable

    def starts(message: str, change: Any = None, **changes: Any) -> None:
        callback = StrideCallback(tmp_path / "run", projections=BYTES, overwrite=True)
        trainer = make_trainer(tmp_path, tokenizer, data, callback, random_model("Llama"), **changes)
        if change is not None:
            trainer.data_collator = change(trainer.data_collator)
        with pytest.raises(UsageError, match=message) as caught:
            trainer.train()
        assert caught.value.fix and trainer.state.global_step == 0 and not (tmp_path / "run").exists()

    def reversing(collate: Any) -> Any:
        return lambda features: collate(features[::-1])

    def mean_logit(out: Any, labels: Any, **_: Any) -> Any:
        return out.logits.mean()

    def joined(collate: Any) -> Any:
        flat = DataCollatorWithFlattening()
        return lambda features: flat(
            [{name: each[name] for name in ("input_ids", "labels")} for each in features]
        )

    data = pairs(VOCABULARY)
    starts("sees 1 rows, and the batch is of 2 examples", joined)
    starts("is not example [0-9]+ of the training dataset", reversing)
    starts(
        "calls the model without input_ids and labels",
        compute_loss=lambda out, labels, **_: out.logits.mean(),
    )
    starts("the loss is smoothed", label_smoothing_factor=0.1)
    given = {"world_size": 1, "n_gpu": 1, "torch_compile": False, "label_smoothing_factor": 0.0}
    order: Any = object()
    refuse_unprojectable(SimpleNamespace(**given), order)  # type: ignore[arg-type]
    for changes, message in (({"world_size": 2}, "2 processes"), ({"n_gpu": 4}, "4 processes or GPUs"),
                             ({"torch_compile": True}, "compiled")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            refuse_unprojectable(SimpleNamespace(**given | changes), order)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="order of the examples"):
        refuse_unprojectable(SimpleNamespace(**given), None)  # type: ignore[arg-type]
    for wrong in (-8, 12, 1 << 20):
        with pytest.raises(UsageError, match="expected a multiple of 8"):
            StrideCallback(tmp_path / "run", projections=wrong)


@trains
def test_an_index_of_the_run_finds_by_them(documents, tokenizer, tmp_path: Path) -> None:
    from index_format.errors import IndexExists
    from index_format.reader import Index
    from index_format.verify import verify
    from stride_cli import StrideCallback, api
    from stride_cli.attribution.direct_readout import projected_influences
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.attribution.session import Session
    from stride_cli.corpus.options import BuildOptions
    from stride_cli.data.queries import Query
    from stride_cli.data.query_set import QuerySet
    from stride_cli.operators.options import ClosedOptions

    planted = {"id": "planted", "text": "Quvix zorbal wexy kripto junvey qalb mizzen fjord yclept vozhd."}
    texts = [*documents, planted]
    rows = [{**each, "input_ids": tokenizer(each["text"])["input_ids"]} for each in texts]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    data = datasets.Dataset.from_list(rows)
    callback = StrideCallback(tmp_path / "run", dataset=data, projections=512)
    model = tiny_nanochat(len(tokenizer), width=32)
    settings = {"max_steps": 60, "per_device_train_batch_size": 5, "learning_rate": 3e-3}
    make_trainer(tmp_path, tokenizer, data, callback, model, **settings).train()
    built = functools.partial(
        api.build_index_of_run, tmp_path / "run", out=tmp_path / "run.stride",
        options=BuildOptions(n_subsets=8, degree=2),
    )  # fmt: skip
    index = built()
    gathered = GatheredProjections.load(tmp_path / "run" / GATHERED)
    document = np.asarray(index.array("corpus/chunk_document"))
    assert np.array_equal(index.array("run/projection_codes"), gathered.codes[document])
    with pytest.raises(IndexExists):
        built()
    shutil.rmtree(tmp_path / "run.stride" / "run")  # as where a kill falls between the two
    assert not Index.open(tmp_path / "run.stride").has("run") and built().has("run")
    assert not verify(tmp_path / "run.stride")

    api.train(tmp_path / "run.stride", ClosedOptions(project=0, residuals="final"))
    session = Session.open(tmp_path / "run.stride")
    assert isinstance(session.operators.finding, GatheredProjections)
    words = planted["text"].split()
    prompt, response = " ".join(words[:3]), " " + " ".join(words[3:])
    query = session.build([{"prompt": prompt, "response": response}], QueryOptions())[0]
    assert isinstance(query, Query)
    asked = QuerySet([query.ids], [query.weights], ["it"]).batch(np.arange(1))
    found = projected_influences(session.steered, [asked], index.n_chunks)
    assert found is not None and document[np.argmax(found.values[0])] == len(documents)
    answer = session.query(prompt, QueryOptions(read=5, stability=False), response=response)
    assert answer.supporters[0].document == len(documents)
    assert answer.recall is None and answer.read == 5
    api.train(tmp_path / "run.stride", ClosedOptions(project=64, residuals="final"), overwrite=True)
    assert not isinstance(Session.open(tmp_path / "run.stride").operators.finding, GatheredProjections)

    other = copy.copy(gathered)
    with pytest.raises(ModelError, match="holds no projections"):
        (tmp_path / "run" / GATHERED).write_bytes(b"nothing")
        GatheredProjections.load(tmp_path / "run" / GATHERED)
    object.__setattr__(other, "scale", gathered.scale[1:])
    with pytest.raises(ValueError, match="other shapes"):
        GatheredProjections.read(other.arrays(), gathered.record())


@pytest.mark.parametrize("matrices", [1, 2])
def test_a_querys_numbers_are_those_of_its_gradient_in_the_weights(matrices: int) -> None:
    """⟨Qᵀ G P, query's numbers⟩ is the product of gate gradients, summed over a layer's matrices, where P and
    Q span everything."""
    from stride_cli.data.batches import pad_batch
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.operators.gradients import gate_gradients
    from stride_cli.operators.layer_spaces import LinearMatrixSpace, layer_widths
    from stride_cli.operators.steered_model import SteeredModel

    model = CausalLM(random_model("Llama"))
    linear = model.linear_layers("all")
    names = {module: name for name, module in model.model.named_modules()}
    generator = torch.Generator().manual_seed(0)
    at = [number for number in range(len(linear)) for _ in range(matrices)]
    V = [torch.randn(3, layer_widths(linear[j])[0], generator=generator) for j in at]
    U = [torch.randn(layer_widths(linear[j])[1], 4, generator=generator) for j in at]
    steered = SteeredModel(model, [LinearMatrixSpace.from_bases(V, U, at)], 0)
    random = np.random.default_rng(0)
    rows = [random.integers(3, 60, 9) for _ in range(3)]
    batch = pad_batch(np.arange(3), rows, [np.array([0.0] + [1.0] * 8)] * 3)
    gates, _, _ = gate_gradients(steered, batch)
    widths = tuple(layer_widths(layer) for layer in linear)
    layers = ProjectedLayers(tuple(names[layer] for layer in linear), widths, 1 << 10, 0)
    found = layer_numbers(layers, gates, steered)
    # P and Q are square and orthogonal: numbers of U M V are as long as U M V is
    each = [
        U[j] @ gates[0][:, part].unflatten(1, (4, 3)) @ V[j]
        for j, part in enumerate(steered.spaces[0].parts())
    ]
    whole = [sum(each[start : start + matrices]) for start in range(0, len(each), matrices)]
    products = sum(torch.einsum("aij,bij->ab", one, one) for one in whole).numpy()
    np.testing.assert_allclose(found @ found.T, products, rtol=1e-3)
