"""The pass over the corpus: gradients added up over subsets, and projected, here or by several workers.

With workers, each range of the chunks is done by whichever worker is free, and this process adds the ranges
in their own order: the same ranges give the same bits, whoever made them and when. Batches are those of one
process, so that chunks' gradients and projections are, too.

What is done lies in the fit's scratch directory, which all workers see:

    parts.json         how many ranges there are; a pass that is gone on with keeps them
    before.pt          initial-model residuals, where they are known (`initial_residuals`)
    spaces.pt          the bases
    range-I/           what range I goes on from when its worker dies (as of a pass in one process)
    sums-I.pt          M G of range I, whole
    codes, step        projections of all chunks, each range's written in its place
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from index_format.durable import replace_file
from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.gradient_sums import CorpusSums, PassSettings, accumulate, plan_from
from stride_cli.operators.projections import Projections, Projector, make_room
from stride_cli.operators.saving import SavedState, save_atomically
from stride_cli.operators.steered_model import SteeredModel, keep_spaces, kept_spaces
from stride_cli.output import note, progress
from stride_cli.parallel import Workers, opened_once

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.models.spec import ModelSpec

_RANGES_A_WORKER = 4  # so that no worker waits long for the last
_WORKERS = 16  # taken for the number of a cluster's
_LARGE_SUMS = 64 << 20  # bytes: from there on a range has so many chunks of every subset, where it can be
_MEMBERS_A_RANGE = 8
_SUMS_BYTES = 4 << 30  # of all ranges' sums on disk, unless there are workers that would have none


@dataclass(frozen=True)
class ModelPlace:
    """Paths with which another process opens the model and the index of a fit.

    Attributes
    ----------
    index : Path
    digest : of the index
    model : ModelSpec      of the index's own; without a path: where the index says
    checkpoint : path of a further checkpoint, to be fitted in its place
    design_seed : of that checkpoint's subsets
    """

    index: Path
    digest: str
    model: ModelSpec
    checkpoint: str | None = None
    design_seed: int | None = None

    def open(self) -> tuple[AttributableModel, ChunkReader, np.ndarray]:
        """Open the model, the chunks, and the subsets (n, d) of each; raises as `open_model`."""
        from index_format.reader import Index
        from stride_cli.data.workspace import open_model
        from stride_cli.models.loading import Opener
        from stride_cli.operators.designs import Designs

        index = Index.open(self.index)
        model = open_model(index, self.model)
        if self.checkpoint is not None:
            model = Opener.like(model).load(self.checkpoint)
        return model, ChunkReader(index, model), np.asarray(Designs.of(index, self.design_seed).columns)


@dataclass(frozen=True)
class PassWorkers:
    """Workers that go over the corpus.

    Attributes
    ----------
    place : ModelPlace      how workers open what they need
    engine : "local" or "ray"
    count : at the same time; None: as many as the cluster has room for
    threads : of each
    free : bytes of memory that they have together, where it is known
    """

    place: ModelPlace
    engine: str = "local"
    count: int | None = None
    threads: int = 1
    free: int | None = None

    def at(self, checkpoint: str, design_seed: int) -> PassWorkers:
        """Let the same workers open a further checkpoint."""
        return replace(self, place=replace(self.place, checkpoint=checkpoint, design_seed=design_seed))


def go_over_corpus(
    steered: SteeredModel,
    chunks: ChunkReader,
    settings: PassSettings,
    *,
    design: tuple[np.ndarray, int] | None = None,
    known: Projections | None = None,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
    workers: PassWorkers | None = None,
) -> tuple[CorpusSums, Projections | None]:
    """Go over all chunks once, or over those that have no projection.

    Parameters
    ----------
    design : ((n, d) unsigned, K), optional    the subsets of each chunk, of K; None: nothing is added up
    known : Projections, optional           of the first chunks, by the same folding
    scratch : directory, optional           where an interrupted pass continues from
    save_seconds : float                    how often the pass is saved there
    workers : PassWorkers, optional         who goes over the corpus, with a `scratch` that they see; default:
                                            this process

    Raises
    ------
    NumericalError      a loss is not finite
    StrideError         a worker died again and again over the same work
    """
    if workers is not None:
        assert scratch is not None
        return _by_workers(workers, steered, chunks, settings, design, known, scratch, save_seconds)
    columns, n_subsets = design or (None, 0)
    projector = None
    if settings.project:
        size = settings.project
        projector = Projector(steered.gate_size, size, chunks.n_chunks, settings.seed, known, scratch)
    plan = plan_from(chunks, settings.batch_tokens, 0 if known is None else len(known))
    saved = SavedState(None if scratch is None else scratch / "closed-pass.pt", save_seconds)
    found = accumulate(steered, chunks, plan, columns, n_subsets, projector, saved)
    return found, None if projector is None else projector.projections()


@dataclass(frozen=True)
class RangeTask:
    """A range of chunks, as a worker goes over it.

    Attributes
    ----------
    place : ModelPlace
    folder : Path               where ranges go, and where what they need lies
    settings : PassSettings
    n_subsets : K; 0: nothing is added up
    first : the first chunk that has no projection
    count : ranges
    save_seconds : how often an unfinished range is saved
    """

    place: Any
    folder: Path
    settings: PassSettings
    n_subsets: int
    first: int
    count: int
    save_seconds: float

    def __call__(self, number: int) -> None:
        """Write the sums and projections of range `number`."""
        target = self.folder / f"sums-{number}.pt"
        if target.exists():  # of an earlier run, or its worker died between this and its answer
            return
        # 1. What the main process left: residuals and bases, and which chunks are this range
        model, chunks, columns = opened_once(self.place, self.place.open)
        before = self.folder / "before.pt"
        chunks.before = None
        if before.exists():
            chunks.before = torch.load(before, weights_only=True, mmap=True)["before"].numpy()
        steered = kept_spaces(model, self.folder / "spaces.pt")
        plan = part_of(
            plan_from(chunks, self.settings.batch_tokens, self.first), chunks.lengths, number, self.count
        )
        # 2. The pass over them, gone on with where a worker that died has left it
        projector = None
        if size := self.settings.project:
            rows = np.sort(np.concatenate(plan)) if plan else np.zeros(0, np.int64)
            projector = RangeProjector(steered.gate_size, size, rows, self.settings.seed)
        scratch = self.folder / f"range-{number}"
        scratch.mkdir(exist_ok=True)
        saved = SavedState(scratch / "closed-pass.pt", self.save_seconds)
        found = accumulate(
            steered, chunks, plan, columns if self.n_subsets else None, self.n_subsets, projector, saved
        )
        # 3. Projections first: once the sums are there, the range is done
        if projector is not None:
            projector.write(self.folder)
        save_atomically({"sums": found.sums, "loss": found.loss, "scored": found.scored}, target)
        shutil.rmtree(scratch)


def _by_workers(
    workers: PassWorkers,
    steered: SteeredModel,
    chunks: ChunkReader,
    settings: PassSettings,
    design: tuple[np.ndarray, int] | None,
    known: Projections | None,
    scratch: Path,
    save_seconds: float,
) -> tuple[CorpusSums, Projections | None]:
    """Go over the corpus by workers; an interrupted pass goes on with the ranges that are missing.

    Parameters
    ----------
    steered : SteeredModel         of the model that workers open
    design : as of `go_over_corpus`; workers read the subsets themselves
    scratch : Path                 that all workers see
    """
    columns, n_subsets = design or (None, 0)
    folder = scratch.absolute() / "shared"
    folder.mkdir(exist_ok=True)
    # 1. What workers need: bases, initial-model residuals, room for projections
    keep_spaces(steered, folder / "spaces.pt")
    if steered.averaged and chunks.before is not None:
        save_atomically({"before": torch.from_numpy(np.array(chunks.before))}, folder / "before.pt")
    if settings.project:
        make_room(folder, chunks.n_chunks, settings.project)
    if known is not None:
        for name, values in (("codes", known.codes), ("step", known.step)):
            with (folder / name).open("r+b") as file:
                for piece in [values] if isinstance(values, np.ndarray) else values.shards:
                    file.write(np.ascontiguousarray(piece).tobytes())
    # 2. The ranges: their sums are K × p numbers each, on disk until they are added up here, in order
    need = 4 * n_subsets * steered.gate_size
    degree = 0 if columns is None else columns.shape[1]
    count = _range_count(folder, workers, chunks, settings, need, degree / max(1, n_subsets))
    if n_subsets:
        _tell(workers, need, count)
    first = 0 if known is None else len(known)
    task = RangeTask(workers.place, folder, settings, n_subsets, first, count, save_seconds)
    device = workers.place.model.device
    sums: list[torch.Tensor] = []
    loss, scored = 0.0, 0
    with (
        Workers(
            task,
            workers.count,
            engine=workers.engine,
            threads=workers.threads,
            device=device,
            peak_bytes=4 * steered.model.n_parameters,
        ) as team,
        progress("fitting operators" if n_subsets else "projecting chunks", count, unit="ranges") as bar,
    ):
        for number, _ in enumerate(team.in_order(range(count))):
            state = torch.load(folder / f"sums-{number}.pt", weights_only=True, mmap=True)
            if number == 0:
                sums = [own.clone() for own in state["sums"]]
            else:
                for total, own in zip(sums, state["sums"], strict=True):
                    total.add_(own)
            loss, scored = loss + state["loss"], scored + state["scored"]
            bar.advance()
    projections = None
    if size := settings.project:
        codes = np.memmap(folder / "codes", np.uint8, "r", shape=(chunks.n_chunks, size))
        projections = Projections(codes, np.fromfile(folder / "step", np.float32), settings.seed)
    return CorpusSums(sums, loss, scored), projections


def _range_count(
    folder: Path, workers: PassWorkers, chunks: ChunkReader, settings: PassSettings, need: int, share: float
) -> int:
    """Choose how many ranges there are, or read it: as many as when the pass was begun.

    Parameters
    ----------
    need : bytes of one range's sums
    share : of the chunks, that a subset holds
    """
    path = folder / "parts.json"
    if path.exists():
        return int(json.loads(path.read_text())["ranges"])
    count = workers.count or _WORKERS
    # as many for every worker, so that none is idle at the end, and few enough for the disk
    each = min(_RANGES_A_WORKER, _SUMS_BYTES // max(1, need) // count)
    if need > _LARGE_SUMS:
        # to make, write and read K × p numbers takes what adding a few gradients to each of them takes
        each = min(each, int(chunks.n_chunks * share / _MEMBERS_A_RANGE / count))
    found = max(1, min(max(1, each) * count, len(chunks.plan(settings.batch_tokens))))
    replace_file(path, json.dumps({"ranges": found}).encode())
    return found


def _tell(workers: PassWorkers, need: int, ranges: int) -> None:
    """Say what the pass will take, before it takes it."""
    who = f"{workers.count} workers" if workers.count else "workers"
    threads = f"{workers.threads} threads" if workers.threads > 1 else "one thread"
    note(
        f"{who} of {threads} each: {need / 1e9:.2g} GB of sums in every one and in this process, "
        f"{ranges * need / 1e9:.2g} GB on disk until the fit is whole ({ranges} ranges)"
    )
    whole = need * (1 + (workers.count or 0))
    if workers.free is not None and whole > workers.free:
        note(
            f"that is {whole / 1e9:.2g} GB in all, and {workers.free / 1e9:.2g} GB are available: fewer "
            "--workers take less"
        )


def part_of(groups: list[np.ndarray], lengths: np.ndarray, number: int, count: int) -> list[np.ndarray]:
    """Take the groups of range `number` of `count`: consecutive ones, about as many tokens as any range's."""
    ends = np.cumsum([int(lengths[group].sum()) for group in groups])
    total = int(ends[-1]) if len(ends) else 0
    # a group is in the range in which its middle lies
    middles = ends - np.diff(ends, prepend=0) / 2
    first, stop = np.searchsorted(middles, [total * number / count, total * (number + 1) / count])
    return groups[first:stop]


class RangeProjector(Projector):
    """Projections of some chunks only, in order of their numbers."""

    def __init__(self, gate_size: int, size: int, rows: np.ndarray, seed: int) -> None:
        super().__init__(gate_size, size, len(rows), seed)
        self._rows = rows

    def add(self, batch: Batch, gradients: Sequence[torch.Tensor]) -> None:
        super().add(replace(batch, rows=np.searchsorted(self._rows, batch.rows)), gradients)

    def write(self, folder: Path) -> None:
        """Put them where they belong in the common arrays, and on disk.

        By `pwrite` and not by a map: two machines may hold the page in which two ranges meet.
        """
        cuts = np.flatnonzero(np.diff(self._rows) != 1) + 1
        stretches = [each for each in np.split(np.arange(len(self._rows)), cuts) if len(each)]
        for name, values in (("codes", self._codes), ("step", self._step)):
            with (folder / name).open("r+b") as file:
                for stretch in stretches:
                    own = np.ascontiguousarray(values[stretch[0] : stretch[-1] + 1])
                    place, content, done = int(self._rows[stretch[0]]) * own[0].nbytes, own.tobytes(), 0
                    while done < len(content):
                        done += os.pwrite(file.fileno(), content[done:], place + done)
                os.fsync(file.fileno())
