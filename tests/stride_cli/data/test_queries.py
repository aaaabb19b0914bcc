"""Queries: what is scored, what is refused; a byte-level tokenizer on the tiny model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from stride_cli.corpus.forms import Form
from stride_cli.data.queries import build_queries, form_of, pooled
from stride_cli.data.query_files import as_query
from stride_cli.data.query_set import QuerySet
from stride_cli.errors import QueryError
from stride_cli.models.length_kinds import LengthKinds


class Letters:
    """One token a character; token 0 begins a text."""

    bos_token_id, eos_token_id = 0, None
    chat_template = None

    all_special_ids, all_special_tokens = (), ()

    def __call__(self, texts: list[str], **_) -> dict:
        return {"input_ids": [[ord(letter) % 60 + 1 for letter in text] for text in texts]}

    def decode(self, ids, **_) -> str:
        return "x" * len(ids)


class Speller(Letters):
    """Decodes what it encoded."""

    def __call__(self, texts: list[str], **_) -> dict:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def decode(self, ids, **_) -> str:
        return "".join(chr(token) for token in ids)


@pytest.fixture
def model():
    def generate_each(prompts, count):
        return [[7] * min(count, 5, 20 - len(ids)) for ids in prompts]

    return SimpleNamespace(tokenizer=Letters(), table=None, context_length=20, generate_each=generate_each)


def test_only_the_response_is_scored(model) -> None:
    query = as_query(model, "abc", response="de")
    assert query.response == " de" and not query.generated
    assert query.ids[0] == 0 and len(query.ids) == 1 + 3 + 3
    np.testing.assert_array_equal(query.weights, [0, 0, 0, 0, 1, 1, 1])


def test_without_a_response_the_model_continues(model) -> None:
    query = as_query(model, "abc", max_new_tokens=3)
    assert query.generated and query.weights.sum() == 3 and list(query.ids[-3:]) == [7, 7, 7]
    assert query.cut and not as_query(model, "abc", max_new_tokens=9).cut  # it ends after five tokens
    model.tokenizer.decode = lambda ids, **_: "He said: “No.” "
    assert not as_query(model, "abc", max_new_tokens=3).cut  # so does the sentence


def test_a_span_scores_its_own_tokens(model) -> None:
    model.tokenizer = Speller()
    query = as_query(model, "in", response="1789, when", span="1789")
    assert query.response == " 1789, when"
    scored = "".join(chr(token) for token, weight in zip(query.ids, query.weights, strict=True) if weight)
    assert scored == "1789"


def test_the_context_is_filled_but_not_overrun(model) -> None:
    assert len(as_query(model, "a" * 17, max_new_tokens=16).ids) <= 20
    for prompt, response in (("a" * 20, None), ("a" * 10, "b" * 12)):
        with pytest.raises(QueryError, match="context is 20 tokens"):
            as_query(model, prompt, response=response)


def workspace_of(model, counts: dict | None, *, table=None):
    return SimpleNamespace(
        model=SimpleNamespace(tokenizer=model.tokenizer, table=table),
        index=SimpleNamespace(attributes={} if counts is None else {"counts": counts}),
    )


@pytest.mark.parametrize(
    ("counts", "chat", "template", "form"),
    [
        ({"documents": 9, "conversations": 5}, None, "…", "chat"),
        ({"documents": 9, "conversations": 5}, None, None, "lines"),
        ({"documents": 9, "conversations": 5}, False, "…", "none"),
        ({"documents": 9, "conversations": 4}, None, "…", "none"),
        ({"documents": 9, "conversations": 4}, True, "…", "chat"),
        ({"documents": 9}, None, "…", "none"),  # an index of 0.2, which did not count them
        ({"documents": 9, "conversations": "many"}, None, "…", "none"),
        (None, None, "…", "none"),
    ],
)
def test_prompts_are_put_as_the_corpus_is(model, counts, chat, template, form) -> None:
    model.tokenizer.chat_template = template
    assert form_of(workspace_of(model, counts), chat).label == form
    assert form_of(workspace_of(model, counts, table=1), chat).label == "none"


@pytest.mark.parametrize("form", [Form("chat"), Form(between="\n"), Form()])
def test_a_query_is_tokenised_as_its_document_is(form: Form) -> None:
    from stride_cli.attribution.calibration import cut_in_two
    from stride_cli.corpus.chunking import DocumentTokenizer
    from stride_cli.corpus.documents import Document
    from stride_cli.models.language.bpe import train_bpe

    tokenizer = train_bpe(
        ["What is it? It is a lamp, and no oil is in it."], vocab_size=300, context_length=64
    )
    asker = SimpleNamespace(
        tokenizer=tokenizer, table=None, context_length=64, generate_each=lambda prompts, count: []
    )
    document = Document("d", prompt="What is it?", response="It is a lamp.")
    (encoded,) = DocumentTokenizer(tokenizer, block_size=64, form=form).encode_batch([document])
    query = as_query(asker, "What is it?", response="It is a lamp.", form=form)
    ends = int(form.name == "chat")  # the document says that the answer ends
    np.testing.assert_array_equal(query.ids, encoded.tokens[: len(encoded.tokens) - ends])
    np.testing.assert_array_equal(query.weights, encoded.scored[: len(query.ids)])
    assert query.form == form and query.response.strip() == "It is a lamp."
    # null prompts begin as a document's own prompt does, and scales are fitted on its response
    chunks = SimpleNamespace(chunk=lambda row: (encoded.tokens, encoded.scored.astype(np.float32)))
    workspace = SimpleNamespace(model=asker, chunks=chunks)
    assert cut_in_two(workspace, 0, form, np.random.default_rng(0)) == ("What is it?", "It is a lamp.")


def compare(model, response: str, instead: str):
    asked = [{"prompt": "in", "response": response, "instead": instead}]
    (found,) = build_queries(model, asked)
    return found


def test_two_responses_part_at_a_token(model) -> None:
    model.tokenizer = Speller()
    query = compare(model, "1789", "1799")
    assert (query.comparison.token, query.comparison.other) == ("8", "9")
    own, other = query.parts
    assert (own.share, other.share) == (1.0, -1.0)
    assert "".join(map(chr, own.ids[1:])) == "in 178" and "".join(map(chr, other.ids[1:])) == "in 179"
    assert own.weights.tolist() == other.weights.tolist() == [0.0] * 6 + [1.0]
    assert query.weights.sum() == 1 and query.response == " 1789"


def test_one_that_is_the_beginning_of_the_other_ends_there(model) -> None:
    model.tokenizer = Speller()
    model.tokenizer.eos_token_id = 3
    query = compare(model, "17", "1789")
    assert [int(part.ids[-1]) for part in query.parts] == [3, ord("8")]
    assert len(query.ids) == len(query.parts[0].ids)
    model.tokenizer.eos_token_id = None
    assert isinstance(compare(model, "17", "1789"), QueryError)


def test_queries_as_one_share_its_loss(model) -> None:
    model.tokenizer = Speller()
    first, second = as_query(model, "a", response="bc"), compare(model, "1789", "1799")
    one = pooled([first, second])
    assert [part.share for part in one.parts] == [0.5, 0.5, -0.5]
    assert one.count == 2 and one.prompt == "a\nin" and len(one.ids) == len(first.ids) + len(second.ids)
    batch = one.batch()
    assert batch.parts.tolist() == [[0.5, 0.5, -0.5]]
    assert batch.losses_of_queries(np.array([1.0, 3.0, 100.0])).tolist() == [2.0]
    assert batch.of_queries(np.array([[1.0], [3.0], [4.0]])).tolist() == [[0.0]]
    # retrained losses are those of tokens that count alike, whoever asks
    weighed, plain = (
        QuerySet.of_parts(each)[0] for each in (replace(first, weights=first.weights / 2), first)
    )
    assert weighed.fingerprint() == plain.fingerprint()
    # of a model that would read the shorter otherwise beside the longer
    boundary = min(len(first.ids), len(second.ids))
    with pytest.raises(QueryError, match=f"positions are others beyond {boundary}"):
        pooled([first, second], LengthKinds(boundary, each=False))
