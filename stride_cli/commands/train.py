"""`stride train`: fit the steering operators of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import CalibrationOptions
from stride_cli.commands.options import Fitted, Flags, Json, with_flags
from stride_cli.commands.tables import next_step
from stride_cli.errors import UsageError
from stride_cli.operators.options import FITS, FLAT, FitRunOptions, TrainOptions, fit_of, train_options
from stride_cli.options import MORE, entries

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath

EXAMPLE = """\b
Examples:
  stride train --index run.stride
  stride train --index run.stride --dry-run
  stride train --index run.stride --fit sgd --steps 2000
  stride train --index run.stride --recipe paper
  stride train --index run.stride --project 512
  stride train --index run.stride --checkpoints model/checkpoints/step-*
"""

# what only research changes: options of `stride:` in stride baseline, and of `SgdOptions` and `ClosedOptions`
_RESEARCH = ("stability", "variant", "fidelity", "linearity", "lr", "buckets", "curvature")


@with_flags
def train(
    more_checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="CHECKPOINT", hidden=True, show_default=False)
    ] = None,
    *,
    given: Annotated[dict[str, Any], Flags(*FLAT, leave_out=_RESEARCH)],
    where: Fitted,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace operators that are there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time the first chunks, and say what a fit will take.")
    ] = False,
    running: Annotated[FitRunOptions, Flags(FitRunOptions)],
    nulls: Annotated[CalibrationOptions, Flags(CalibrationOptions, only=("nulls",), nulls={"panel": MORE})],
    no_calibration: Annotated[
        bool,
        typer.Option(
            "--no-calibration",
            help="Ask no unrelated prompts: answers will have no verdict.",
            rich_help_panel=MORE,
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Fit one light steering operator per subset of the index, on the frozen model's activations.

    An interrupted fit continues where it was when the same command is run again.
    """
    from stride_cli import api
    from stride_cli.output import emit, note, wants_json

    if more_checkpoints and "checkpoints" not in given:
        raise UsageError(
            f"unexpected argument '{more_checkpoints[0]}'",
            fix="an index is given with --index, checkpoints with --checkpoints",
        )
    given |= {"checkpoints": [*given["checkpoints"], *more_checkpoints]} if more_checkpoints else {}
    options = train_settings(given)
    if dry_run:
        return _estimate(where, options, 0 if no_calibration else nulls.nulls, json)
    asked = None if no_calibration else nulls
    result = api.train(where, options, overwrite=overwrite, run=running, calibration=asked)
    if wants_json(json):
        emit(result)
        return
    kept = f", {result['project']:,} bytes of every chunk" if result["project"] else ""
    note(
        f"fitted {result['subsets']:,} operators ({result['fit']}, {result['space']}, layer "
        f"{result['layer']}, {result['gate_size']:,} gates each{kept}) in {result['seconds']['fit']:.1f} s; "
        f"coverage {result['coverage']:.0%}"
    )
    for entry in result["checkpoints"]:
        note(f"and of checkpoint {entry['path']} (layer {entry['layer']}) in {entry['seconds']:.1f} s")
    next_step("stride", "query", "…", "--index", str(where.index))


def _estimate(where: WorkspacePath, options: TrainOptions, nulls: int, json: bool | None) -> None:
    """Print what a fit will take."""
    from index_format.reader import Index
    from stride_cli.attribution.calibration import estimate_train
    from stride_cli.commands.tables import size
    from stride_cli.data.workspace import open_model
    from stride_cli.output import duration, emit, progress, wants_json

    index = Index.open(where.index)
    model = open_model(index, where.model)
    with progress("timing the first chunks"):
        found = estimate_train(index, model, options, nulls)
    if wants_json(json):
        emit(found)
        return
    seconds = found["seconds"]
    print(
        f"bases {duration(seconds['bases'])}, corpus {duration(seconds['corpus'])}, null prompts "
        f"{duration(seconds['calibration'])}; about {size(found['memory'])} of memory, operators and "
        f"projections about {size(found['bytes'])} on disk (timed on {found['timed_tokens']:,} of "
        f"{found['tokens']:,} tokens)"
    )


def train_settings(given: dict[str, Any] | None = None) -> TrainOptions:
    """Take options from flags, and from settings where flags say nothing.

    Where a flag says which fit, settings of the other one are passed over.
    """
    from stride_cli.config import name_of, settings

    given = given or {}
    written = {name_of(found): found for found in settings("train") if found["source"] != "default"}
    values = {name: found["value"] for name, found in written.items() if name in entries(*FLAT)} | given
    if "fit" in given or "recipe" in given:
        own = entries(FITS[fit_of(values.get("fit") if "fit" in given else None, values.get("recipe"))])
        values = {name: value for name, value in values.items() if name in given or name in own}

    def called(name: str, flag: str) -> str:
        return flag if name in given else f"{written[name]['key']} ({written[name]['source']})"

    return train_options(called=called, **values)
