"""Prompts that a command is asked: from its arguments, a file or stdin; and what becomes of bad ones."""

from __future__ import annotations

import json as json_module
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stride_cli import output
from stride_cli.characters import one_line, shortened
from stride_cli.corpus.documents import type_name
from stride_cli.corpus.sources import SKIPS_TOLD
from stride_cli.data.query_text import check_text
from stride_cli.errors import EXIT_USAGE, QueryError, StrideError, UsageError, first_line, located

if TYPE_CHECKING:
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.attribution.session import Session
    from stride_cli.attribution.sharing import SharedSession
    from stride_cli.data.queries import Query
    from stride_cli.schema.input_records import BadInputRecord
    from stride_cli.serve.client import ServedSession

ARGUMENTS = "arguments"
FORMAT = (
    'JSON Lines of {"prompt", "response"?, "span"?, "instead"?, "id"?}, or a prompt a line; in quotes ("…") '
    "it is a JSON string."
)
TEXTS = ("prompt", "response", "span", "instead")  # of a prompt's record
_MAY_BE_JSON = ("{", "[", '"', "-", *"0123456789", "t", "f", "n")


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


def _without_advice(fix: str | None) -> str | None:
    """A remedy without the one that is in use: to leave such lines out."""
    return fix and re.sub(r",? or leave (such lines|it) out with --on-bad skip$", "", fix)


class BadInput:
    """What becomes of input that cannot be used: the first ends the command, or all are told or recorded.

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
        """One that cannot be used, whose error says where it is; raises it where it ends the command."""
        if self.stops:
            raise error
        self.count += 1
        if self._records:
            record: BadInputRecord = {
                "schema": "stride.bad_input/1",
                "source": source,
                "line": line,
                "message": error.message,
                "fix": _without_advice(error.fix),
            }
            if id is not None:
                record["id"] = id
            self.emit(record)
        elif self.count <= SKIPS_TOLD:
            fix = _without_advice(error.fix)
            output.note(f"skipped {error.message}" + (f"\n  fix: {fix}" if fix else ""))

    def leave(self) -> None:
        """At the end: exit code 2 where there was one."""
        if self.count:
            done = "recorded" if self._records else "skipped"
            output.note(f"{done} {self.count:,} bad {self._what}{'s' * (self.count > 1)} in all")
            raise typer.Exit(EXIT_USAGE)


def answered(
    session: Session | SharedSession | ServedSession,
    prompts: Iterable[Prompt],
    options: QueryOptions,
    bad: BadInput,
    *,
    given: Mapping[str, Any],
    together: int | None = None,
    total: int | None = None,
) -> Iterator[tuple[Prompt, Any]]:
    """Every prompt with its answer, in order, without those that `bad` takes.

    Parameters
    ----------
    given : "response", "span" and "instead" of prompts that have none of their own
    together : see `Session.query_all`
    total : how many prompts there are, where other processes share them
    """
    from stride_cli.attribution.answer import Refused

    waiting: deque[Prompt] = deque()  # for their outcome

    def asked() -> Iterator[Mapping[str, Any] | StrideError]:
        for prompt in prompts:
            waiting.append(prompt)
            yield prompt.asked if isinstance(prompt.asked, StrideError) else {**given, **prompt.asked}

    known: dict[str, Any] = {"together": together} if total is None else {"total": total}
    for outcome in session.outcomes(asked(), options, stop=bad.stops, **known):
        prompt = waiting.popleft()
        if isinstance(outcome, Refused):
            _take(bad, prompt, outcome.error)
        else:
            yield prompt, outcome


def answered_as_one(
    session: Session,
    prompts: Iterable[Prompt],
    options: QueryOptions,
    bad: BadInput,
    *,
    given: Mapping[str, Any],
) -> Iterator[tuple[Prompt, Any]]:
    """All prompts, without those that `bad` takes, with the one answer to them together.

    Parameters
    ----------
    given : as of `answered`

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


def read_prompts(text: str | None, file: Path | None) -> Iterator[Prompt]:
    """Prompts one at a time, as they arrive: `text`, or lines of stdin where it is "-", or of a file.

    Raises
    ------
    UsageError      there is no such file
    QueryError      there is no prompt in it
    """
    if text is not None and text != "-":
        yield Prompt({"prompt": text}, ARGUMENTS, 1)
        return
    if text == "-":
        yield from _lines(stdin_lines(), "stdin")
        return
    assert file is not None
    if not file.exists() or file.is_dir():  # a pipe is read as it comes: <(command)
        raise UsageError(f"there is no file '{file}'", fix="give the path of a file of prompts")
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        yield from _lines(iter(lines.readline, ""), str(file))


def count_prompts(file: Path) -> int:
    """How many lines of a file have a prompt, or something else that is not blank."""
    if not file.is_file():
        return 0  # `read_prompts` says so
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def read_rows(queries: Iterable[Query], file: Path | None) -> Iterator[Prompt]:
    """Examples of a classifier, numbered as they come."""
    source = str(file) if file is not None else ARGUMENTS
    for number, query in enumerate(queries, 1):
        yield Prompt({"prompt": query}, source, number)


def stdin_lines() -> Iterator[str]:
    """Lines as they arrive; a byte that is not UTF-8 stays in them, to be named with its line."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return iter(sys.stdin.readline, "")


def _lines(lines: Iterator[str], source: str) -> Iterator[Prompt]:
    count = 0
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        count += 1
        name: str | None = None
        asked: Mapping[str, Any] | QueryError
        try:
            record = _record(line)
            name = _id(record)
            asked = _checked(record)
        except QueryError as error:
            asked = QueryError(f"{source}:{number}: {error.message}", fix=error.fix)
        yield Prompt(asked, source, number, name)
    if count == 0:
        raise QueryError(f"{source} holds no prompt", fix="one prompt a line")


def _record(line: str) -> dict[str, Any]:
    """What a line asks. One that is no JSON is a prompt as it stands, but for a broken object.

    What is other JSON, [1] or 1984, is refused: it would be guesswork what was meant.
    """
    if not line.lstrip().startswith(_MAY_BE_JSON):
        return {"prompt": line}
    is_object = line.lstrip().startswith("{")
    try:
        found = json_module.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise QueryError("the line is JSON that is nested too deeply", fix='{"prompt": "…"}') from None
    except ValueError as error:
        if not is_object:
            return {"prompt": line}
        why = first_line(error).partition("; use sys.")[0]
        if isinstance(error, json_module.JSONDecodeError):  # its line is not the file's
            why = f"{error.msg} at character {error.pos + 1}"
        raise QueryError(
            f"the line is broken JSON: {why}", fix="one JSON object a line, or plain prompts"
        ) from None
    if isinstance(found, dict):
        return found
    if isinstance(found, str):
        return {"prompt": found}
    raise QueryError(
        f"the line is JSON, {type_name(found)} (expected an object, a string, or a prompt that is no JSON)",
        fix=f"to ask it as it stands: {shortened(json_module.dumps({'prompt': line.strip()}), 200)}",
    )


def _id(record: dict[str, Any]) -> str | None:
    """The id of a prompt, as those of documents: a string, or a number that is written as one."""
    name = record.get("id")
    if name is None or isinstance(name, str):
        if name is not None:
            check_text(name, "'id'")
        return name
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    raise QueryError(f"'id' is {type_name(name)} (expected a string or an integer)", fix='{"id": "a", …}')


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """What is asked by a record, as texts."""
    found = {key: record[key] for key in TEXTS if record.get(key) is not None}
    if "prompt" not in found:
        keys = one_line(", ".join(sorted(record)))
        raise QueryError(
            f"there is no 'prompt' (found {shortened(keys, 200) or 'nothing'})", fix='{"prompt": "…"}'
        )
    for key, value in found.items():
        if not isinstance(value, str):
            raise QueryError(f"'{key}' is {type_name(value)} (expected a string)", fix='{"prompt": "…"}')
        check_text(value, f"'{key}'")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
