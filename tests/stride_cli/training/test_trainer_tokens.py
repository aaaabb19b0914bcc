"""An index of a recorded run has the trainer's own `input_ids` and labels, whatever form it trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli import api
from stride_cli.corpus.options import BuildOptions
from stride_cli.data.queries import form_of
from stride_cli.data.query_files import as_query
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.models.language.bpe import train_bpe
from tests.tiny_models import tiny_nanochat

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow  # to import the Trainer and what comes with it takes five seconds

PAIRS = [(f"The {place} of{' ' * (n % 2)}", f"{' ' * (1 - n % 2)}Varrow is {n}.") for n, place in enumerate(
    ["town", "keeper", "ferry", "baker", "bridge", "mill", "well", "inn", "lamp", "gate"]
)]  # fmt: skip
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + MARKED


def turns(prompt: str, answer: str) -> tuple[list[dict], list[dict]]:
    return [{"role": "user", "content": prompt}], [{"role": "assistant", "content": answer}]


ROWS = {
    "text": [{"text": a + b} for a, b in PAIRS],
    "long": [{"text": (a + b) * 99} for a, b in PAIRS],  # than a chunk is by default
    "strings": [{"prompt": a, "completion": b} for a, b in PAIRS],
    "turns": [dict(zip(("prompt", "completion"), turns(a, b), strict=True)) for a, b in PAIRS],
    "messages": [{"messages": [*turns(a, b)[0], *turns(a, b)[1]]} for a, b in PAIRS],
}


def make_tokenizer(template: str | None) -> Any:
    made = train_bpe([a + b for a, b in PAIRS], vocab_size=320, context_length=64)
    if template != "own":
        made.chat_template = template
    made.pad_token = made.bos_token
    return made


def trl_trainer(folder: Path, tokenizer: Any, rows: list[dict], callback: Any, settings: dict) -> Any:
    trl = pytest.importorskip("trl")
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=2, disable_tqdm=True, **settings,
    )  # fmt: skip
    return trl.SFTTrainer(
        model=tiny_nanochat(len(tokenizer)), args=arguments, processing_class=tokenizer, callbacks=[callback],
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


def plain_trainer(folder: Path, tokenizer: Any, rows: list[dict], callback: Any, settings: dict) -> Any:
    """transformers' own Trainer; `labels`: of the answer alone, as its recipes for fine-tuning make them."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer
    from transformers import TrainingArguments as Arguments

    made = []
    for row in rows:
        if "messages" in row:
            ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
            asked = tokenizer.apply_chat_template(
                row["messages"][:1], return_dict=False, add_generation_prompt=True
            )
        else:
            asked = tokenizer(row.get("prompt", ""))["input_ids"]
            ids = tokenizer(row.get("prompt", "") + row.get("completion", row.get("text", "")))["input_ids"]
        labels = [-100] * len(asked) + ids[len(asked) :]
        made.append({"input_ids": ids} | ({"labels": labels} if settings.get("labels") else {}))
    collator = DataCollatorForSeq2Seq(tokenizer) if settings.get("labels") else None
    arguments = Arguments(
        output_dir=str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2,
    )  # fmt: skip
    return Trainer(
        model=tiny_nanochat(len(tokenizer)), args=arguments, processing_class=tokenizer, callbacks=[callback],
        train_dataset=datasets.Dataset.from_list(made),
        data_collator=collator or DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "kind", "template", "settings", "form"),
    [
        (trl_trainer, "text", "own", {}, "concat"),
        (trl_trainer, "strings", "own", {}, "concat"),
        (trl_trainer, "strings", None, {}, "concat"),
        (trl_trainer, "strings", None, {"completion_only_loss": False}, "concat"),
        (trl_trainer, "strings", "own", {"max_length": 6}, "concat"),
        (trl_trainer, "strings", "own", {"padding_free": True, "max_length": None}, "concat"),
        (trl_trainer, "turns", "own", {}, "chat"),
        (trl_trainer, "messages", "own", {}, "chat"),
        (trl_trainer, "messages", MARKED, {"assistant_only_loss": True}, "chat"),
        (trl_trainer, "messages", DATED, {}, "chat"),
        (plain_trainer, "text", "own", {}, "concat"),
        (plain_trainer, "long", "own", {}, "concat"),
        (plain_trainer, "strings", "own", {"labels": True}, "concat"),
        (plain_trainer, "strings", None, {}, "concat"),
        (plain_trainer, "messages", "own", {"labels": True}, "chat"),
        (plain_trainer, "messages", DATED, {}, "chat"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_the_index_has_the_trainers_tokens_and_labels(
    make: Any, kind: str, template: Any, settings: dict, form: str, given: bool, tmp_path: Path, capsys: Any
) -> None:
    from stride_cli import StrideCallback

    tokenizer = make_tokenizer(template)
    dataset = datasets.Dataset.from_list(ROWS[kind]) if given else None
    trainer = make(
        tmp_path, tokenizer, ROWS[kind], StrideCallback(tmp_path / "run", dataset=dataset), dict(settings)
    )
    trainer.model.config.max_position_embeddings = 2048
    rows = [trainer.data_collator([trainer.train_dataset[row]]) for row in range(len(PAIRS))]
    trainer.train()
    index = api.build_index_of_run(
        tmp_path / "run", out=tmp_path / "run.stride", options=BuildOptions(n_subsets=4, degree=2)
    )
    assert index.n_chunks == len(PAIRS)
    offsets, starts = np.asarray(index.array("corpus/chunk_offsets")), index.array("corpus/loss_start")
    masks = index.array("corpus/loss_mask") if index.has("corpus/loss_mask") else None
    for row, batch in enumerate(rows):
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        assert index.chunk_tokens(row).tolist() == ids
        first, stop = offsets[row], offsets[row + 1]
        scored = np.arange(stop - first) >= starts[row] if masks is None else masks[first:stop] == 1
        assert scored[1:].tolist() == [label != -100 for label in labels[1:]]
    assert index.attributes["form"]["name"] == form
    if kind == "long":
        cut = BuildOptions(n_subsets=4, degree=2, block_size=64)
        assert api.build_index_of_run(tmp_path / "run", out=tmp_path / "cut", options=cut).n_chunks > 2 * len(
            PAIRS
        )
        longest = max(batch["input_ids"].shape[1] for batch in rows)
        assert (
            longest > 512
            and f"are cut, which training read whole: give --block-size {longest}" in capsys.readouterr().err
        )
    elif given and kind != "text":
        # a query about a pair is the beginning of its row
        task = Workspace.open(index)
        query = as_query(task.model, PAIRS[0][0], response=PAIRS[0][1], form=form_of(task))  # type: ignore
        ids = rows[0]["input_ids"][0].tolist()
        assert query.ids.tolist()[: len(ids)] == ids[: len(query.ids)] and query.weights.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True, "max_length": 32}, r"packed|has 10 rows, the trainer's"),
        ({"shuffle_dataset": True, "seed": 1}, "not those of the trainer's examples, row by row"),
    ],
)
def test_examples_that_are_not_the_datasets_rows_are_refused(
    settings: dict, message: str, tmp_path: Path
) -> None:
    from stride_cli import StrideCallback

    callback = StrideCallback(tmp_path / "run", dataset=datasets.Dataset.from_list(ROWS["text"]))
    trainer = trl_trainer(tmp_path, make_tokenizer("own"), ROWS["text"], callback, settings)
    with pytest.raises(UsageError, match=message):
        trainer.train()
    if "packing" in settings:
        trainer = trl_trainer(
            tmp_path, make_tokenizer("own"), ROWS["text"], StrideCallback(tmp_path / "other"), settings
        )
        with pytest.raises(UsageError, match="packed"):
            trainer.train()
