"""Options that mean the same in every command of `stride evaluate` and in `stride baseline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Flags, find_index
from stride_cli.research.evaluation.options import BenchOptions, LdsOptions

if TYPE_CHECKING:
    from stride_cli.research.evaluation.bench import Bench

Measured = Annotated[dict[str, Any], Flags(BenchOptions)]
Compared = Annotated[dict[str, Any], Flags(LdsOptions)]
SharedMethods = Annotated[
    dict[str, Any],
    Flags(
        SharingOptions,
        workers={"help": "Run so many methods at a time, each in processes of its own; default: one."},
    ),
]


def open_bench(
    index: str | None,
    model: str | None,
    options: BenchOptions,
    device: str | None,
    dtype: str | None,
    *,
    alpha: float | None = None,
) -> Bench:
    """Index, truth and queries as the shared options name them."""
    from stride_cli.config import resolve
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.research.evaluation.bench import Bench

    general = resolve("general", {"model": model})
    where = WorkspacePath(find_index(index), general.model, device or "auto", dtype or "auto")
    return Bench(where, queries=options.queries, alpha=alpha, chat=options.chat)
