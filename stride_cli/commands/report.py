"""`stride report`: answers as one HTML page that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import InputOptions, QueryOptions
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
)
from stride_cli.commands.prompts import (
    ARGUMENTS,
    BadInput,
    Prompt,
    answered,
    read_prompts,
    read_rows,
    stdin_lines,
)
from stride_cli.errors import QueryError, UsageError

if TYPE_CHECKING:
    from stride_cli.api import Session
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.report.contents import ShownAnswer
    from stride_cli.schema.answer_records import ReportRecord

EXAMPLE = """\b
Examples:
  stride report "The French Revolution began in" "The capital of Kenya is" --index run.stride
  stride report --file prompts.jsonl --out gallery.html
  stride query --file prompts.jsonl --bottom 5 --json > answers.jsonl; stride report --answers answers.jsonl
"""


@with_flags
def report(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; - reads one a line from stdin. Of a classifier: rows, or held-out."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Prompts in a file, as for stride query; of a classifier, examples."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            help="Answers that stride query --json saved (- for stdin); what they lack is left out.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Default: the name of the index.")] = None,
    response: Annotated[
        str | None, typer.Option("--response", help="Attribute this continuation, not the model's own.")
    ] = None,
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    given: Annotated[
        dict[str, Any],
        Flags(
            QueryOptions,
            only=("top", "bottom", "chat", "lambda_ratio", "read"),
            first=("top", "bottom", "chat"),
            top={"default": 5, "help": "Supporting documents of each query."},
            bottom={"default": 3, "help": "Opposing documents of each query."},
        ),
    ],
    reading: Annotated[dict[str, Any], Flags(InputOptions)],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Write a page that shows, for each query, its documents, the passages that matter, plots and caveats.

    The page is one file without links to others: it can be mailed, archived and opened offline.
    """
    from stride_cli.config import resolve
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.output import emit, note, wants_json
    from stride_cli.report.answers import parse_answers, read_answers
    from stride_cli.report.contents import from_record
    from stride_cli.report.drawing import check_place
    from stride_cli.report.page import write_report

    begin = time.monotonic()
    bad = BadInput(InputOptions(**reading).on_bad, as_json=wants_json(json))
    sources = [bool(prompts), file is not None, answers is not None]
    if sum(sources) != 1:
        raise UsageError(
            "give prompts, or - for stdin, or --file, or --answers (one of them)",
            fix='stride report "The French Revolution began in"',
        )
    check_place(out)
    chosen = resolve("query", {**given, "device": device, "dtype": dtype})
    options = query_options(chosen, given)
    shown: list[ShownAnswer]
    if answers is not None:
        saved = parse_answers(stdin_lines(), "stdin") if str(answers) == "-" else read_answers(answers)
        shown, name = [from_record(record) for record in saved], answers.stem
        name = "saved answers" if name == "-" else name
    else:
        path = find_index(index)
        wanted = _Wanted(prompts or [], file, response)
        if bad.stops and any(not prompt.strip() for prompt in wanted.prompts):
            raise QueryError("a prompt is empty (expected some text)", fix='stride report "some text"')
        place = WorkspacePath(path, resolve("general", {"model": model}).model, chosen.device, chosen.dtype)
        shown = list(_ask(place, wanted, options, given, bad))
        name = path.name
    if not shown:
        bad.leave()  # there is nothing to write
        raise QueryError("there is no query to report on", fix="give one prompt or more")
    write_report(out, shown, title=title or f"Attribution: {name}")
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


class _Wanted:
    """What a report is asked to be about."""

    def __init__(self, prompts: list[str], file: Path | None, response: str | None) -> None:
        if "-" in prompts and len(prompts) > 1:
            raise UsageError(
                "- reads all prompts from stdin (found other prompts beside it)", fix="drop them"
            )
        self.prompts, self.file, self.response = prompts, file, response

    def read(self, session: Session) -> Iterator[Prompt]:
        from stride_cli.commands.classifier import classifier_queries

        if session.model.table is not None and self.prompts != ["-"]:
            rows: list[str | None] = [*self.prompts] or [None]
            for row in rows:
                yield from read_rows(classifier_queries(session, row, self.file, self.response), self.file)
        elif self.file is not None or self.prompts == ["-"]:
            yield from read_prompts(None if self.file is not None else "-", self.file)
        else:
            for number, prompt in enumerate(self.prompts, 1):
                yield Prompt({"prompt": prompt}, ARGUMENTS, number)


def _ask(
    place: WorkspacePath, wanted: _Wanted, options: QueryOptions, given: dict[str, Any], bad: BadInput
) -> Iterator[ShownAnswer]:
    from stride_cli import api
    from stride_cli.output import progress
    from stride_cli.report.contents import from_answer

    session = api.Session.open(place.index, model_path=place.model, device=place.device, dtype=place.dtype)
    prompts = list(wanted.read(session))
    with progress("asking", len(prompts), unit="queries") as bar:
        asked = {"response": wanted.response}
        for prompt, answer in answered(session, prompts, options, bad, given=asked):
            yield from_answer(session, answer, name=prompt.id)
            bar.advance()
