"""Prompts that a command is asked: from its arguments, a file or stdin; and what becomes of bad ones."""

from __future__ import annotations

import json as json_module
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stride_cli import output
from stride_cli.characters import refuse_constant
from stride_cli.corpus.sources import SKIPS_TOLD
from stride_cli.data.query_files import prompt_id, prompt_texts
from stride_cli.errors import EXIT_USAGE, QueryError, StrideError, UsageError, first_line, located

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.options import QueryOptions, SharingOptions
    from stride_cli.attribution.session import Session
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.schema.answer_records import BadInputRecord

ARGUMENTS = "arguments"
_EXAMPLE = 'for example "The French Revolution began in"'


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    asked : "prompt" and perhaps "response", "span" and "instead"; or why it could not be read
    source : the file, "stdin", or "arguments"
    line : from 1
    id : where it gave one
    """

    asked: Mapping[str, Any] | QueryError
    source: str
    line: int | None = None
    id: str | None = None


class BadInput:
    """Handles input that cannot be used: the first ends the command, or all are told or recorded.

    Parameters
    ----------
    on_bad : "error", "skip" or "record"
    as_json : whether stdout gets records; on a terminal "record" is as "skip"
    what : of what kind it is, "prompt" or "item"

    Attributes
    ----------
    count : int      that were left out
    emit : callable  what records go to; stdout by default
    """

    def __init__(self, on_bad: str, *, as_json: bool, what: str = "prompt") -> None:
        self.stops = on_bad == "error"
        self.count = 0
        self.emit: Callable[[Mapping[str, Any]], None] = output.emit
        self._records, self._what = on_bad == "record" and as_json, what

    def take(self, error: StrideError, source: str, line: int | None = None, id: str | None = None) -> None:
        """Take one that cannot be used, whose error says where it is; raise it where it ends the command."""
        if self.stops:
            raise error
        self.count += 1
        # without the advice that is in use: to leave such lines out
        fix = error.fix and re.sub(r",? or leave (such lines|it) out with --on-bad skip$", "", error.fix)
        if self._records:
            record: BadInputRecord = {
                "schema": "stride.bad_input/1",
                "source": source,
                "line": line,
                "message": error.message,
                "fix": fix,
            }
            if id is not None:
                record["id"] = id
            self.emit(record)
        elif self.count <= SKIPS_TOLD:
            output.note(f"skipped {error.message}" + (f"\n  fix: {fix}" if fix else ""))

    def leave(self) -> None:
        """End with exit code 2 where there was one."""
        if self.count:
            done = "recorded" if self._records else "skipped"
            output.note(f"{done} {self.count:,} bad {self._what}{'s' * (self.count > 1)} in all")
            raise typer.Exit(EXIT_USAGE)


def answered(
    outcomes: Callable[..., Iterator[Answer | StrideError]],
    prompts: Iterable[Prompt],
    options: QueryOptions,
    bad: BadInput,
    given: Mapping[str, Any],
    **known: Any,
) -> Iterator[tuple[Prompt, Any]]:
    """Yield every prompt with its answer, in order, without those that `bad` takes.

    Parameters
    ----------
    outcomes : `Session.outcomes`, or `shared_outcomes` of a place and workers
    given : "response", "span" and "instead" of prompts that have none of their own
    known : "together", see `Session.query_all`; or "total", the number of prompts that workers share
    """
    waiting: deque[Prompt] = deque()  # for their outcome

    def asked() -> Iterator[Mapping[str, Any] | StrideError]:
        for prompt in prompts:
            waiting.append(prompt)
            yield prompt.asked if isinstance(prompt.asked, StrideError) else {**given, **prompt.asked}

    for outcome in outcomes(asked(), options, **known):
        prompt = waiting.popleft()
        if isinstance(outcome, StrideError):
            _take(bad, prompt, outcome)
        else:
            yield prompt, outcome


def shared_outcomes(
    place: WorkspacePath,
    sharing: SharingOptions,
    prompts: Iterable[Mapping[str, Any] | StrideError],
    options: QueryOptions,
    *,
    total: int,
) -> Iterator[Answer | StrideError]:
    """Answer prompts as `Session.outcomes` does, each share in a worker; `total` is 0 where not known."""
    from stride_cli.attribution.session import until_broken
    from stride_cli.attribution.sharing import SessionWork, prompts_of_a_share, shared_out

    broken: list[StrideError] = []
    arriving, size = until_broken(prompts, broken), prompts_of_a_share(total)
    shares = iter(lambda: list(islice(arriving, size)), [])
    work = SessionWork(place, partial(_answer_share, options=options))
    with output.progress("answering", total or None, unit="prompts") as bar:
        for found in shared_out(work, shares, sharing):
            for outcome in found:
                bar.advance()
                yield outcome
    if broken:
        raise broken[0]


def _answer_share(session: Session, prompts: Sequence[Any], *, options: QueryOptions) -> list[Any]:
    return list(session.outcomes(prompts, options, together=len(prompts)))


def answered_as_one(
    session: Session,
    prompts: Iterable[Prompt],
    options: QueryOptions,
    bad: BadInput,
    given: Mapping[str, Any],
) -> Iterator[tuple[Prompt, Any]]:
    """Yield the one answer to all prompts together, without those that `bad` takes.

    Raises
    ------
    QueryError      none is left to ask
    """
    asked = []
    for prompt in prompts:
        if isinstance(prompt.asked, StrideError):
            _take(bad, prompt, prompt.asked)
        else:
            asked.append((prompt, {**given, **prompt.asked}))
    queries = []
    with output.progress("asking the model"):
        built = session.build([each for _, each in asked], options)
    for (prompt, _), query in zip(asked, built, strict=True):
        if isinstance(query, StrideError):
            _take(bad, prompt, query)
        else:
            queries.append(query)
    if not queries:
        raise QueryError("none of the prompts can be asked", fix="give one or more that the model can answer")
    answer = session.query_pooled([{"prompt": query} for query in queries], options)
    yield Prompt({"prompt": answer.query}, asked[0][0].source), answer


def _take(bad: BadInput, prompt: Prompt, error: StrideError) -> None:
    """Have a prompt's error taken, which says where the prompt stands."""
    if prompt.source != ARGUMENTS and not isinstance(prompt.asked, StrideError):
        error = located(error, f"{prompt.source}:{prompt.line}")
    bad.take(error, prompt.source, prompt.line, prompt.id)


def read_prompts(texts: Sequence[str], file: Path | None, on_bad: str = "error") -> Iterator[Prompt]:
    """Read prompts one at a time, as they arrive: arguments, lines of stdin for "-", or lines of a file.

    Raises
    ------
    UsageError      none of these, or several; there is no such file
    QueryError      a prompt is empty, or there is none
    """
    if bool(texts) == (file is not None):
        raise UsageError("give a prompt, or - for stdin, or --file (one of them)", fix=_EXAMPLE)
    if file is not None:
        if not file.exists() or file.is_dir():  # a pipe is read as it comes: <(command)
            raise UsageError(f"there is no file '{file}'", fix="give the path of a file of prompts")
        return _of_file(file)
    if list(texts) == ["-"]:
        return _lines(stdin_lines(), "stdin")
    if "-" in texts:
        raise UsageError("- reads all prompts from stdin (found other prompts beside it)", fix="drop them")
    if on_bad == "error" and not all(text.strip() for text in texts):
        raise QueryError("the prompt is empty (expected some text)", fix=_EXAMPLE)
    return (Prompt({"prompt": text}, ARGUMENTS, number) for number, text in enumerate(texts, 1))


def rows_or_prompts(
    session: Session,
    prompts: Iterator[Prompt],
    texts: Sequence[str],
    file: Path | None,
    given: Mapping[str, str | None],
) -> Iterator[Prompt]:
    """Return the prompts; of a classifier, the rows that `texts` name, or the examples of a file."""
    if session.model.table is None or list(texts) == ["-"]:
        return prompts
    from stride_cli.data.example_queries import asked_examples

    model: Any = session.model
    rows: list[str | None] = [*texts] or [None]
    queries = (
        query
        for row in rows
        for query in asked_examples(model, row, file, given["response"], given.get("instead"))
    )
    source = str(file) if file is not None else ARGUMENTS
    return (Prompt({"prompt": query}, source, number) for number, query in enumerate(queries, 1))


def _of_file(file: Path) -> Iterator[Prompt]:
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        yield from _lines(iter(lines.readline, ""), str(file))


def count_prompts(file: Path) -> int:
    """Count the lines of a file that are not blank; 0 of a pipe, which can be read once only."""
    if not file.is_file():
        return 0
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def stdin_lines() -> Iterator[str]:
    """Read lines as they arrive; a byte that is not UTF-8 stays in them, to be named with its line."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return iter(sys.stdin.readline, "")


def _lines(lines: Iterator[str], source: str) -> Iterator[Prompt]:
    count = 0
    for number, line in enumerate(lines, 1):
        line = (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")
        if not line.strip():
            continue
        count += 1
        name: str | None = None
        asked: Mapping[str, Any] | QueryError
        try:
            record = _record(line)
            name = prompt_id(record)
            asked = prompt_texts(record)
        except QueryError as error:
            asked = QueryError(f"{source}:{number}: {error.message}", fix=error.fix)
        yield Prompt(asked, source, number, name)
    if count == 0:
        raise QueryError(f"{source} holds no prompt", fix="one prompt a line")


def _record(line: str) -> dict[str, Any]:
    """Read what a line asks: a JSON object, a JSON string, or else a prompt as it stands."""
    first = line.lstrip()[0]
    if first not in '{"':
        return {"prompt": line}
    try:
        found = json_module.loads(line, parse_constant=refuse_constant)
    except RecursionError:
        raise QueryError("the line is JSON that is nested too deeply", fix='{"prompt": "…"}') from None
    except ValueError as error:
        if first == '"':
            return {"prompt": line}
        why = first_line(error).partition("; use sys.")[0]
        if isinstance(error, json_module.JSONDecodeError):  # its line is not the file's
            why = f"{error.msg} at character {error.pos + 1}"
        raise QueryError(
            f"the line is broken JSON: {why}", fix="one JSON object a line, or plain prompts"
        ) from None
    return found if isinstance(found, dict) else {"prompt": found}
