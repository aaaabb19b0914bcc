"""Options of `stride serve`; light to import."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.options import Options, option

PORT = 8517  # where that is free and no other is asked for: a page that is open stays good over a restart
LARGEST_BODY = 1 << 20
MOST_WAITING = 256  # requests that wait for the model; more are told to come again
MOST_PROMPTS = 10_000  # of one request


@dataclass(frozen=True)
class ServeOptions(Options):
    """Options of the address, and of who may ask."""

    host: str = option("127.0.0.1", "Address to listen on; the default is this machine alone.")
    port: int | None = option(
        None,
        f"Port to listen on, 0: any that is free. [{PORT}, or another if it is taken]",
        low=0,
        high=65535,
    )
    token: str | None = option(
        None, "Secret that programs send, 16 letters or more. [a random one, kept in the user's state]"
    )
    open: bool = option(False, "Open the page in the browser.")
