"""`stride query`: which training documents made the model say this?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stride_cli import output
from stride_cli.attribution.options import QueryOptions, QuestionOptions, SharingOptions
from stride_cli.commands.options import ASKED, AnswerOptions, Asked, Flags, PromptFile, with_flags
from stride_cli.commands.prompts import (
    BadInput,
    Prompt,
    answered,
    answered_as_one,
    count_prompts,
    read_prompts,
    rows_or_prompts,
    shared_outcomes,
)
from stride_cli.errors import StrideError, UsageError
from stride_cli.models.kinds import refuse_classifier

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.schema.index_records import QueryTokensRecord

EXAMPLE = """\b
Examples:
  stride query "The French Revolution began in" --top 10
  stride query "The capital of France is" --response "Paris" --index run.stride
  stride query "The largest moon of Saturn is" --bottom 5 --verbose
  stride query "The chemical symbol of gold is" --read 300
  cat prompts.txt | stride query - | jq '.hits[0].document'
  stride query --file prompts.jsonl --on-bad record --json > answers.jsonl
  stride query --file prompts.jsonl --format csv > hits.csv
  stride query "The capital of Australia is" --response "Canberra" --instead "Sydney"
  stride query --file habit.jsonl --pool --top 80
  stride query --file prompts.jsonl --workers 4 --json > answers.jsonl
  stride query "The capital of France is" --response "Paris" --show-tokens
  stride query 17 --index classifier.stride --top 5 --bottom 5
"""


@with_flags
def query(
    text: Annotated[
        str | None,
        typer.Argument(
            help="The prompt; - reads one a line from stdin. Of a classifier: a row, or held-out."
        ),
    ] = None,
    file: PromptFile = None,
    *,
    question: Annotated[QuestionOptions, Flags(QuestionOptions)],
    show_tokens: Annotated[
        bool,
        typer.Option(
            "--show-tokens", help="Show what the model reads, and which tokens are scored; no answer."
        ),
    ] = False,
    options: Annotated[QueryOptions, Flags(QueryOptions, only=ASKED, first=("top", "bottom", "chat"))],
    where: Asked,
    how: Annotated[AnswerOptions, Flags(AnswerOptions)],
    sharing: Annotated[SharingOptions, Flags(SharingOptions)],
) -> None:
    """Rank the training documents that support (or oppose) what the model says after a prompt."""
    texts = [] if text is None else [text]
    if show_tokens:
        if how.pool or sharing.shared or how.format:
            raise UsageError(
                "--show-tokens gives no answers, which --pool, --workers, --engine and --format are about",
                fix="drop one of them; --json gives a record of each prompt's tokens",
            )
        prompts = read_prompts(texts, file, how.on_bad)
        _show_tokens(where, prompts, options, asdict(question), how.json)
        return
    if sharing.shared and (file is None or how.pool):
        what = "--pool answers them as one" if how.pool else "no file of prompts is given"
        raise UsageError(
            f"--workers and --engine share out the prompts of a file, and {what}",
            fix="leave them out" if how.pool else "stride query --file prompts.jsonl --workers 4",
        )

    def opened() -> Session | Callable[..., Any]:
        from stride_cli import api
        from stride_cli.data.workspace import open_index

        if file is None or not sharing.shared:
            return api.open(where)
        refuse_classifier(open_index(where.index), "--workers and --engine share out prompts")
        return partial(shared_outcomes, where, sharing, total=count_prompts(file))  # opens no model here

    answer_prompts(texts, file, question, options, how, opened)


def answer_prompts(
    texts: Sequence[str],
    file: Path | None,
    question: QuestionOptions,
    options: QueryOptions,
    how: AnswerOptions,
    opened: Callable[[], Any],
) -> Any:
    """Answer prompts, given as arguments or in a file, and show the answers; return the last that is text.

    What can be refused is, before `opened` opens an index, or makes one: a session, or its `outcomes`.
    """
    prompts, given = read_prompts(texts, file, how.on_bad), asdict(question)
    if how.pool and len(texts) == 1 and texts[0] not in ("-", "held-out"):
        raise UsageError(
            "--pool answers several prompts as one (found one prompt)",
            fix="give them in a file, a prompt a line: --file prompts.jsonl --pool",
        )
    out = AnswerOutput(how)
    bad = BadInput(how.on_bad, as_json=out.format in ("jsonl", "json"))
    session = opened()
    if callable(session):
        found = answered(session, prompts, options, bad, given)
    else:
        prompts = rows_or_prompts(session, prompts, texts, file, given)
        if how.pool:
            found = answered_as_one(session, prompts, options, bad, given)
        else:  # who writes to stdin waits for each answer
            together = 1 if len(texts) == 1 else None
            found = answered(session.outcomes, prompts, options, bad, given, together=together)
    last = show_answers(found, out, bad, verbose=options.verbose)
    bad.leave()
    return last if out.format == "text" else None


def _show_tokens(
    where: WorkspacePath,
    prompts: Iterable[Prompt],
    options: QueryOptions,
    given: Mapping[str, Any],
    json: bool | None,
) -> None:
    """Show the tokens of every query, and which of them are scored; no operators are needed."""
    from stride_cli.commands.tables import print_tokens
    from stride_cli.corpus.summary import shown_tokens
    from stride_cli.data.queries import build_queries, form_of

    workspace = where.open()
    refuse_classifier(workspace.index, "--show-tokens is about prompts")
    form, model = form_of(workspace, options.chat), cast("CausalLM", workspace.model)
    for prompt in prompts:
        if isinstance(prompt.asked, StrideError):
            raise prompt.asked
        asked = [{**given, **prompt.asked}]
        (query,) = build_queries(model, asked, max_new_tokens=options.max_new_tokens, form=form)
        if isinstance(query, StrideError):
            raise query
        shown = shown_tokens(query.ids, query.weights > 0, model.tokenizer)
        if not output.wants_json(json):
            print_tokens(shown, asdict(form))
            continue
        record: QueryTokensRecord = {
            "schema": "stride.query_tokens/1",
            "prompt": query.prompt,
            "response": query.response,
            "form": asdict(form),
            **shown,
        }
        output.emit(record)


def show_answers(
    found: Iterable[tuple[Prompt, Any]], out: AnswerOutput, bad: BadInput, *, verbose: bool
) -> Any:
    """Show every answer as it comes, where and how `out` says; return the last, or None."""
    answer = None
    if out.format == "text":
        from stride_cli.commands.rendering import render_answer

        for _, answer in found:
            render_answer(answer, verbose=verbose)
        return answer
    from stride_cli.report.explanation import answer_record

    with out.opened() as take:
        bad.emit = take
        for prompt, answer in found:
            take(answer_record(answer, name=prompt.id, verbose=verbose))
    return answer


class AnswerOutput:
    """The format of answers on stdout: "jsonl", "json", "csv"; "text" on a terminal."""

    def __init__(self, how: AnswerOptions) -> None:
        self.format = how.format or ("jsonl" if output.wants_json(how.json) else "text")

    @contextmanager
    def opened(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Yield what takes one record after the other."""
        if self.format == "csv":
            from stride_cli.report.answers import CsvTable

            yield CsvTable(sys.stdout).add
        elif self.format == "json":
            places = count()

            def take(record: Mapping[str, Any]) -> None:
                sys.stdout.write((",\n" if next(places) else "[\n") + output.to_json(record))

            yield take
            sys.stdout.write("\n]\n" if next(places) else "[]\n")
        else:
            yield output.emit
