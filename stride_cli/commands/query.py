"""`stride query`: which training documents made the model say this?"""

from __future__ import annotations

import json as json_module
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from stride_cli.attribution.options import QueryOptions
from stride_cli.commands.completion import one_of
from stride_cli.commands.options import (
    Device,
    Dtype,
    Flags,
    IndexPath,
    Json,
    ModelPath,
    find_index,
    query_options,
    with_flags,
    with_judges,
)
from stride_cli.errors import QueryError, UsageError
from stride_cli.models.kinds import require_examples

EXAMPLE = """\b
Examples:
  stride query "The French Revolution began in" --top 10
  stride query "The capital of France is" --response "Paris" --index run.stride
  stride query "The largest moon of Saturn is" --bottom 5 --explain
  stride query "The chemical symbol of gold is" --stability --prior tfidf
  stride query "The chemical symbol of gold is" --read 300
  cat prompts.txt | stride query - | jq '.hits[0].document'
  stride query --row 17 --index classifier.stride --top 5 --bottom 5
"""


@with_flags
def query(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads one prompt a line from stdin.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help='JSON Lines of {"prompt", "response"?, "span"?}, or a prompt a line; of a classifier, '
            "examples.",
        ),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(
            "--row",
            help="Of a classifier: number or id of a row of its file, or held-out: all.",
            autocompletion=one_of("held-out"),
        ),
    ] = None,
    response: Annotated[
        str | None,
        typer.Option(
            "--response",
            help="Attribute this continuation, not the model's own; of a classifier: this class, or "
            "predicted, not the row's label.",
        ),
    ] = None,
    span: Annotated[
        str | None, typer.Option("--span", help="Attribute only this part of the response.")
    ] = None,
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    given: Annotated[
        dict[str, Any],
        Flags(
            QueryOptions,
            first=("top", "bottom", "max_new_tokens", "chat"),
            halves={"default": None},
            stability={"default": False},
        ),
    ],
    explained: Annotated[
        bool,
        typer.Option("--explain", help="Two sentences: what the numbers say, how far to trust them."),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Rank the training documents that support (or oppose) what the model says after a prompt."""
    from stride_cli import api
    from stride_cli.commands.classifier import classifier_queries
    from stride_cli.config import resolve
    from stride_cli.output import emit, wants_json

    if sum(given is not None for given in (text, file, row)) != 1:
        raise UsageError(
            "give a prompt, or - for stdin, or --file, or --row (one of them)",
            fix='stride query "The French Revolution began in"',
        )
    chosen = resolve("query", {**given, "device": device, "dtype": dtype})
    options = query_options(chosen, given)
    if text is not None and text != "-" and not text.strip():
        raise QueryError("the prompt is empty (expected some text)", fix='stride query "some text"')
    general = resolve("general", {"model": model})
    session = api.Session.open(
        find_index(index), model_path=general.model, device=chosen.device, dtype=chosen.dtype
    )
    options = with_judges(options, session.index, given)
    as_json = wants_json(json)
    if row is not None:
        require_examples(session.index, 'stride query "some text"')
    records: Iterator[dict[str, Any]]
    if session.model.table is not None and text is None:
        found_queries = classifier_queries(session, row, file, response)
        records = ({"prompt": query} for query in found_queries)
    else:
        records = read_prompts(text, file)
    names: deque[dict[str, Any]] = deque()  # ids of prompts that are not answered yet

    def asked() -> Iterator[dict[str, Any]]:
        for record in records:
            names.append({"id": record["id"]} if "id" in record else {})
            yield {"response": response, "span": span} | record

    together = None if text is None else 1  # who writes to stdin waits for each answer
    for answer in session.query_all(asked(), options, together=together):
        named = names.popleft()
        if as_json:
            found = {**named, **answer.to_record()}
            if explained:
                from stride_cli.report.explanation import explain

                found["explanation"] = explain(found)
            emit(found)
        else:
            from stride_cli.commands.rendering import render_answer

            render_answer(answer, verbose=options.check, explained=explained)


def read_prompts(text: str | None, file: Path | None) -> Iterator[dict[str, Any]]:
    """Prompts as records, one at a time, as they arrive: from `text`, from stdin where it is "-", or a file.

    Raises
    ------
    UsageError      there is no such file
    QueryError      a line is broken (names it), or there is none
    """
    if text is not None and text != "-":
        yield {"prompt": text}
        return
    if text == "-":
        yield from _lines(iter(sys.stdin.readline, ""), "stdin")
        return
    assert file is not None
    if not file.is_file():
        raise UsageError(f"there is no file '{file}'", fix="give the path of a file of prompts")
    with file.open(encoding="utf-8", errors="strict") as lines:
        try:
            yield from _lines(iter(lines), str(file))
        except UnicodeDecodeError as error:
            raise QueryError(f"{file} is not UTF-8: {error.reason}", fix=f"iconv -t UTF-8 {file}") from error


def _lines(lines: Iterator[str], source: str) -> Iterator[dict[str, Any]]:
    count = 0
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        count += 1
        if line.lstrip().startswith("{"):
            try:
                record = json_module.loads(line)
            except ValueError as error:
                raise QueryError(
                    f"{source}:{number} is broken JSON: {error}",
                    fix="one JSON object a line, or plain prompts",
                ) from error
            for key in ("prompt", "response", "span"):
                if key in record and not isinstance(record[key], str):
                    raise QueryError(
                        f"{source}:{number}: '{key}' is {type(record[key]).__name__} (expected a string)",
                        fix='{"prompt": "…"}',
                    )
            if "prompt" not in record:
                raise QueryError(
                    f"{source}:{number} has no 'prompt' (found {', '.join(sorted(record)) or 'nothing'})",
                    fix='{"prompt": "…"}',
                )
            yield record
        else:
            yield {"prompt": line}
    if count == 0:
        raise QueryError(f"{source} holds no prompt", fix="one prompt a line")
