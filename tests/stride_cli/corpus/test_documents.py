from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.documents import Document

texts = st.text(st.characters(codec="utf-8"), max_size=6)
documents = st.one_of(
    st.builds(lambda id, text: Document(id, text=text), texts, texts),
    st.builds(lambda id, a, b: Document(id, prompt=a, response=b), texts, texts, texts),
    st.builds(
        lambda id, turns: Document(id, messages=tuple({"role": r, "content": c} for r, c in turns)),
        texts,
        st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    ),
)


def content(document: Document) -> tuple:
    return (document.id, document.text, document.prompt, document.response, document.messages)


@given(st.lists(documents, max_size=6))
def test_digests_are_equal_where_the_documents_are_and_only_there(some: list[Document]) -> None:
    for a, b in itertools.combinations(some, 2):
        assert (a.digest() == b.digest()) == (content(a) == content(b))


def test_fields_cannot_flow_into_one_another() -> None:
    """The concatenations of these are the same; the documents are not."""
    alike = [
        Document("a", text="b\nc"),
        Document("a\nb", text="c"),
        Document("a", prompt="b", response="c"),
        Document("a", messages=({"role": "b", "content": "c"},)),
        Document("a", prompt="b\nc", response=""),
    ]
    assert len({document.digest() for document in alike}) == len(alike)


def test_where_it_was_read_does_not_matter() -> None:
    assert Document("a", text="b", source="x", line=1).digest() == Document("a", text="b").digest()
    assert Document("a", text="b").digest(b"\0" * 32) != Document("a", text="b").digest(b"\1" * 32)


def test_plain_text() -> None:
    assert Document("a", text="b").plain_text == "b"
    assert Document("a", prompt="b", response="c").plain_text == "b\nc"
    turns = ({"role": "user", "content": "b"}, {"role": "assistant", "content": "c"})
    assert Document("a", messages=turns).plain_text == "b\nc"
