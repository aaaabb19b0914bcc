"""The tokenizer writes every text, and comes back from disk the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import Document
from stride_cli.models.language.bpe import SMALLEST_VOCABULARY, train_bpe
from stride_cli.models.language.fingerprints import tokenizer_fingerprint

BPE = train_bpe(["the cat sat on the mat", "the dog sat on the log"] * 3, vocab_size=270, context_length=64)


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = BPE(text, add_special_tokens=False).input_ids
    assert BPE.decode(ids) == text


def test_one_bos_in_front() -> None:
    assert BPE.bos_token_id == 0
    assert BPE("the cat").input_ids[0] == 0
    assert BPE("the cat").input_ids.count(0) == 1
    (encoded,) = DocumentTokenizer(BPE, block_size=64).encode_batch([Document(id="a", text="the cat")])
    assert encoded.tokens.tolist() == BPE("the cat").input_ids


def test_sizes() -> None:
    assert len(BPE) == 270
    assert len(train_bpe(["a"], vocab_size=5000, context_length=8)) == SMALLEST_VOCABULARY
    ids = BPE("the cat sat", add_special_tokens=False).input_ids
    assert len(ids) < len("the cat sat")  # merges were learnt


def test_the_same_texts_give_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["the cat sat on the mat", "the dog sat on the log"] * 3
    again = train_bpe(texts, vocab_size=270, context_length=64)
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(BPE)
    again.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(BPE)
    assert loaded("the cat, é").input_ids == BPE("the cat, é").input_ids


def test_answers_are_scored_and_end() -> None:
    document = Document(id="a", prompt="the cat?", response="the dog")
    (encoded,) = DocumentTokenizer(BPE, block_size=64).encode_batch([document])
    scored = [BPE.convert_ids_to_tokens(int(token)) for token in encoded.tokens[encoded.scored]]
    assert scored[-1] == "<|end|>" == BPE.eos_token
    assert BPE.decode(encoded.tokens[encoded.scored][:-1]) == "the dog"
    text: Any = BPE.decode(encoded.tokens)
    assert text == "<|bos|><|user|>the cat?<|end|><|assistant|>the dog<|end|>"
