"""`stride calibrate`: ask an index what answers look like where the right answer is "nothing"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from stride_cli.attribution.options import CalibrationOptions
from stride_cli.commands.options import Asked, Flags, Json, with_flags

if TYPE_CHECKING:
    from stride_cli.attribution.nats import CalibrationRecord

EXAMPLE = """\b
Examples:
  stride calibrate --index run.stride
  stride calibrate --index run.stride --nulls 400
  stride calibrate --index run.stride --retrain 3
"""


@with_flags
def calibrate(
    *, options: Annotated[CalibrationOptions, Flags(CalibrationOptions)], where: Asked, json: Json = None
) -> None:
    """Ask prompts about which no corpus says anything, so that answers can be told from theirs.

    stride train does this by itself; after stride index append it is to be done again.
    """
    from stride_cli import api
    from stride_cli.output import emit, note, wants_json

    session = api.open(where, recalibrate=True)
    record: CalibrationRecord = session.calibrate(options)
    if wants_json(json):
        emit(record)
        return
    scale: Any = record["scale"]
    if scale:
        found = f"of {scale['models']} models trained without a tenth of the documents"
        found += f" (r = {scale['correlation']:.2f})"
        if record["sure"]:
            those = "" if session.model.pretrained else " where tokens count alike (as with --span)"
            note(f"influences are in nats now{those}, by {scale['pairs']:,} losses {found}")
            for forecast, low, high in (scale["band"] or [])[-1:]:
                note(f"nine in ten rises forecast as {forecast:.2g} nats are {low:.2g} to {high:.2g}")
        else:
            note(f"influences stay relative: they do not predict the losses {found}")
    note(
        f"asked {record['nulls']:,} prompts that the corpus says nothing of, unrelated ones and near misses; "
        f"of responses to the former the model's median loss is {record['median_loss']:.2f} nats a token. "
        "Answers now say whether they are clear, weak or guesses"
    )
