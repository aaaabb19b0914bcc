"""`stride schema`: the keys of every record on stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from stride_cli.commands.completion import complete_record
from stride_cli.errors import UsageError

EXAMPLE = """\b
Examples:
  stride schema
  stride schema stride.answer/1 | jq .properties.hits
"""


def schema(
    name: Annotated[
        str | None,
        typer.Argument(help="A record's name; all of them without one.", autocompletion=complete_record),
    ] = None,
) -> None:
    """Print the JSON Schema of the records that commands write: one line each."""
    from stride_cli.output import emit
    from stride_cli.schema import json_schema, records

    if name is not None and name not in records():
        raise UsageError(f"there is no record '{name}'", fix=f"one of {', '.join(records())}")
    for each in [name] if name is not None else records():
        emit(json_schema(each))
