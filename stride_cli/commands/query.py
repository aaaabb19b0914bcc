"""`stride query`: which training documents made the model say this?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stride_cli import output
from stride_cli.attribution.options import QueryOptions, QuestionOptions, SharingOptions
from stride_cli.commands.options import (
    ASKED,
    Asked,
    Flags,
    FormatOptions,
    InputOptions,
    Json,
    PromptFile,
    with_flags,
)
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
from stride_cli.options import MORE

if TYPE_CHECKING:
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
    pool: Annotated[
        bool,
        typer.Option(
            "--pool",
            help="Answer all prompts of FILE or stdin as one: which documents taught what they share?",
            rich_help_panel=MORE,
        ),
    ] = False,
    options: Annotated[QueryOptions, Flags(QueryOptions, only=ASKED, first=("top", "bottom", "chat"))],
    where: Asked,
    bad_input: Annotated[InputOptions, Flags(InputOptions)],
    written: Annotated[FormatOptions, Flags(FormatOptions, only=("format",))],
    sharing: Annotated[SharingOptions, Flags(SharingOptions)],
    json: Json = None,
) -> None:
    """Rank the training documents that support (or oppose) what the model says after a prompt."""
    texts = [] if text is None else [text]
    example = 'stride query "The French Revolution began in"'
    prompts = read_prompts(texts, file, example, bad_input.on_bad)
    if pool and text not in (None, "-", "held-out"):
        raise UsageError(
            "--pool answers several prompts as one (found one prompt)",
            fix="stride query --file prompts.jsonl --pool",
        )
    if sharing.shared and (file is None or pool):
        what = "--pool answers them as one" if pool else "no file of prompts is given"
        raise UsageError(
            f"--workers and --engine share out the prompts of a file, and {what}",
            fix="leave them out" if pool else "stride query --file prompts.jsonl --workers 4",
        )
    if show_tokens and (pool or sharing.shared or written.format):
        raise UsageError(
            "--show-tokens gives no answers, which --pool, --workers, --engine and --format are about",
            fix="drop one of them; --json gives a record of each prompt's tokens",
        )
    out = AnswerOutput(json, written.format)
    if bad_input.on_bad == "record" and out.format == "csv":
        raise UsageError(
            "--on-bad record writes JSON, and the format is csv", fix="give --on-bad skip, or --format jsonl"
        )
    bad = BadInput(bad_input.on_bad, as_json=out.as_json)
    given = asdict(question)
    if show_tokens:
        _show_tokens(where, prompts, options, given, json)
        return
    if sharing.shared:
        from index_format.reader import Index

        assert file is not None
        refuse_classifier(Index.open(where.index), "--workers and --engine share out prompts")
        outcomes = partial(shared_outcomes, where, sharing)  # no model is opened here
        found = answered(outcomes, prompts, options, bad, given, total=count_prompts(file))
    else:
        from stride_cli import api

        session = api.open(where)
        prompts = rows_or_prompts(session, prompts, texts, file, given)
        if pool:
            found = answered_as_one(session, prompts, options, bad, given)
        else:
            together = None if text is None else 1
            found = answered(session.outcomes, prompts, options, bad, given, together=together)
    show_answers(found, out, bad, verbose=options.verbose)
    bad.leave()


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
    """The format of answers on stdout, checked before anything is computed.

    Attributes
    ----------
    format : "jsonl", "json", "csv"; "text" on a terminal

    Raises
    ------
    UsageError      --json, and a format that is no JSON
    """

    def __init__(self, json: bool | None, wanted: str | None = None) -> None:
        if json and wanted == "csv":
            raise UsageError("--json writes JSON lines, and the format is csv", fix="drop one of them")
        self.format = wanted or ("jsonl" if output.wants_json(json) else "text")

    @property
    def as_json(self) -> bool:
        """True where an error can be a record among the answers."""
        return self.format in ("jsonl", "json")

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
