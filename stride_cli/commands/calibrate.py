"""`stride calibrate`: ask an index what answers look like where the right answer is "nothing"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from stride_cli.attribution.options import CalibrationOptions
from stride_cli.commands.options import (
    Device,
    Dtype,
    Flags,
    IndexPath,
    Json,
    ModelPath,
    find_index,
    with_flags,
)

if TYPE_CHECKING:
    from stride_cli.schema.train_records import CalibrationRecord

EXAMPLE = """\b
Examples:
  stride calibrate --index run.stride
  stride calibrate --index run.stride --nulls 400
  stride calibrate --index run.stride --retrain 3
"""


@with_flags
def calibrate(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    given: Annotated[dict[str, Any], Flags(CalibrationOptions)],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Ask prompts about which no corpus says anything, so that answers can be told from theirs.

    stride train does this by itself; after stride index append it is to be done again.
    """
    from stride_cli import api
    from stride_cli.config import resolve
    from stride_cli.output import emit, note, wants_json

    options = CalibrationOptions(resolve("train", given).nulls, given.get("retrain", 0))
    path = find_index(index)
    general = resolve("general", {"model": model})
    chosen = resolve("query", {"device": device, "dtype": dtype})
    session = api.Session.open(
        path, model_path=general.model, device=chosen.device, dtype=chosen.dtype, recalibrate=True
    )
    record: CalibrationRecord = api.calibrate(session, options)
    if wants_json(json):
        emit(record)
        return
    if scale := record["scale"]:
        found = f"of {scale['models']} models trained without a tenth of the documents"
        found += f" (r = {scale['correlation']:.2f})"
        if record["sure"]:
            error = scale["error"] / (scale["slope"] or scale["ceiling"] or 0.0)
            note(f"influences are in nats now, ± {error:.0%}, by {scale['pairs']:,} losses {found}")
        else:
            note(f"influences stay relative: they do not predict the losses {found}")
    note(
        f"asked {record['nulls']:,} unrelated prompts, of whose responses the model's median loss is "
        f"{record['median_loss']:.2f} nats a token; answers now say whether they are clear, weak or guesses"
    )
