"""What `stride export` can be told; light to import."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.options import Options, option

TARGETS = ("sqlite", "csv", "parquet")


@dataclass(frozen=True)
class ExportOptions(Options):
    """What saved records become; None: as the name of the file ends."""

    to: str | None = option(
        None, "Default: as the name of the file to write ends.", choices=TARGETS, listed=True
    )
