"""The closed form by several processes or machines: what one process adds up, added up range by range.

Everything that a fit takes from the model is a sum over chunks: second moments for the bases, the curvature
that scales them, M G. So each is taken over parts of the chunks by whichever worker is free, and the parts
are added in their own order: the same parts give the same bits, whoever made them and when. They follow from
the number of workers. Batches are those of one process, so that chunks' gradients and projections are, too.

What is done lies in the fit's scratch directory, which all workers see:

    parts.json              how many parts there are; a fit that is gone on with keeps them
    observed-I.pt           sums that the bases are made of
    before.pt               what was known of tokens before training, where it is (`beginnings`)
    bases.pt, spaces.pt     bases, before and after they are scaled
    range-I/                what range I goes on from when its worker dies (as of a fit in one process)
    sums-I.pt               M G of range I, whole
    codes, step             projections of all chunks, each range's written in its place
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from index_format.durable import replace_file
from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.bases import (
    Observed,
    bases_from,
    curvature_of_sample,
    observe_sample,
    observed_groups,
    scale_bases,
    scales_bases,
    scaling_groups,
)
from stride_cli.operators.closed import (
    ClosedSettings,
    CorpusPass,
    accumulate,
    basis_options,
    keep_spaces,
    kept_spaces,
)
from stride_cli.operators.projections import Projections, Projector, make_room
from stride_cli.operators.saving import save_atomically
from stride_cli.operators.second_moments import Moments
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import note, progress

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

# (what fits, groups of jobs that may grow, workers) → (number of the group, its answers), as they finish
Engine = Callable[[Any, Any, int | None], Generator[tuple[int, Any], None, None]]
_Job = tuple[str, int, int]  # "observe", "scale" or "sum"; the number of the part, of how many

_BEFORE = "before.pt"
RANGES_A_WORKER = 4  # so that no worker waits long for the last
_LARGE_SUMS = 64 << 20  # bytes: from there on a range has so many chunks of every subset, where it can be
_MEMBERS_A_RANGE = 8
_SUMS_BYTES = 4 << 30  # of all ranges' sums on disk, unless there are workers that would have none
PARTS = 16  # where the number of workers is the cluster's


@dataclass(frozen=True)
class ModelPlace:
    """How another process opens the model that is fitted, and reads what it is fitted to.

    Attributes
    ----------
    index : Path
    digest : of the index
    model : path of the index's model; None: where the index says
    device, dtype : of the model, as `load_model` takes them
    checkpoint : path of a further checkpoint, to be fitted in its place
    design_seed : of that checkpoint's subsets
    """

    index: Path
    digest: str
    model: str | None
    device: str
    dtype: str
    checkpoint: str | None = None
    design_seed: int | None = None

    def open(self) -> tuple[AttributableModel, ChunkReader, np.ndarray]:
        """The model, the chunks, and the subsets (n, d) of each; raises as `open_model`."""
        from index_format.reader import Index
        from stride_cli.data.workspace import open_model
        from stride_cli.models.kinds import kind_of_index
        from stride_cli.operators.designs import Designs
        from stride_cli.operators.opener import Opener

        index = Index.open(self.index)
        opener = Opener(self.device, self.dtype)
        if self.checkpoint is None or kind_of_index(index) == "classifier":  # whose rows a checkpoint reads
            model = open_model(index, self.model, device=self.device, dtype=self.dtype)
            opener = Opener.like(model)
        if self.checkpoint is not None:
            model = opener.load(self.checkpoint)
        return model, ChunkReader(index), np.asarray(Designs.of(index, self.design_seed).columns)


@dataclass(frozen=True)
class Crew:
    """Who fits.

    Attributes
    ----------
    engine : `run_local` or `run_ray` of `training.engines`
    workers : at the same time; None: as many as the cluster has room for
    threads : of each
    place : ModelPlace      how they open what they need
    free : bytes of memory that they have together, where it is known
    """

    engine: Engine
    workers: int | None
    threads: int
    place: ModelPlace
    free: int | None = None

    def passes(
        self,
        model: AttributableModel,
        chunks: ChunkReader,
        design: tuple[int, int],
        settings: ClosedSettings,
        scratch: Path,
        save_seconds: float,
    ) -> CorpusPass:
        """See `SharedFit`."""
        return SharedFit(self, model, chunks, design, settings, scratch, save_seconds).run()

    def at(self, checkpoint: str, design_seed: int) -> Crew:
        """The same, for a further checkpoint."""
        return replace(self, place=replace(self.place, checkpoint=checkpoint, design_seed=design_seed))


class ChunkRange(ChunkReader):
    """All chunks of an index, of which a pass visits some batches: those of a pass over everything that fall
    into one of `count` parts of about as many tokens."""

    def __init__(self, whole: ChunkReader, number: int, count: int) -> None:
        self.__dict__ |= whole.__dict__  # what has been read and counted is not again
        self._number, self._count = number, count

    def plan(self, batch_tokens: int, rows: np.ndarray | None = None) -> list[np.ndarray]:
        groups = super().plan(batch_tokens, rows)
        return groups if rows is not None else part_of(groups, self.lengths, self._number, self._count)


def part_of(groups: list[np.ndarray], lengths: np.ndarray, number: int, count: int) -> list[np.ndarray]:
    """The groups of part `number` of `count`: consecutive ones, of about as many tokens as any part's."""
    ends = np.cumsum([int(lengths[group].sum()) for group in groups])
    total = int(ends[-1]) if len(ends) else 0
    # a group is in the part in which its middle lies
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
        stretches = np.split(np.arange(len(self._rows)), cuts)
        for name, values in (("codes", self._codes), ("step", self._step)):
            with (folder / name).open("r+b") as file:
                for stretch in stretches:
                    if len(stretch):
                        own = np.ascontiguousarray(values[stretch[0] : stretch[-1] + 1])
                        place = int(self._rows[stretch[0]]) * own[0].nbytes
                        _write_at(file.fileno(), own.tobytes(), place)
                os.fsync(file.fileno())


def _write_at(descriptor: int, content: bytes, place: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], place + done)


def common_projections(folder: Path, n_chunks: int, size: int, seed: int) -> Projections:
    """What all ranges have written, its codes mapped."""
    codes = np.memmap(folder / "codes", np.uint8, "r", shape=(n_chunks, size))
    return Projections(codes, np.fromfile(folder / "step", np.float32), seed)


@dataclass
class RangeWorker:
    """Does parts of the work in whatever process it is sent to.

    Attributes
    ----------
    place : ModelPlace
    folder : Path               where parts go, and where what they need lies
    threads : of torch, while it works
    save_seconds : how often an unfinished part is saved
    peak_bytes : about what a worker takes in memory
    """

    place: ModelPlace
    folder: Path
    threads: int
    save_seconds: float
    peak_bytes: int

    doing = "fitting ranges"

    @property
    def device(self) -> str:
        return self.place.device

    def prepare(self) -> None:
        """Open the model, which forked workers then share; on a GPU each opens its own."""
        if self.device == "cpu":
            with contextlib.suppress(Exception):  # `run` raises it where it can be told
                self._open()

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """What `do` makes of each."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return [self.do(*job) for job in jobs]
        finally:
            torch.set_num_threads(before)

    def do(self, kind: str, number: int, count: int) -> Any:
        """Part `number` of `count`."""
        raise NotImplementedError

    def _open(self) -> tuple[AttributableModel, ChunkReader, np.ndarray]:
        # once a process: one of Ray gets the worker anew with every task
        if _last.get("place") != self.place:
            _last.clear()
            _last.update(place=self.place, opened=self.place.open())
        opened: tuple[AttributableModel, ChunkReader, np.ndarray] = _last["opened"]
        return opened


_last: dict[str, Any] = {}  # what this process opened last


@dataclass
class RangeFitter(RangeWorker):
    """Does parts of a fit; beside what every `RangeWorker` has:

    Attributes
    ----------
    settings, n_subsets : as of `fit_closed`
    """

    settings: ClosedSettings
    n_subsets: int

    def do(self, kind: str, number: int, count: int) -> Any:
        """Of "scale" the curvature's totals and tokens, of others None."""
        steps = {"observe": self._observe, "scale": self._scale, "sum": self._sum}
        return steps[kind](number, count)

    def part(self, kind: str, number: int) -> Path:
        """Where the sums of a part are."""
        return self.folder / f"{'observed' if kind == 'observe' else 'sums'}-{number}.pt"

    def steered(self, model: AttributableModel, name: str) -> SteeredModel:
        """The model with the spaces of bases.pt or spaces.pt."""
        return kept_spaces(model, self.folder / name, self.settings)

    def keep(self, steered: SteeredModel, name: str) -> None:
        """Write what `steered` reads."""
        keep_spaces(steered, self.folder / name)

    def _observe(self, number: int, count: int) -> None:
        model, chunks, _ = self._open()
        options = basis_options(self.settings)
        groups = part_of(observed_groups(model, chunks, options), chunks.lengths, number, count)
        found = observe_sample(model, chunks, self.settings.spaces, options, groups)
        moments = [own.state() for own in found.moments]
        save_atomically({"moments": moments, "prediction": found.prediction}, self.part("observe", number))

    def _scale(self, number: int, count: int) -> tuple[list[list[float]], float]:
        model, chunks, _ = self._open()
        options, steered = basis_options(self.settings), self.steered(model, "bases.pt")
        groups = part_of(scaling_groups(steered, chunks, options), chunks.lengths, number, count)
        totals, tokens = curvature_of_sample(steered, chunks, options, groups)
        return [total.tolist() for total in totals], tokens

    def _sum(self, number: int, count: int) -> None:
        model, whole, columns = self._open()
        target = self.part("sum", number)
        if target.exists():  # the worker died between this and its answer
            return
        steered = self.steered(model, "spaces.pt")
        before = self.folder / _BEFORE
        whole.before = (
            torch.load(before, weights_only=True, mmap=True)["before"].numpy() if before.exists() else None
        )
        chunks = ChunkRange(whole, number, count)
        groups = chunks.plan(self.settings.batch_tokens)
        rows = np.sort(np.concatenate(groups)) if groups else np.zeros(0, np.int64)
        projector = None
        if self.settings.project:
            projector = RangeProjector(steered.gate_size, self.settings.project, rows, self.settings.seed)
        scratch = self.folder / f"range-{number}"
        scratch.mkdir(exist_ok=True)
        sums, loss = accumulate(
            steered,
            chunks,
            columns,
            self.n_subsets,
            self.settings,
            scratch,
            self.save_seconds,
            projector,
        )
        if projector is not None:
            projector.write(self.folder)
        scored = sum(1 for row in rows if chunks.chunk(int(row))[1].any())
        save_atomically({"sums": sums, "loss": loss, "scored": scored}, target)
        shutil.rmtree(scratch)


class SharedFit:
    """The passes of `fit_closed` by a crew.

    Parameters
    ----------
    crew : Crew
    model : AttributableModel      as the workers open it
    chunks : ChunkReader           all of the index
    design : K, and how many of the subsets a chunk is in
    settings : as of `fit_closed`
    scratch : Path                 that all workers see
    save_seconds : float
    """

    def __init__(
        self,
        crew: Crew,
        model: AttributableModel,
        chunks: ChunkReader,
        design: tuple[int, int],
        settings: ClosedSettings,
        scratch: Path,
        save_seconds: float,
    ) -> None:
        self._crew, self._model, self._chunks = crew, model, chunks
        self._n_subsets, self._degree = design
        self._settings = settings
        self._folder = scratch.absolute() / "shared"
        self._fitter = RangeFitter(
            crew.place,
            self._folder,
            crew.threads,
            save_seconds,
            4 * model.n_parameters,
            settings=settings,
            n_subsets=self._n_subsets,
        )
        self._counts = Counts(self._folder)
        self._groups: list[list[_Job]] = []
        self._finished: Generator[tuple[int, Any], None, None] | None = None

    def run(self) -> CorpusPass:
        """Bases, and the sums over the corpus; an interrupted fit goes on with the parts that are missing.

        Raises
        ------
        NumericalError      a loss or gradient is not finite
        StrideError         a worker died again and again over the same work
        """
        self._folder.mkdir(exist_ok=True)
        if self._settings.residuals == "average" and self._chunks.before is not None:
            known = torch.from_numpy(np.array(self._chunks.before))
            save_atomically({"before": known}, self._folder / _BEFORE)
        try:
            return self._summed(self._bases())
        finally:
            if self._finished is not None:
                self._finished.close()
            _last.clear()  # of a fit in this process

    def _bases(self) -> SteeredModel:
        """What `fit_bases` gives, of sums over parts of the sample."""
        model, chunks, names = self._model, self._chunks, self._settings.spaces
        options = basis_options(self._settings)
        if (self._folder / "spaces.pt").exists():
            return self._fitter.steered(model, "spaces.pt")
        count = self._counts.of("observe", lambda: self._crew.workers or PARTS)
        if not (self._folder / "bases.pt").exists():
            parts = [self._fitter.part("observe", number) for number in range(count)]
            missing = [number for number, part in enumerate(parts) if not part.exists()]
            with progress("fitting bases", count, unit="parts") as bar:
                bar.advance(count - len(missing))
                for _ in self._do([("observe", number, count) for number in missing]):
                    bar.advance()
            observed = Observed(
                [Moments() for _ in names], torch.zeros(model.vocab_size, dtype=torch.float64)
            )
            for part in parts:
                state = torch.load(part, weights_only=True)
                observed.prediction.add_(state["prediction"])
                for own, other in zip(observed.moments, state["moments"], strict=True):
                    own.merge(other)
            self._fitter.keep(bases_from(model, chunks, names, options, observed), "bases.pt")
            for part in parts:
                part.unlink()
        steered = self._fitter.steered(model, "bases.pt")
        if scales_bases(names, options):
            found = dict(self._do([("scale", number, count) for number in range(count)]))
            totals = [torch.zeros(len(space.parts()), dtype=torch.float64) for space in steered.spaces]
            tokens = 0.0
            for number in range(count):
                own, scored = found[number]
                tokens += scored
                for total, values in zip(totals, own, strict=True):
                    total.add_(torch.tensor(values, dtype=torch.float64))
            scale_bases(steered, totals, tokens)
        self._fitter.keep(steered, "spaces.pt")
        return steered

    def _summed(self, steered: SteeredModel) -> CorpusPass:
        """What `accumulate` gives, range by range."""
        settings, n_chunks = self._settings, self._chunks.n_chunks
        need = 4 * self._n_subsets * steered.gate_size
        count = self._counts.of("sum", lambda: self._count_ranges(self._counts.known["observe"], need))
        self._tell(need, count)
        if settings.project:
            make_room(self._folder, n_chunks, settings.project)
        parts = [self._fitter.part("sum", number) for number in range(count)]
        ready = {number for number, part in enumerate(parts) if part.exists()}
        missing = [number for number in range(count) if number not in ready]
        total = _Total()
        with progress("fitting operators", count, unit="ranges") as bar:
            bar.advance(len(ready))
            for number in self._arriving(ready, missing):
                if number in missing:
                    bar.advance()
                while total.parts in ready:
                    total.add(torch.load(parts[total.parts], weights_only=True, mmap=True))
        projections = None
        if settings.project:
            projections = common_projections(self._folder, n_chunks, settings.project, settings.seed)
        return CorpusPass(steered, total.sums, total.loss / max(1, total.scored), projections)

    def _arriving(self, ready: set[int], missing: Sequence[int]) -> Iterator[int]:
        """Numbers of ranges as they are there, `ready` with them; one that was there first, if any."""
        if 0 in ready:
            yield 0
        jobs = [("sum", number, self._counts.known["sum"]) for number in missing]
        for number, _ in self._do(jobs):
            ready.add(number)
            yield number

    def _do(self, jobs: Sequence[_Job]) -> Iterator[tuple[int, Any]]:
        """(number of the part, answer) of each as it is done: all by the same workers, who stay for more."""
        self._groups += [[job] for job in jobs]
        left = len(jobs)
        if left and self._finished is None:
            # there are as many workers as groups, at most: without work as yet, where others have done it
            self._groups += [[] for _ in range((self._crew.workers or 1) - len(jobs))]
            self._finished = self._crew.engine(self._fitter, self._groups, self._crew.workers)
        while left:
            assert self._finished is not None
            place, answers = next(self._finished)
            for (_, number, _), answer in zip(self._groups[place], answers, strict=True):
                left -= 1
                yield number, answer

    def _count_ranges(self, workers: int, need: int) -> int:
        groups = len(self._chunks.plan(self._settings.batch_tokens))
        each = min(RANGES_A_WORKER, _SUMS_BYTES // max(1, need) // workers)  # as many for every worker
        if need > _LARGE_SUMS:
            # to make, write and read K × p numbers takes what adding a few gradients to each of them takes
            members = self._chunks.n_chunks * self._degree / self._n_subsets
            each = min(each, int(members / _MEMBERS_A_RANGE / workers))
        return max(1, min(max(1, each) * workers, groups))

    def _tell(self, need: int, count: int) -> None:
        """What the fit will take, before it takes it."""
        crew = self._crew
        who = f"{crew.workers} workers" if crew.workers else "workers"
        threads = f"{crew.threads} threads" if crew.threads > 1 else "one thread"
        note(
            f"{who} of {threads} each: {need / 1e9:.2g} GB of sums in every one and in this process, "
            f"{count * need / 1e9:.2g} GB on disk until the fit is whole ({count} ranges)"
        )
        whole = need * (1 + (crew.workers or 0))
        if crew.free is not None and whole > crew.free:
            note(
                f"that is {whole / 1e9:.2g} GB in all, and {crew.free / 1e9:.2g} GB are available: fewer "
                "--workers take less"
            )


class Counts:
    """How many parts there are of each kind of work in a directory: as many as when it was begun."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "parts.json"

    @cached_property
    def known(self) -> dict[str, int]:
        return dict(json.loads(self._path.read_text())) if self._path.exists() else {}

    def of(self, kind: str, choose: Callable[[], int]) -> int:
        """What is known, or is chosen and known from now on."""
        if kind not in self.known:
            self.known[kind] = choose()
            replace_file(self._path, json.dumps(self.known).encode())
        return self.known[kind]


class _Total:
    """The sums of ranges, added in order."""

    def __init__(self) -> None:
        self.parts = 0
        self.sums: list[torch.Tensor] = []
        self.loss, self.scored = 0.0, 0

    def add(self, state: dict[str, Any]) -> None:
        """The next range's, as `RangeFitter` writes them."""
        if not self.parts:
            self.sums = [each.clone() for each in state["sums"]]
        else:
            for total, part in zip(self.sums, state["sums"], strict=True):
                total.add_(part)
        self.loss += state["loss"] * state["scored"]
        self.scored += state["scored"]
        self.parts += 1
