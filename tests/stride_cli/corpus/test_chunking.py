from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.corpus.chunking import Chunk, DocumentTokenizer, Encoded
from stride_cli.corpus.documents import Document
from stride_cli.errors import CorpusError

words = st.sampled_from(
    ["user", "assistant", "system", "Paris", "naïve", "漢字", "🙂", "<|im_end|>", "\n", " "]
)
contents = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40),
    st.lists(words, min_size=1, max_size=12).map(" ".join),
)


def encode(tokenizer: Any, *documents: Document, block_size: int = 512) -> list[Encoded]:
    return DocumentTokenizer(tokenizer, block_size=block_size).encode_batch(documents)


def check_chunks(encoded: Encoded, chunks: list[Chunk], block_size: int) -> None:
    """What every cut must keep, whatever the document."""
    tokens = [chunk.tokens for chunk in chunks]
    np.testing.assert_array_equal(np.concatenate([*tokens, np.zeros(0, np.int32)]), encoded.tokens)
    assert [len(part) for part in tokens[:-1]] == [block_size] * (len(chunks) - 1)
    for number, chunk in enumerate(chunks):
        length = len(chunk.tokens)
        assert 1 <= length <= block_size
        assert 1 <= chunk.loss_start <= length
        mask = np.zeros(length, bool)
        mask[chunk.loss_start :] = True
        if chunk.loss_mask is not None:
            assert not np.array_equal(mask, chunk.loss_mask)  # else it were not needed
            mask = chunk.loss_mask.astype(bool)
            assert mask.argmax() == chunk.loss_start
        expected = encoded.scored[number * block_size :][:length].copy()
        expected[0] = False
        np.testing.assert_array_equal(mask, expected)
        assert chunk.n_scored == expected.sum()


@settings(max_examples=60, deadline=None)
@given(st.lists(contents, min_size=1, max_size=5), st.integers(2, 9), st.booleans())
def test_chunks_of_texts_are_the_tokens_of_the_tokenizer(
    make_tokenizer: Any, texts: list[str], block_size: int, bos: bool
) -> None:
    tokenizer = make_tokenizer(bos=bos)
    chunker = DocumentTokenizer(tokenizer, block_size=block_size)
    bare = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for ids, encoded in zip(bare, chunker.encode_batch([Document("", text=t) for t in texts]), strict=True):
        start = [tokenizer.bos_token_id] if bos and ids[:1] != [tokenizer.bos_token_id] else []
        assert encoded.tokens.tolist() == start + ids
        assert encoded.tokens.dtype == np.int32
        np.testing.assert_array_equal(encoded.scored[1:], True)
        assert not encoded.scored[:1].any()
        check_chunks(encoded, chunker.chunks(encoded), block_size)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=5),
    st.integers(2, 40),
    st.booleans(),
)
def test_conversations_score_the_answers(
    make_tokenizer: Any, chatml: str, turns: list[tuple[str, str]], block_size: int, template: bool
) -> None:
    """Against masks from the character offsets that the tokenizer reports for the rendered text."""
    tokenizer = make_tokenizer(chat_template=chatml if template else None)
    messages = tuple({"role": role, "content": content} for role, content in turns)
    chunker = DocumentTokenizer(tokenizer, block_size=block_size)
    (encoded,) = chunker.encode_batch([Document("", messages=messages)])
    check_chunks(encoded, chunker.chunks(encoded), block_size)
    if template:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        pieces = [(f"<|im_start|>{role}\n", content, "<|im_end|>\n") for role, content in turns]
    else:
        pieces = [("\n" if number else "", content, "") for number, (_, content) in enumerate(turns)]
        text = "".join(before + content for before, content, _ in pieces)
    of_answer = np.zeros(len(text) + 1, bool)
    ends = set()
    place = 0
    for (role, content), (before, _, after) in zip(turns, pieces, strict=True):
        begin = place + len(before)
        place = begin + len(content) + len(after)
        if role == "assistant":
            of_answer[begin : begin + len(content)] = True
            ends.add(begin + len(content))
    bare = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special = {0, 1, 2, 3}
    expected = [
        bool(of_answer[a:b].any()) or (a in ends and token in special)
        for token, (a, b) in zip(bare["input_ids"][0], bare["offset_mapping"][0], strict=True)
    ]
    tokens = bare["input_ids"][0]
    if tokens[:1] != [tokenizer.bos_token_id]:
        tokens, expected = [tokenizer.bos_token_id, *tokens], [False, *expected]
    expected[0] = False
    length = len(encoded.tokens)
    assert encoded.tokens.tolist() == tokens[:length]
    assert encoded.scored.tolist() == expected[:length]
    assert not any(expected[length:])


def test_one_bos_at_most(make_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    bos = tokenizer.bos_token_id
    # one that adds its BOS itself, and a text that begins with one
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    for text in ("Paris", "<s>Paris"):
        (encoded,) = encode(tokenizer, Document("", text=text))
        assert encoded.tokens.tolist().count(bos) == 1 and encoded.tokens[0] == bos


RAW = {"bos": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "trimming": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n{% endfor %}",
    "counting": "{% for m in messages %}[{{ m['role'] }} {{ m['content'] | length }}]{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant {% endif %}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "prompt", "response", "text", "scored"),
    [
        (None, "What is it?", "Paris, naïve 🙂", "<s>What is it?\nParis, naïve 🙂", "Paris, naïve 🙂"),
        # the line break after the last turn is left out
        ("chatml", "assistant", "user\n", "<s><|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n"
         "user\n<|im_end|>", "user\n<|im_end|>"),
        ("trimming", " What ", "\n Paris is\n", "<s>[user]What\n[assistant]Paris is", "Paris is"),
        # pieces that depend on the contents
        ("counting", "Paris", "Paris", "<s>[user 5]Paris[assistant 5]Paris", "Paris"),
        ("bos", "Water", " boils", "<s>Water boils", " boils"),
    ],
)  # fmt: skip
def test_only_the_answer_of_a_pair_is_scored(
    make_tokenizer: Any, chatml: str, template: str | None, prompt: str, response: str, text: str, scored: str
) -> None:
    tokenizer = make_tokenizer(chat_template=chatml if template == "chatml" else RAW.get(template or ""))
    (encoded,) = encode(tokenizer, Document("", prompt=prompt, response=response))
    assert tokenizer.decode(encoded.tokens) == text
    assert tokenizer.decode(encoded.tokens[encoded.scored]) == scored


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "rewrites the answers of"),
        ("{{ raise_exception('roles must alternate') }}", "refuses document 'd': roles must alternate"),
    ],
)
def test_templates_that_cannot_be_followed_are_refused(
    make_tokenizer: Any, template: str, message: str
) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(CorpusError, match=rf"c\.jsonl:3: .*{message}"):
        encode(tokenizer, Document("d", prompt="What", response="Paris", source="c.jsonl", line=3))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            contents.map(lambda text: {"text": text}),
            st.just({"text": "\u200b"}),
            st.lists(st.tuples(st.sampled_from(["user", "assistant"]), contents), min_size=1, max_size=4).map(
                lambda turns: {"messages": tuple({"role": r, "content": c} for r, c in turns)}
            ),
        ),
        max_size=6,
    ),
    st.integers(2, 9),
    st.booleans(),
)
def test_a_batch_is_cut_as_its_documents_are(
    make_tokenizer: Any, chatml: str, records: list[dict[str, Any]], block_size: int, bos: bool
) -> None:
    chunker = DocumentTokenizer(make_tokenizer(bos=bos, chat_template=chatml), block_size=block_size)
    batch = chunker.encode_batch([Document("", **record) for record in records])
    batch += [Encoded(np.zeros(0, np.int32), np.zeros(0, bool))]
    blocks = chunker._cut(batch)
    pieces = [chunker.chunks(encoded) for encoded in batch]
    chunks = [chunk for each in pieces for chunk in each]
    assert blocks.tokens.dtype == chunker.token_dtype
    assert blocks.tokens.tolist() == [int(token) for chunk in chunks for token in chunk.tokens]
    assert blocks.lengths.tolist() == [len(chunk.tokens) for chunk in chunks]
    assert blocks.loss_starts.tolist() == [chunk.loss_start for chunk in chunks]
    masks = {n: chunk.loss_mask for n, chunk in enumerate(chunks) if chunk.loss_mask is not None}
    assert masks.keys() == blocks.loss_masks.keys()
    assert all(np.array_equal(masks[number], blocks.loss_masks[number]) for number in masks)
    assert blocks.chunks_of.tolist() == [len(each) for each in pieces]
    assert blocks.scored_of.tolist() == [sum(chunk.n_scored for chunk in each) for each in pieces]
