"""Documents: equal where their digests are, and each with an id of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_format.errors import StorageFull
from stride_cli.corpus.documents import Document, SeenIds

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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["a.jsonl", "b.jsonl"])), max_size=200))
def test_ids_seen_are_told_with_their_first_place(lines: list[tuple[int, str]]) -> None:
    """Against a dict."""
    table = SeenIds(["known"])
    first: dict[str, str] = {"known": "the index that is appended to"}
    for line, (number, source) in enumerate([*lines, *lines, (0, "a.jsonl")], 1):
        name = str(number)
        assert table.take(name, source, line) == first.get(name)
        first.setdefault(name, f"{source}:{line}")
        assert table.take(name, source, line) == first[name]  # a source that is named twice
    assert table.take("known", "a.jsonl", 1) == first["known"]


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    seen = SeenIds((f"known {number}" for number in range(20_001)), tmp_path)
    seen._table.execute("PRAGMA max_page_count = 400")
    with pytest.raises(StorageFull) as full:
        for number in range(60_000):
            seen.take(str(number), "corpus.jsonl", number + 1)
    assert str(tmp_path) in str(full.value) and "free some space" in full.value.fix
