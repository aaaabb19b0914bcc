"""`stride report`: answers as one HTML page that needs nothing else."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stride_cli.attribution.options import QueryOptions, QuestionOptions
from stride_cli.commands.options import (
    Flags,
    Held,
    IndexPath,
    InputOptions,
    Json,
    PromptFile,
    find_index,
    with_flags,
)
from stride_cli.commands.prompts import BadInput, answered, read_prompts, rows_or_prompts, stdin_lines
from stride_cli.errors import QueryError, UsageError

if TYPE_CHECKING:
    from stride_cli.report.contents import ShownAnswer
    from stride_cli.schema.answer_records import ReportRecord

_OF_ANSWERS = ("answers", "out", "title", "json")  # what may be given beside answers that are there
EXAMPLE = """\b
Examples:
  stride report "The French Revolution began in" "The capital of Kenya is" --index run.stride
  stride report --file prompts.jsonl --out gallery.html
  stride query --file prompts.jsonl --bottom 5 --json > answers.jsonl; stride report --answers answers.jsonl
"""


@with_flags
def report(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; - reads one a line from stdin. Of a classifier: rows, or held-out."),
    ] = None,
    file: PromptFile = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            help="Answers that stride query --json saved (- for stdin); what they lack is left out.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Default: the name of the index.")] = None,
    index: IndexPath = None,
    *,
    question: Annotated[QuestionOptions, Flags(QuestionOptions, only=("response",))],
    options: Annotated[
        QueryOptions,
        Flags(
            QueryOptions,
            only=("top", "bottom", "chat", "lambda_ratio", "read"),
            first=("top", "bottom", "chat"),
            top={"default": 5, "help": "Supporting documents of each query."},
            bottom={"default": 3, "help": "Opposing documents of each query."},
        ),
    ],
    bad_input: Annotated[InputOptions, Flags(InputOptions)],
    where: Held,
    json: Json = None,
) -> None:
    """Write a page that shows, for each query, its documents, the passages that matter, plots and caveats.

    The page is one file without links to others: it can be mailed, archived and opened offline.
    """
    from index_format.durable import replace_file
    from stride_cli import api
    from stride_cli.output import emit, note, progress, wants_json
    from stride_cli.report.answers import parse_answers, read_answers
    from stride_cli.report.contents import from_answer, from_record
    from stride_cli.report.drawing import check_place, provenance
    from stride_cli.report.page import render_report

    begin = time.monotonic()
    bad = BadInput(bad_input.on_bad, as_json=wants_json(json))
    example = 'stride report "The French Revolution began in"'
    texts = prompts or []
    if sum([bool(texts), file is not None, answers is not None]) != 1:
        raise UsageError("give prompts, or - for stdin, or --file, or --answers (one of them)", fix=example)
    sources = {each.opts[0]: context.get_parameter_source(str(each.name)) for each in context.command.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if answers is not None and (asking := [name for name in given if name.strip("-") not in _OF_ANSWERS]):
        said = f"with --answers nothing is asked (found {', '.join(asking)} beside it)"
        raise UsageError(said, fix=f"leave it out, or ask anew: {example}")
    check_place(out)
    shown: list[ShownAnswer]
    if answers is not None:
        saved = parse_answers(stdin_lines(), "stdin") if str(answers) == "-" else read_answers(answers)
        shown, name, about = [from_record(record) for record in saved], answers.stem, provenance(None)
        name = "saved answers" if name == "-" else name
    else:
        asked = read_prompts(texts, file, bad_input.on_bad)
        where = replace(where, index=find_index(index))
        session = api.open(where)
        wanted = list(rows_or_prompts(session, asked, texts, file, asdict(question)))
        shown, name, about = [], where.index.name, provenance(session.index)
        with progress("asking", len(wanted), unit="queries") as bar:
            for prompt, answer in answered(session.outcomes, wanted, options, bad, asdict(question)):
                shown.append(from_answer(session, answer, name=prompt.id))
                bar.advance()
    if not shown:
        bad.leave()  # there is nothing to write
        raise QueryError("there is no query to report on", fix="give one prompt or more")
    page = render_report(shown, title=title or f"Attribution: {name}", about=about)
    replace_file(out, page.encode())
    size, seconds = out.stat().st_size, time.monotonic() - begin
    if wants_json(json):
        record: ReportRecord = {
            "schema": "stride.report/1",
            "path": str(out),
            "queries": len(shown),
            "bytes": size,
            "seconds": seconds,
        }
        emit(record)
    else:
        queries = "1 query" if len(shown) == 1 else f"{len(shown)} queries"
        note(f"wrote {out}: {queries}, {size / 1024:,.0f} KiB, {seconds:.1f} s")
    bad.leave()
