"""Entry point of the `stride` command."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; see `stride_cli.commands.app.main`.

    What that imports is imported here: Ctrl-C at any moment ends with one line, and no traceback.
    """
    try:
        from stride_cli.commands.app import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
