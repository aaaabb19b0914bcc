"""`stride serve`: a local page and an interface for programs, with indexes that stay open."""

from __future__ import annotations

import webbrowser
from dataclasses import replace
from typing import Annotated

import typer

from stride_cli.attribution.options import QueryOptions
from stride_cli.commands.completion import complete_index
from stride_cli.commands.options import Flags, Held, find_index, with_flags
from stride_cli.errors import UsageError
from stride_cli.serve.options import ServeOptions

EXAMPLE = """\b
Examples:
  stride serve
  stride serve run.stride other.stride --port 8600 --open
  curl -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" localhost:8517/query \\
    -d '{"prompt": "The French Revolution began in"}'
  stride serve run.stride --token "$(openssl rand -hex 16)" --top 5
"""


@with_flags
def serve(
    indexes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Indexes to serve. [the one that the settings name, or the only *.stride here]",
            autocompletion=complete_index,
        ),
    ] = None,
    *,
    listening: Annotated[ServeOptions, Flags(ServeOptions, first=("port", "host", "token", "open"))],
    options: Annotated[
        QueryOptions,
        Flags(
            QueryOptions,
            only=("top", "bottom"),
            top={"help": "Supporting documents, unless a request says otherwise. [10]"},
        ),
    ],
    where: Held,
) -> None:
    """Serve a local page that asks indexes, and the same as a JSON interface; models stay loaded.

    A link is told on stderr once the indexes are open. It lets one browser in, which then knows the secret as
    a cookie; programs send it as Authorization: Bearer (--token). The page's own address holds no secret.
    Only this machine can reach it, unless --host says otherwise. Ctrl-C ends it.
    """
    from stride_cli.output import note
    from stride_cli.serve.running import Server

    paths = [find_index(index) for index in indexes] if indexes else [find_index(None)]
    if where.model.place is not None and len(paths) > 1:
        several = "--model is for one index (found several: each has its own)"
        raise UsageError(several, fix="leave it out, or serve one")
    note(f"opening {', '.join(str(path) for path in paths)} …")
    server = Server([replace(where, index=path) for path in paths], listening, options)

    def started() -> None:
        if not server.address.local:
            note(
                "warning: other machines can reach this server, and read what is sent to it: the secret is "
                "all that keeps them out"
            )
        link = server.address.link()
        note(f"serving at {link} (lets one browser in, once; Ctrl-C ends it)")
        if listening.open:
            webbrowser.open(link)

    server.run(started=started)
