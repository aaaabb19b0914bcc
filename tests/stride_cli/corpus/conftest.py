"""A small byte-level BPE tokenizer, trained here, with and without a chat template or a BOS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAINING_TEXT = [
    "The French Revolution began in 1789 with the convocation of the Estates General.",
    "Water boils at one hundred degrees and freezes at zero, as everyone knows.",
    "user\nassistant\nsystem\nWhat is the capital of France? Paris is the capital of France.",
    "Ünïcödé text, with naïve café and 漢字 and emoji 🙂🙂.",
] * 4

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def backend_json() -> str:
    """A `tokenizers` tokenizer trained on `TRAINING_TEXT`, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def make_tokenizer(backend_json: str) -> Callable[..., Any]:
    """`make_tokenizer(bos=True, chat_template=None)`: a transformers tokenizer around it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    def make(*, bos: bool = True, chat_template: str | None = None) -> Any:
        special = {"bos_token": "<s>"} if bos else {}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend_json),
            eos_token="</s>",
            model_max_length=16,  # documents longer than the context must not bring warnings
            **special,
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """`write_jsonl(records, name="corpus.jsonl")`: its path, as the user would give it."""

    def write(records: list[Any], name: str = "corpus.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write
