"""What `StrideCallback` adds to a training by transformers' Trainer: the same with it and without, in turn.

A Llama of random weights learns the demo's corpus. Processor seconds (user and system): of a step, between
the first and the last, checkpoints among them; and of the whole training, with what is written
before and after it. Minima over repeats, and their ratios; and, where other load makes even these uncertain,
what was spent within the callback, as a share of the rest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from stride_cli.output import emit
from tests.benchmarks._machine import machine

DEMO = Path(__file__).parents[2] / "stride_cli" / "demo" / "corpus.jsonl"
_BLOCK = 128


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks callback", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--limit", type=float, default=1.1, help="The ratio of steps that is a failure.")
    given = parser.parse_args(arguments)
    spent: dict[str, list[tuple[float, float, float]]] = {"without": [], "with": []}
    size = 0
    for _ in range(given.repeats):
        for name, found in spent.items():
            with tempfile.TemporaryDirectory() as folder:
                *seconds, size = _train(Path(folder), given, recorded=name == "with")
            found.append((seconds[0], seconds[1], seconds[2]))
    each = {
        name: {
            "step": min(step for step, _, _ in found),
            "whole": min(whole for _, whole, _ in found),
        }
        for name, found in spent.items()
    }
    ratio = {key: each["with"][key] / each["without"][key] for key in ("step", "whole")}
    emit(
        {
            "benchmark": "callback",
            "parameters": size,
            "steps": given.steps,
            "checkpoints": given.checkpoints,
            "repeats": given.repeats,
            "processor_seconds": each,
            "ratio": ratio,
            "spread": {
                name: [min(step for step, _, _ in found), max(step for step, _, _ in found)]
                for name, found in spent.items()
            },
            "within_callback": {
                "seconds": min(own for _, _, own in spent["with"]),
                "share": min(own / (whole - own) for _, whole, own in spent["with"]),
            },
        }
        | machine("torch", "transformers", "accelerate")
    )
    return int(ratio["step"] > given.limit)


def _train(folder: Path, given: argparse.Namespace, *, recorded: bool) -> tuple[float, float, float, int]:
    """Processor seconds of a step, of the whole training, within the callback; and the model's parameters."""
    from transformers import TrainerCallback

    from stride_cli import StrideCallback

    class Clock(TrainerCallback):
        """The first to be told of a step, so that what others do is between two of them."""

        at: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.at.append(time.process_time())

    tokenizer, data = _corpus()
    clock = Clock()
    clock.at = []
    callbacks: list[Any] = [clock]
    own = [0.0]
    if recorded:
        callback = StrideCallback(folder / "run", dataset=data, checkpoints=given.checkpoints)
        for name in ("on_train_begin", "on_epoch_begin", "on_step_end", "on_log", "on_save", "on_train_end"):
            setattr(callback, name, _timed(getattr(callback, name), own))
        callbacks.append(callback)
    trainer = _trainer(folder, given, tokenizer, data, callbacks)
    began = time.process_time()
    trainer.train()
    whole = time.process_time() - began
    return (clock.at[-1] - clock.at[0]) / (len(clock.at) - 1), whole, own[0], trainer.model.num_parameters()


def _corpus() -> tuple[Any, Any]:
    """The demo's documents as a dataset, and a tokenizer of them."""
    from datasets import Dataset

    from stride_cli.models.language.bpe import train_bpe

    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_bpe((each["text"] for each in documents), vocab_size=2048, context_length=_BLOCK)
    tokenizer.pad_token = tokenizer.bos_token
    return tokenizer, Dataset.from_list(
        [{**each, **tokenizer(each["text"], truncation=True, max_length=_BLOCK)} for each in documents]
    )


def _trainer(
    folder: Path, given: argparse.Namespace, tokenizer: Any, data: Any, callbacks: list[Any], **settings: Any
) -> Any:
    """Of a model of random weights."""
    import torch
    from transformers import (
        DataCollatorForLanguageModeling,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=given.width,
            intermediate_size=4 * given.width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=_BLOCK,
        )
    )

    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=given.steps,
            per_device_train_batch_size=8,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            **settings,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=callbacks,
    )


def _timed(call: Any, spent: list[float]) -> Any:
    """The same call, whose processor seconds are added to `spent`."""

    def timed(*values: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return call(*values, **named)
        finally:
            spent[0] += time.process_time() - began

    return timed
