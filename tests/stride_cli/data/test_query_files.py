"""Queries of files are put to the model as `stride query` puts them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stride_cli.data.queries import form_of
from stride_cli.data.query_files import as_query, read_queries
from stride_cli.errors import QueryError

PAIR = {"prompt": "The French Revolution began in", "response": "1789"}


def written(tmp_path: Path, *rows: dict[str, str]) -> Path:
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), **row}) + "\n" for n, row in enumerate(rows)))
    return path


def corpus_of(task: Any, *, pairs: bool | int) -> Any:
    """The workspace, as if all of its documents, none or so many were pairs of a prompt and a response."""
    attributes = dict(task.index.attributes)
    counts = dict(attributes["counts"])
    counts["conversations"] = pairs * counts["documents"] if isinstance(pairs, bool) else pairs
    index = SimpleNamespace(attributes={**attributes, "counts": counts})
    return SimpleNamespace(model=task.model, index=index)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_response_goes_on_where_the_corpus_has_it_so(
    pairs: bool, task_and_queries: Any, tmp_path: Path
) -> None:
    """Right after its prompt where documents are plain text, else as the pairs of the corpus stand."""
    task = corpus_of(task_and_queries[0], pairs=pairs)
    form = form_of(task)
    assert (form.label == "none") != pairs
    found = read_queries(task, written(tmp_path, PAIR))
    asked = as_query(task.model, PAIR["prompt"], response=PAIR["response"], form=form)
    where = len(asked.ids)  # a document may end in a token that says so
    np.testing.assert_array_equal(found.ids[0][:where], asked.ids)
    np.testing.assert_array_equal(found.weights[0][:where], asked.weights)
    assert len(found.ids[0]) == where or pairs


def test_a_corpus_of_few_pairs_is_asked_as_they_are_where_that_is_said(
    task_and_queries: Any, tmp_path: Path
) -> None:
    """Most of it is plain text, and a leaked problem was trained on as one of its pairs."""
    task, file = corpus_of(task_and_queries[0], pairs=1), written(tmp_path, PAIR)
    alike = read_queries(corpus_of(task_and_queries[0], pairs=True), file)
    plain, asked, unsaid = (read_queries(task, file, chat=chat) for chat in (False, True, None))
    np.testing.assert_array_equal(asked.ids[0], alike.ids[0])
    np.testing.assert_array_equal(plain.ids[0], unsaid.ids[0])
    assert asked.ids[0].tolist() != plain.ids[0].tolist()


def test_a_model_without_a_template_is_asked_on_lines_where_the_corpus_has_pairs(
    task_and_queries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_and_queries[0]
    monkeypatch.setattr(task.model.tokenizer, "chat_template", None)
    some, none = corpus_of(task, pairs=1), corpus_of(task, pairs=False)
    assert [form_of(some, chat).label for chat in (True, False, None)] == ["lines", "none", "none"]
    with pytest.raises(QueryError, match="template"):  # and where it has none, there is nothing to go by
        as_query(task.model, "The French Revolution", response="1789", form=form_of(none, True))
    with pytest.raises(QueryError, match="template"):
        read_queries(none, written(tmp_path, PAIR), chat=True)


def test_texts_and_long_pairs(task_and_queries: Any, tmp_path: Path) -> None:
    task = corpus_of(task_and_queries[0], pairs=False)
    found = read_queries(task, written(tmp_path, {"text": "The French Revolution"}, PAIR))
    assert len(found) == 2 and found.weights[0][1:].all() and not found.weights[1].all()
    long = {"prompt": "The French Revolution began in", "response": "seventeen eighty nine " * 20}
    with pytest.raises(QueryError, match=r"has \d+ tokens|context"):
        read_queries(task, written(tmp_path, long))
