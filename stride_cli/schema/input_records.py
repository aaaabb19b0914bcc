"""The record that commands write of input that cannot be used, with ``--on-bad record``."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict


class BadInputRecord(TypedDict):
    schema: Literal["stride.bad_input/1"]
    source: Annotated[str, 'the file; "stdin", or "arguments" of the command line']
    line: Annotated[int | None, "the line, from 1 (of arguments: which of them); null where it has none"]
    id: NotRequired[Annotated[str, "the prompt's or item's id, where it gave one"]]
    message: Annotated[str, "what is wrong"]
    fix: Annotated[str | None, "what to do about it"]
