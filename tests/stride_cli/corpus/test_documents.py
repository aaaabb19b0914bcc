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
        assert a.digest(b"\0" * 32) != a.digest()
