"""Read requests' bodies: JSON, checked key by key, as the command line checks its options."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stride_cli.attribution.options import QueryOptions
from stride_cli.characters import check_text, one_line, refuse_constant, shortened
from stride_cli.corpus.documents import type_name
from stride_cli.data.query_files import PROMPT_TEXTS, prompt_id, prompt_texts
from stride_cli.errors import QueryError, StrideError, UsageError, first_line
from stride_cli.options import Entry, entries
from stride_cli.serve.options import MOST_PROMPTS

# those of the command, and one that a terminal does not have: it shows an answer once, whole
OPTIONS: Mapping[str, Entry] = {
    name: each for name, each in entries(QueryOptions).items() if each.about.help or name == "passages"
}
_KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", list: "a list"}


@dataclass(frozen=True)
class Question:
    """A request that asks.

    Attributes:
        index: str or None        name of an index; None: the only one
        prompts: of "prompt" and perhaps "response", "span" and "instead"; or the error of one that cannot be
            asked
        ids: of each, where it gave one
        many: bool                 "prompts" was given, so that the answer is JSON Lines
        options: QueryOptions
        explain: bool              an explanation with the record
        rest: what else a request of its kind may hold
    """

    index: str | None
    prompts: list[Mapping[str, str] | StrideError]
    ids: list[str | None]
    many: bool
    options: QueryOptions
    explain: bool = False
    rest: Mapping[str, Any] = field(default_factory=dict)

    def single(self) -> Mapping[str, str]:
        """Return the only prompt; raises what is wrong with it."""
        if self.many:
            raise UsageError("'prompts' is for POST /query (expected 'prompt' here)", fix='{"prompt": "…"}')
        (prompt,) = self.prompts
        if isinstance(prompt, StrideError):
            raise prompt
        return prompt


def parse_json(body: bytes) -> dict[str, Any]:
    """Read a body, an object in JSON.

    Raises:
        UsageError      it is no JSON, or JSON of something else
    """
    try:
        found = json.loads(body.decode(), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise UsageError("the body is not UTF-8", fix="send JSON in UTF-8") from None
    except RecursionError:
        raise UsageError("the body is nested too deeply", fix='send {"prompt": "…"}') from None
    except ValueError as error:
        why = first_line(error).partition("; use sys.")[0]
        raise UsageError(f"the body is no JSON: {why}", fix='send {"prompt": "…"}') from None
    if not isinstance(found, dict):
        raise UsageError(f"the body is {type_name(found)} (expected an object)", fix='send {"prompt": "…"}')
    return found


def parse_question(
    body: Mapping[str, Any], defaults: QueryOptions, *, also: Collection[str] = ()
) -> Question:
    """Read a question from a request's object.

    Args:
        defaults: QueryOptions      of options that the request does not give
        also: keys that this request may have beside those of a question; they are in `rest` as they came

    Raises:
        UsageError      a key that there is not, or a value that cannot be
        QueryError      there is no prompt
    """
    known = [*PROMPT_TEXTS, "id", "index", "prompts", "explain", *OPTIONS, *also]
    for key in body:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            fix = f"did you mean '{near[0]}'?" if near else f"one of {', '.join(known)}"
            raise UsageError(f"there is no key {shortened(repr(one_line(key)), 60)}", fix=fix)
    given = {key: value for key, value in body.items() if value is not None}
    options = {name: option_value(OPTIONS[name], given[name]) for name in OPTIONS if name in given}
    texts = {key: given[key] for key in PROMPT_TEXTS if key in given}
    many = "prompts" in given
    if many == ("prompt" in given or "id" in given):
        raise QueryError("give 'prompt', or 'prompts' (one of them)", fix='{"prompt": "…"}')
    listed = given["prompts"] if many else [{**texts, "id": given.get("id")}]
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_PROMPTS:
        found = f"a list of {len(listed):,}" if isinstance(listed, list) else type_name(listed)
        raise UsageError(
            f"'prompts' is {found} (expected a list of 1 to {MOST_PROMPTS:,})",
            fix='{"prompts": [{"prompt": "…"}]}',
        )
    read = [_prompt(each, texts) for each in listed]
    return Question(
        index=_value(given, "index", str),
        prompts=[prompt for prompt, _ in read],
        ids=[name for _, name in read],
        many=many,
        options=replace(defaults, **options),
        explain=_value(given, "explain", bool) or False,
        rest={key: given[key] for key in also if key in given},
    )


def option_value(entry: Entry, value: Any) -> Any:
    """Check the value of an option, its type first."""
    kinds = [kind for kind in entry.kinds if kind in _KINDS]
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else value
    example = f"for example {json.dumps({entry.name: True if bool in kinds else entry.example})}"
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise UsageError(f"'{entry.name}' is {type_name(value)} (expected {wanted})", fix=example)
    entry.check(value, f"'{entry.name}'", example)
    return value


def text_value(body: Mapping[str, Any], key: str) -> str:
    """Return a text that a request has to give."""
    found = _value(body, key, str)
    if not found:
        raise UsageError(f"there is no '{key}'", fix=f'{{"{key}": "…"}}')
    check_text(found, f"'{key}'")
    return str(found)


def _prompt(record: Any, shared: Mapping[str, Any]) -> tuple[Mapping[str, str] | StrideError, str | None]:
    """Read a prompt and its id; the error of one that cannot be asked stands in its place."""
    name = None
    try:
        record = {"prompt": record} if isinstance(record, str) else record
        if not isinstance(record, dict):
            raise QueryError(f"a prompt is {type_name(record)} (expected an object)", fix='{"prompt": "…"}')
        name = prompt_id(record)
        return prompt_texts({**shared, **record}), name
    except StrideError as error:
        return error, name


def _value(given: Mapping[str, Any], key: str, kind: type) -> Any:
    value = given.get(key)
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"'{key}' is {type_name(value)} (expected {_KINDS[kind]})", fix=f"leave '{key}' out")
    return value
