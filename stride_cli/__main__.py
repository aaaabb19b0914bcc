"""Entry point of the `stride` command."""

from __future__ import annotations

from stride_cli.commands.app import main

if __name__ == "__main__":
    main()
