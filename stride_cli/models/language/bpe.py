"""A byte-level BPE tokenizer of a corpus' own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from stride_cli.characters import UNSPACED

BOS = "<|bos|>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (BOS, USER, ASSISTANT, END)
SMALLEST_VOCABULARY = 256 + len(SPECIAL)

# <|end|> is a part of what the assistant says, so that a model trained on answers learns to stop
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_bpe(texts: Iterable[str], *, vocab_size: int, context_length: int) -> Any:
    """Learn merges from texts; every byte has a token, so every text can be written.

    `vocab_size` is at least 260 (256 bytes, 4 special tokens); fewer tokens come out where the texts have no
    more merges. `context_length`, in tokens, is recorded. Token 0 is <|bos|>, put in front of every text; the
    others are <|user|>, <|assistant|> and <|end|> (which ends a sequence), written around prompts and answers
    by the chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend, texts = Tokenizer(models.BPE()), [*texts]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if any(re.search(UNSPACED, text) for text in texts):  # else merges would make one token of a clause
        letters = pre_tokenizers.Split(Regex(UNSPACED), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([letters, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, SMALLEST_VOCABULARY),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
