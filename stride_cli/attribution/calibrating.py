"""A session's answers get verdicts, and influences in nats where that is asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stride_cli.attribution.session import Session
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.schema.train_records import CalibrationRecord


@progress("calibrating")
def calibrate(session: Session, options: CalibrationOptions | None = None) -> CalibrationRecord:
    """Ask an index prompts about which no corpus says anything; from then on its answers have verdicts.

    What was there is replaced, but for what influences are in nats, which is measured where options ask for
    it (`retrain`). The session's answers have verdicts too.

    Raises
    ------
    UsageError         the index is of a classifier
    IndexReadOnly      it is a URL or a zip file
    """
    from stride_cli.attribution.calibration import calibrate as ask
    from stride_cli.attribution.options import CalibrationOptions

    begun = time.perf_counter()
    options, attributor = options or CalibrationOptions(), session.attributor()
    scale = session.calibration.scale if session.calibration else None
    if options.retrain:
        from index_format.location import local_directory
        from stride_cli.attribution.scale import measure_scale
        from stride_cli.models.kinds import refuse_classifier

        refuse_classifier(session.index, "influences in nats", fix="leave out --retrain")
        local_directory(session.index.path)  # refused before hours of training
        scale = measure_scale(attributor, options.retrain)
    session.calibration = ask(attributor, options.nulls, scale)
    return {
        "schema": "stride.calibration/1",
        "index": str(session.index.path),
        "nulls": session.calibration.losses.shape[1],
        "median_loss": session.calibration.median_loss,
        "scale": None if scale is None else scale.to_record(),
        "sure": scale is not None and scale.sure,
        "seconds": time.perf_counter() - begun,
    }
