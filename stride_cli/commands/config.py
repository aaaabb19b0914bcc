"""`stride config`: what the settings are, and where each comes from."""

from __future__ import annotations

import os

from stride_cli.commands.options import Json
from stride_cli.commands.panels import CommandLine

app = CommandLine(help="Settings: stride.yaml, STRIDE_* variables, flags.")

EXAMPLE = """\b
Examples:
  stride config show
  STRIDE_QUERY_TOP=20 stride config show --json | jq 'select(.source != "default")'
"""


@app.callback()
def _group() -> None:
    """Settings come from stride.yaml in the working directory, then STRIDE_* variables, then flags."""


@app.command(short_help="Every setting, its value and where it comes from.", epilog=EXAMPLE)
def show(json: Json = None) -> None:
    """Every setting, its value, and where the value comes from; and where compiled kernels are kept.

    Kernels can be kept elsewhere (NUMBA_CACHE_DIR), and their directory can be removed at any time: they are
    compiled again when they are needed.
    """
    from stride_cli.config import Setting, settings
    from stride_cli.output import emit, wants_json
    from stride_cli.startup import kernel_cache

    # no setting of stride.yaml, but users look for it
    source = "NUMBA_CACHE_DIR" if os.environ.get("NUMBA_CACHE_DIR") else "default"
    value = str(place) if (place := kernel_cache()) else None
    kernels = Setting(schema="stride.setting/1", key="kernels.directory", value=value, source=source)
    found = [*settings(), kernels]
    if wants_json(json):
        for setting in found:
            emit(setting)
        return
    from stride_cli.commands.tables import print_table

    rows = [
        [each["key"], "–" if each["value"] is None else str(each["value"]), each["source"]] for each in found
    ]
    print_table("settings", ["setting", "value", "source"], rows)
