"""Entry point of the `stride` command."""

from __future__ import annotations

import signal
from typing import NoReturn

from stride_cli.interrupts import at_once


def main() -> NoReturn:
    """Run the command line; see `stride_cli.commands.app.main`.

    What that imports is imported here, so that Ctrl-C then leaves one line, as it does ever after.
    """
    with at_once(where=(signal.default_int_handler,)):
        from stride_cli.commands.app import main as run
    run()


if __name__ == "__main__":
    main()
