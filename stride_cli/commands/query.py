"""`stride query`: which training documents made the model say this?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import (
    FormatOptions,
    InputOptions,
    QueryOptions,
    SharingOptions,
)
from stride_cli.commands.options import (
    ASKED,
    Device,
    Dtype,
    Flags,
    IndexPath,
    Json,
    ModelPath,
    find_index,
    query_options,
    with_flags,
)
from stride_cli.commands.prompts import (
    FORMAT,
    BadInput,
    Prompt,
    answered,
    answered_as_one,
    count_prompts,
    read_prompts,
    read_rows,
)
from stride_cli.errors import QueryError, UsageError
from stride_cli.options import MORE

if TYPE_CHECKING:
    from stride_cli import api
    from stride_cli.attribution.sharing import SharedSession
    from stride_cli.commands.answer_output import AnswerOutput
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.serve.client import ServedSession

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
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help=f"{FORMAT} Of a classifier, examples.",
        ),
    ] = None,
    response: Annotated[
        str | None,
        typer.Option(
            "--response",
            help="Attribute this continuation, not the model's own. Of a classifier: a class, or predicted.",
        ),
    ] = None,
    span: Annotated[
        str | None,
        typer.Option("--span", help="Attribute only this part of the response.", rich_help_panel=MORE),
    ] = None,
    instead: Annotated[
        str | None,
        typer.Option(
            "--instead",
            help="Why the response and not this? Attributes the odds of the word where they part.",
            rich_help_panel=MORE,
        ),
    ] = None,
    pool: Annotated[
        bool,
        typer.Option(
            "--pool",
            help="Answer all prompts of FILE or stdin as one: which documents taught what they share?",
            rich_help_panel=MORE,
        ),
    ] = False,
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    given: Annotated[
        dict[str, Any],
        Flags(QueryOptions, only=ASKED, first=("top", "bottom", "chat")),
    ],
    reading: Annotated[dict[str, Any], Flags(InputOptions)],
    written: Annotated[dict[str, Any], Flags(FormatOptions, only=("format",))],
    shared: Annotated[dict[str, Any], Flags(SharingOptions)],
    no_server: Annotated[
        bool,
        typer.Option(
            "--no-server",
            help="Open the index here, also where a stride serve has it open.",
            rich_help_panel=MORE,
        ),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Rank the training documents that support (or oppose) what the model says after a prompt."""
    from stride_cli.commands.answer_output import AnswerOutput
    from stride_cli.commands.classifier import classifier_queries
    from stride_cli.config import resolve
    from stride_cli.data.workspace import WorkspacePath

    if (text is None) == (file is None):
        raise UsageError(
            "give a prompt, or - for stdin, or --file (one of them)",
            fix='stride query "The French Revolution began in"',
        )
    if pool and text not in (None, "-", "held-out"):
        raise UsageError(
            "--pool answers several prompts as one (found one prompt)",
            fix="stride query --file prompts.jsonl --pool",
        )
    sharing = SharingOptions(**shared)
    if sharing.shared and (file is None or pool):
        what = "--pool answers them as one" if pool else "no file of prompts is given"
        raise UsageError(
            f"--workers and --engine share out the prompts of a file, and {what}",
            fix="leave them out" if pool else "stride query --file prompts.jsonl --workers 4",
        )
    # many prompts of a file are read for together, which takes less time than a server saves
    here = no_server or text is None or pool
    chosen = resolve("query", {**given, "device": device, "dtype": dtype})
    options = query_options(chosen, given)
    out = AnswerOutput(FormatOptions(**written), json)
    on_bad = InputOptions(**reading).on_bad
    if on_bad == "record" and out.format == "csv":
        raise UsageError(
            f"--on-bad record writes JSON, and the format is {out.format}",
            fix="give --on-bad skip, or --format jsonl",
        )
    bad = BadInput(on_bad, as_json=out.as_json)
    if bad.stops and text is not None and text != "-" and not text.strip():
        raise QueryError("the prompt is empty (expected some text)", fix='stride query "some text"')
    general = resolve("general", {"model": model})
    place = WorkspacePath(find_index(index), general.model, chosen.device, chosen.dtype)
    served = None if here else _served(place, options)
    together = None if text is None else 1  # who writes to stdin waits for each answer
    asked = {"response": response, "span": span, "instead": instead}
    asking: Any
    total = None
    if served is not None:
        asking, prompts = served, read_prompts(text, None)
    elif sharing.shared:
        assert file is not None
        asking = _shared(place, sharing)
        prompts, total = read_prompts(None, file), count_prompts(file)
    else:
        from stride_cli import api  # which a server's answer does without

        asking = session = api.Session.open(
            place.index, model_path=place.model, device=place.device, dtype=place.dtype
        )
        if session.model.table is not None and text != "-":
            prompts = read_rows(classifier_queries(session, text, file, response, instead), file)
        else:
            prompts = read_prompts(text, file)
    if pool:
        found = answered_as_one(asking, prompts, options, bad, given=asked)
    else:
        found = answered(asking, prompts, options, bad, given=asked, together=together, total=total)
    show_answers(found, out, bad, verbose=options.check)
    bad.leave()


def show_answers(
    found: Iterable[tuple[Prompt, Any]], out: AnswerOutput, bad: BadInput, *, verbose: bool
) -> Any:
    """Show every answer (an `Answer`, or a `ServedAnswer`) as it comes, where and how `out` says; returns the
    last, or None."""
    answer = None
    if out.format == "text":
        from stride_cli.commands.rendering import render_answer

        for _, answer in found:
            render_answer(answer, verbose=verbose)
        return answer
    with out.opened() as take:
        bad.emit = take
        for prompt, answer in found:
            take(_record(prompt, answer, verbose))
    return answer


def _record(prompt: Prompt, answer: Any, verbose: bool) -> dict[str, Any]:
    """The answer's record, with what only the command knows."""
    named = {} if prompt.id is None else {"id": prompt.id}
    found: dict[str, Any] = {**named, **answer.to_record()}
    if verbose:
        from stride_cli.report.explanation import explain

        found["explanation"] = explain(found)
    return found


def _shared(place: WorkspacePath, sharing: SharingOptions) -> SharedSession:
    """Return what shares prompts out to workers; no model is opened here."""
    from index_format.reader import Index
    from stride_cli.attribution.sharing import SharedSession
    from stride_cli.models.kinds import refuse_classifier

    refuse_classifier(Index.open(place.index), "--workers and --engine share out prompts")
    return SharedSession(place, sharing)


def _served(place: WorkspacePath, options: QueryOptions) -> ServedSession | None:
    """What asks a running server that has the index open; None where there is none."""
    from stride_cli.serve.client import ServedSession, find_server

    server = find_server(place)
    if server is None:
        return None

    def opened() -> tuple[api.Session, QueryOptions]:
        from stride_cli import api

        session = api.Session.open(
            place.index, model_path=place.model, device=place.device, dtype=place.dtype
        )
        return session, options

    presence, served, n_chunks = server
    return ServedSession(presence, served, n_chunks, opened)
