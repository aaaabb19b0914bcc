"""Build an index range by range, in other processes or on other machines; then join what they built."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from index_format.location import local_directory
from index_format.reader import Index
from index_format.writer import IndexWriter
from stride_cli import output
from stride_cli.corpus import merge
from stride_cli.corpus.build import (
    IndexedModel,
    build_index,
    recorded_config,
    recorded_model,
    remember_model,
    settings_key,
    settings_of_build,
    storage_errors,
)
from stride_cli.corpus.documents import EMPTY_CORPUS
from stride_cli.corpus.hub_files import pinned
from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.plan import choose_block_size
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.corpus.streams import ReadLog, find_sources, total_bytes
from stride_cli.errors import CorpusError, EmptyRange, UsageError
from stride_cli.parallel import Workers, check_engine, default_workers

_RANGES_A_WORKER = 4  # so that no worker waits long for the last, and one that dies costs little
_LEAST_BYTES = 1 << 22  # of a range, unless there are workers that would have none
_PEAK_BYTES = 500 << 20  # of one worker
_MOST_RANGES = 64  # where the number of workers is the cluster's


@dataclass
class RangeBuilder:
    """Builds ranges of a corpus as indexes of their own, in a directory that all workers see.

    Attributes
    ----------
    sources, model, options, reading : as `build_index`
    folder : Path      where they go: NUMBER-of-COUNT.stride
    count : int        of the ranges
    directory : Path   from which the sources are named as they are
    """

    sources: list[str]
    model: IndexedModel
    options: BuildOptions
    reading: ReadOptions
    folder: Path
    count: int
    directory: Path

    def path(self, number: int) -> Path:
        return self.folder / f"{number}-of-{self.count}.stride"

    def build(self, number: int) -> bool:
        """Build a range; False where no document begins in it."""
        options = replace(self.options, range=f"{number}/{self.count}")
        # one that is there was published whole; one that a killed worker began is taken up
        with contextlib.chdir(self.directory), contextlib.suppress(EmptyRange):
            if not self.path(number).exists():
                build_index(self.sources, self.model, self.path(number), options, self.reading)
            return True
        return False


def build_apart(
    sources: Sequence[str],
    model: IndexedModel,
    out: str | Path,
    options: BuildOptions = BuildOptions(),
    reading: ReadOptions = ReadOptions(),
) -> Index:
    """`build_index` by the workers of the options: the same index, bit for bit.

    Ranges of the corpus are built below OUT.partial, each whole as soon as it is there, and joined when all
    are. Interrupted, the same command goes on: a worker that died costs what it had not committed.

    Raises
    ------
    UsageError       a corpus that has no size (stdin); a tokenizer that no other process can be given
    CorpusError      as `build_index`; with ``on_bad="skip"`` also an id that two ranges share
    and what else `build_index` raises
    """
    check_engine(options.engine)
    place = local_directory(out).absolute()
    block_size = choose_block_size(options.block_size, model.context)
    sources = [pinned(source) for source in sources]
    size = total_bytes(find_sources(sources))
    if size is None:
        raise UsageError(
            "--workers and --engine divide files, and the corpus is a stream",
            fix="write it to a file first, or build without them",
        )
    settings = settings_of_build(model, options, block_size)
    with (
        storage_errors(out),
        IndexWriter.create(out, build_key=settings_key(settings), overwrite=options.overwrite) as writer,
    ):
        folder = writer.scratch_path("ranges")
        builder = RangeBuilder(
            sources=list(sources),
            model=replace(model, path=None),
            options=replace(options, workers=None, engine="local", overwrite=False, block_size=block_size),
            reading=reading,
            folder=folder,
            count=_count_ranges(size, options.workers),
            directory=Path.cwd(),
        )
        parts = [Index.open(path) for path in _built(builder, options)]
        if not parts:
            next(read_documents(sources, reading))  # which says that there is none
        try:
            merged = merge.copy_parts(writer, parts)
        except merge.SharedId as error:
            for _ in read_documents(sources, reading):
                pass  # which says where
            raise CorpusError(
                f"{error.message} (ranges are read apart, and --on-bad skip skips what one process reads)",
                fix="build without --workers and --engine",
            ) from None
        digest = merged.digest if merged.exact else _fingerprint(sources, reading)
        writer.publish(
            merged.attributes
            | {
                "fingerprints": {"corpus": digest, **model.fingerprints},
                "model_path": recorded_model(model.path, out),
                "config": recorded_config(sources, place, settings, reading),
            }
        )
    remember_model(model)
    return Index.open(out)


def _count_ranges(size: int, workers: int | None) -> int:
    """How many ranges a corpus of so many bytes is built in."""
    if workers is None:
        return max(1, min(_MOST_RANGES, size // _LEAST_BYTES))
    return max(workers, min(_RANGES_A_WORKER * workers, size // _LEAST_BYTES))


def _built(builder: RangeBuilder, options: BuildOptions) -> list[Path]:
    """Build the ranges by workers; return where those are that have documents, in order."""
    try:
        pickle.dumps(builder)
    except Exception as error:
        raise UsageError(
            f"the model's tokenizer cannot be given to other processes: {error}",
            fix="build without --workers and --engine",
        ) from None
    workers = options.workers
    if workers is None and options.engine == "local":
        workers = default_workers(peak_bytes=_PEAK_BYTES, doing="building a range")
    numbers = range(1, builder.count + 1)
    found = []
    with (
        output.progress("building ranges", builder.count, unit="ranges") as ticker,
        Workers(builder.build, workers, engine=options.engine) as pool,
    ):
        for place, some in pool.as_done(numbers):
            if some:
                found.append(numbers[place])
            ticker.advance()
    return [builder.path(number) for number in sorted(found)]


def _fingerprint(sources: Sequence[str], reading: ReadOptions) -> str:
    """Of a corpus whose documents its ranges do not hold as they were read."""
    log = ReadLog(reading.on_bad, tell=lambda text: None)  # the ranges have told
    digest = EMPTY_CORPUS
    with output.progress("reading", (total_bytes(find_sources(sources)) or 0) / 1e6, unit="MB") as ticker:
        done = 0.0
        for document in read_documents(sources, reading, log=log):
            digest = document.digest(digest)
            ticker.advance(log.bytes_done / 1e6 - done)
            done = log.bytes_done / 1e6
    return digest.hex()
