"""Queries as people give them, a prompt or a file, for a model of either kind; light to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stride_cli.characters import check_text, one_line, shortened
from stride_cli.corpus.documents import check_messages, content_text, meant_by, type_name
from stride_cli.errors import CorpusError, NumericalError, QueryError, StrideError, UsageError

if TYPE_CHECKING:
    from stride_cli.corpus.forms import Form
    from stride_cli.data.queries import Query
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.classifier.classifier_model import ClassifierModel
    from stride_cli.models.protocol import AttributableModel

PROMPT_TEXTS = ("prompt", "response", "span", "instead")  # of a prompt's record


def prompt_id(record: Mapping[str, Any]) -> str | None:
    """Read the id of a prompt, as those of documents: a string, or a number that is written as one."""
    name = record.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    if name is not None and not isinstance(name, str):
        raise QueryError(f"'id' is {type_name(name)} (expected a string or an integer)", fix='{"id": "a", …}')
    if name is not None:
        check_text(name, "'id'")
    return name


def prompt_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a record asks: "prompt", or "messages" in its place, and perhaps the other `PROMPT_TEXTS`.

    Raises
    ------
    QueryError      there is no prompt, a value of another type, a key that looks like one that is not there
    """
    found = {key: record[key] for key in PROMPT_TEXTS if record.get(key) is not None}
    for key in record:
        meant = None if key in (*PROMPT_TEXTS, "id", "messages") else meant_by(key, PROMPT_TEXTS)
        if meant and meant not in record:
            raise QueryError(
                f"there is no key {shortened(repr(one_line(key)), 60)} (is '{meant}' meant?)",
                fix=f"call it '{meant}', or leave it out",
            )
    if "prompt" not in found and record.get("messages") is not None:
        try:
            messages = check_messages(record["messages"], "prompt", "messages")
        except CorpusError as error:
            raise QueryError(error.message, fix='{"messages": [{"role": "user", "content": "…"}]}') from None
        found |= {"messages": list(messages), "prompt": "\n".join(map(content_text, messages))}
    if "prompt" not in found:
        keys = one_line(", ".join(sorted(record)))
        raise QueryError(
            f"there is no 'prompt' (found {shortened(keys, 200) or 'nothing'})", fix='{"prompt": "…"}'
        )
    for key in found.keys() - {"messages"}:
        if not isinstance(found[key], str):
            raise QueryError(f"'{key}' is {type_name(found[key])} (expected a string)", fix='{"prompt": "…"}')
        check_text(found[key], f"'{key}'")
    return found


def read_queries(
    workspace: Workspace, path: str | Path, *, number_ids: bool = False, chat: bool | None = None
) -> QuerySet:
    """Queries of a file: of documents for a language model, of examples (or ``held-out``) for a classifier.

    `number_ids`: those for a language model are called 0, 1, …, and need no ids. `chat`: how their prompts
    are put to it, see `queries.form_of`.

    Raises
    ------
    CorpusError, QueryError, UsageError      see `read_texts` and `example_queries.read_examples`; `chat` of a
        classifier, or without a template where the corpus has no prompts with responses
    """
    model: Any = workspace.model
    if model.table is not None:
        from stride_cli.data.example_queries import read_examples
        from stride_cli.models.kinds import refuse_classifier

        if chat is not None:
            refuse_classifier(workspace.index, "--chat is about prompts", fix="leave --chat out")
        return read_examples(model, path)
    from stride_cli.data.queries import check_template, form_of

    block_size, form = int(workspace.index.attributes["block_size"]), form_of(workspace, chat)
    if form.name == "chat":
        check_template(model)
    return read_texts(model, path, block_size=block_size, number_ids=number_ids, form=form)


def as_query(
    model: AttributableModel,
    prompt: str | Query,
    *,
    response: str | None = None,
    span: str | None = None,
    instead: str | None = None,
    max_new_tokens: int = 16,
    form: Form | None = None,
) -> Query:
    """The query that a prompt is, or a row of a classifier; see `Session.query`, `form_of`."""
    texts = {"response": response, "span": span, "instead": instead}
    (found,) = as_queries(model, [{"prompt": prompt, **texts}], max_new_tokens=max_new_tokens, form=form)
    if isinstance(found, StrideError):
        raise found
    return found


def as_queries(
    model: AttributableModel,
    asked: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 16,
    form: Form | None = None,
) -> list[Query | StrideError]:
    """`as_query` of several records ("prompt", perhaps "response", "span", "instead"), or its error."""
    from stride_cli.corpus.forms import PLAIN
    from stride_cli.data.queries import Query, build_queries

    own, rows = cast("Any", model), model.table is not None
    found: list[Any] = []
    for each in asked:  # a finished query, an error, or texts
        prompt = each.get("prompt")
        try:
            read = rows or ("prompt" in each and isinstance(each.get("messages"), list | None))
            found.append(prompt if isinstance(prompt, Query) else each if read else prompt_texts(each))
        except QueryError as error:
            found.append(error)
    texts = [each for each in found if not isinstance(each, Query | StrideError)]
    if not rows:
        built = iter(build_queries(own, texts, max_new_tokens=max_new_tokens, form=form or PLAIN))
    else:
        built = iter(_of_rows(own, texts))
    return [each if isinstance(each, Query | StrideError) else next(built) for each in found]


def _of_rows(model: ClassifierModel, asked: Sequence[Mapping[str, Any]]) -> Iterator[Query | StrideError]:
    """Rows of a classifier as queries, of their own label or of another; or the error of one that is none."""
    from stride_cli.data.example_queries import row_query

    for each in asked:
        try:
            yield row_query(model, each["prompt"], label=each.get("response"), instead=each.get("instead"))
        except (QueryError, NumericalError) as error:
            yield error


def read_texts(
    model: AttributableModel,
    path: str | Path,
    *,
    block_size: int,
    number_ids: bool = False,
    form: Form | None = None,
) -> QuerySet:
    """Queries from a file of documents, tokenised as an index tokenises its corpus.

    A ``{"id", "text"}`` is scored whole, a ``{"id", "prompt", "response"}`` on its response, ``{"id",
    "messages"}`` on the assistant's turns. A query is one chunk: longer ones are refused.

    Parameters
    ----------
    path : JSON Lines (also compressed) or Parquet
    block_size : int      most tokens of a query
    number_ids : bool     call them 0, 1, …, whatever ids they have
    form : Form           of prompts with responses, and of messages; default: `Form.choose`

    Raises
    ------
    UsageError       there is no such file
    CorpusError      the file cannot be read, or holds no query; names the line
    QueryError       a query is too long, or has no scored token
    """
    import numpy as np

    from stride_cli.corpus.chunking import DocumentTokenizer, scored_positions
    from stride_cli.corpus.readers import ReadOptions, open_documents
    from stride_cli.data.query_set import QuerySet

    named_file(path)
    cutter = DocumentTokenizer(model.tokenizer, block_size=block_size, form=form)
    stream, _ = open_documents([str(path)], ReadOptions(number_ids=number_ids))
    documents = list(stream)
    if not documents:
        raise CorpusError(f"{path}: there is no query in it", fix='one object a line: {"id": …, "text": …}')
    ids, weights = [], []
    for document, encoded in zip(documents, cutter.encode_batch(documents), strict=True):
        tokens = np.asarray(encoded.tokens, np.int64)
        scored = np.zeros(len(tokens), np.float32)
        for chunk in cutter.chunks(encoded)[:1]:  # more are refused
            scored[scored_positions(chunk)] = 1.0
        if len(tokens) > block_size:
            raise QueryError(
                f"{path}: query '{document.id}' has {len(tokens)} tokens (expected at most {block_size}, a "
                "chunk)",
                fix="shorten it, or split it into several queries",
            )
        ids.append(tokens)
        weights.append(scored)
    return QuerySet(ids, weights, [d.id for d in documents], [d.plain_text for d in documents])


def named_file(path: str | Path) -> None:
    """Raises UsageError where there is no such file, or none that can be read more than once."""
    if Path(path).is_file():
        return
    if Path(path).exists() and not Path(path).is_dir():
        raise UsageError(
            f"'{path}' is a pipe (expected a file: it is read more than once)", fix="write it to a file first"
        )
    raise UsageError(f"there is no file '{path}'", fix="give the path of a file of queries")
