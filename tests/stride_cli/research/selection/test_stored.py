"""Documents read back from an index are those that went into it."""

from __future__ import annotations

import json

import pytest

from stride_cli.errors import CorpusError
from stride_cli.research.selection.stored import stored_documents

RECORDS = [
    {"id": "t", "text": "one line of text\nand another one"},
    {"id": "p", "prompt": "what is\nasked here", "response": "an answer\nof two lines"},
    {"id": "e", "prompt": "", "response": "an answer to nothing"},
    {"id": "l", "prompt": "words " * 30, "response": "many words " * 20},
    {
        "id": "m",
        "messages": [
            {"role": "user", "content": "hello there"},
            {"role": "assistant", "content": "good day"},
            {"role": "user", "content": "and now"},
            {"role": "assistant", "content": "good night"},
        ],
    },
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from stride_cli.corpus.build import IndexedModel, build_index
    from stride_cli.corpus.options import BuildOptions

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate(["<s>", *alphabet])}
    letters = Tokenizer(models.BPE(vocabulary, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>")
    folder = tmp_path_factory.mktemp("stored")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")

    def make(**options):
        index = build_index(
            [str(corpus)],
            IndexedModel(tokenizer, tokenizer_fingerprint="1" * 64, fingerprint="0" * 64),
            folder / f"{len(list(folder.iterdir()))}.stride",
            BuildOptions(block_size=64, n_subsets=4, degree=2, **options),
        )
        return index, tokenizer, corpus

    return make


def test_every_form_comes_back(build) -> None:
    index, tokenizer, corpus = build()
    assert list(stored_documents(index, tokenizer, range(5))) == RECORDS
    assert [d["id"] for d in stored_documents(index, tokenizer, [3, 0])] == ["l", "t"]
    moved = corpus.rename(corpus.with_suffix(".moved"))
    try:
        assert len(list(stored_documents(index, tokenizer, range(4)))) == 4  # the source is not needed
        with pytest.raises(CorpusError, match="'m' is a conversation"):
            list(stored_documents(index, tokenizer, [4]))
    finally:
        moved.rename(corpus)
