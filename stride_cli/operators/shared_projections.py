"""Projections for an index whose operators are there, by several workers: ranges as those of `shared_fit`."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.operators.projection_pass import ProjectionSettings, project_groups
from stride_cli.operators.projections import Projections
from stride_cli.operators.shared_fit import (
    PARTS,
    RANGES_A_WORKER,
    Counts,
    Crew,
    RangeProjector,
    RangeWorker,
    common_projections,
    make_room,
    part_of,
)
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader


@dataclass
class RangeProjecting(RangeWorker):
    """Projects ranges of chunks; beside what every `RangeWorker` has:

    Attributes
    ----------
    settings : ProjectionSettings
    number : of the index's operators: 0, or of a further checkpoint
    first : the first chunk that has no projection
    """

    settings: ProjectionSettings
    number: int
    first: int

    doing = "projecting ranges"

    def part(self, number: int) -> Path:
        """What is there once a range is done."""
        return self.folder / f"projected-{number}"

    def do(self, kind: str, number: int, count: int) -> None:
        from index_format.reader import Index

        model, chunks, _ = self._open()
        steered = SteeredModel.of(model, Operators.from_index(Index.open(self.place.index), self.number))
        plan = chunks.plan(self.settings.batch_tokens, np.arange(self.first, chunks.n_chunks))
        groups = part_of(plan, chunks.lengths, number, count)
        rows = np.sort(np.concatenate(groups)) if groups else np.zeros(0, np.int64)
        projector = RangeProjector(steered.gate_size, self.settings.size, rows, self.settings.seed)
        scratch = self.folder / f"range-{number}"
        scratch.mkdir(exist_ok=True)
        project_groups(steered, chunks, projector, groups, scratch, self.save_seconds)
        projector.write(self.folder)
        self.part(number).touch()
        shutil.rmtree(scratch)


def project_apart(
    crew: Crew,
    number: int,
    steered: SteeredModel,
    chunks: ChunkReader,
    settings: ProjectionSettings,
    known: Projections | None,
    scratch: Path,
    save_seconds: float,
) -> Projections:
    """`fit_projections` by a crew; goes on with the ranges that are missing.

    Parameters
    ----------
    number : of the index's operators: 0, or of a further checkpoint
    steered : SteeredModel      by these operators
    scratch : Path              that all workers see

    Raises
    ------
    NumericalError      a loss is not finite
    StrideError         a worker died again and again over the same work
    """
    folder, n_chunks = scratch.absolute() / "shared", chunks.n_chunks
    folder.mkdir(exist_ok=True)
    first = 0 if known is None else len(known)
    count = Counts(folder).of("project", lambda: RANGES_A_WORKER * (crew.workers or PARTS))
    make_room(folder, n_chunks, settings.size)
    if known is not None:
        for name, values in (("codes", known.codes), ("step", known.step)):
            with (folder / name).open("r+b") as file:
                pieces = [values] if isinstance(values, np.ndarray) else values.shards
                for piece in pieces:
                    file.write(np.ascontiguousarray(piece).tobytes())
    worker = RangeProjecting(
        crew.place,
        folder,
        crew.threads,
        save_seconds,
        4 * steered.model.n_parameters,
        settings=settings,
        number=number,
        first=first,
    )
    missing = [part for part in range(count) if not worker.part(part).exists()]
    finished = crew.engine(worker, [[("project", part, count)] for part in missing], crew.workers)
    with progress("projecting chunks", count, unit="ranges") as bar, contextlib.closing(finished):
        bar.advance(count - len(missing))
        for _ in finished:
            bar.advance()
    return common_projections(folder, n_chunks, settings.size, settings.seed)
