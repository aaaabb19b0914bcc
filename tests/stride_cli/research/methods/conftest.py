"""A small corpus of sentences with the arrays that an index would hold, a word tokenizer and a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

_WORDS = (
    "the river runs north to old stone mill and past one quiet village where bread is baked each morning "
    "before light while wolves sleep in deep snow under pines whose roots hold cold mountain soil"
)
WORDS = _WORDS.split()


class MemoryIndex:
    """The arrays and attributes of an index that `Workspace` reads, in memory."""

    def __init__(self, chunks: Sequence[Sequence[int] | np.ndarray], *, kind: str = "language") -> None:
        lengths = [len(chunk) for chunk in chunks]
        self.path = "memory"
        self.attributes = {"config": {"kind": kind}}
        self.arrays = {
            "corpus/tokens": np.array([token for chunk in chunks for token in chunk], np.uint16),
            "corpus/chunk_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "corpus/loss_start": np.ones(len(chunks), np.int32),
        }

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def has(self, name: str) -> bool:
        return name in self.arrays


@pytest.fixture(scope="session")
def word_tokenizer():
    """One token a word, lower case."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[UNK]", "?", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="session")
def model(word_tokenizer):
    """NanoChat, 2 layers, d = 16, with weights large enough that states differ."""
    from stride_cli.models.language.causal_lm import CausalLM
    from tests.tiny_models import tiny_nanochat

    return CausalLM(tiny_nanochat(len(word_tokenizer)), word_tokenizer)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """50 distinct sentences of 4 to 20 words."""
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS, random.integers(4, 21))) for _ in range(50)]


@pytest.fixture(scope="session")
def make_index() -> Callable:
    """A function from chunks of token ids to an index."""
    return MemoryIndex


@pytest.fixture(scope="session")
def make_task(model, word_tokenizer) -> Callable:
    """A function from texts to a task."""
    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.workspace import Workspace

    def make(texts: Sequence[str], *, kind: str = "language", seed: int = 3):
        chunks = [word_tokenizer.encode(text, add_special_tokens=False) for text in texts]
        index = MemoryIndex(chunks, kind=kind)
        return Workspace(index, model, ChunkReader(index), seed)

    return make


@pytest.fixture(scope="session")
def make_queries(word_tokenizer) -> Callable:
    """A function from texts to queries that score every token but the first."""
    from stride_cli.data.query_set import QuerySet

    def make(texts: Sequence[str]):
        ids = [np.array(word_tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        weights = [(np.arange(len(row)) > 0).astype(np.float32) for row in ids]
        return QuerySet(ids, weights, [str(number) for number in range(len(ids))], texts)

    return make


@pytest.fixture(scope="session")
def task(make_task, sentences):
    return make_task(sentences)
