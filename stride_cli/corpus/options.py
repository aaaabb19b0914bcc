"""Options of building and planning an index; light to import."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stride_cli.corpus.gate_budget import MOST_PROJECTED, check_projection
from stride_cli.errors import UsageError
from stride_cli.options import MORE, Options, engine_option, option


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one file in a range: what begins in bytes low … high-1 of `size` (0: as if it were 1).

    Lines of a compressed file and rows of a table lie in it as if each took as much of it as the next.
    """

    low: int
    high: int
    size: int

    def of(self, length: int) -> tuple[int, int]:
        """Return first and stop of those of 0 … length-1 (bytes as decompressed, or rows) that are in it."""
        return -(-self.low * length // self.size), -(-self.high * length // self.size)


@dataclass(frozen=True, slots=True)
class Range:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, written: str) -> Range:
        """Read a range such as "2/8"; UsageError where it is none."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", written)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            task = '"$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"'
            fix = f"try --range 1/8; in an array job of Slurm --range {task} with --array=1-8"
            raise UsageError(f"--range is '{written}', expected I/N: part I of N, of 1/N, 2/N … N/N", fix=fix)
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def shares(self, sizes: Sequence[int]) -> list[Share | None]:
        """Return what it has of each file; None: nothing."""
        lengths = [max(1, size) for size in sizes]
        first, stop = (sum(lengths) * place // self.count for place in (self.number - 1, self.number))
        starts = itertools.accumulate(lengths, initial=0)
        placed = zip(lengths, starts, strict=False)
        parts = [Share(max(0, first - at), min(length, stop - at), length) for length, at in placed]
        return [part if part.low < part.high else None for part in parts]


DEFAULT_BLOCK_SIZE = 512
MAX_SUBSETS = 65_535  # subset ids are uint16 on disk


@dataclass(frozen=True)
class DesignOptions(Options):
    """Chunks of a corpus, and the subsets over them; None: chosen to fit both (`choose_design`)."""

    block_size: int | None = option(
        None, "Most tokens of a chunk; default 512, or the context.", low=2, example=DEFAULT_BLOCK_SIZE
    )
    n_subsets: int | None = option(
        None, "Default: planned.", flag="--subsets", metavar="K", low=1, high=MAX_SUBSETS, example=1000
    )
    degree: int | None = option(
        None, "Subsets of a chunk; default 10, at most K/2.", metavar="D", low=1, example=10
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        k, d = self.n_subsets, self.degree
        if k is not None and d is not None and k < d:
            found = f"--subsets is {k}, expected at least the degree {d}: a chunk is in {d} different subsets"
            raise UsageError(found, fix=f"give --subsets {d} or more, or a smaller --degree")


@dataclass(frozen=True)
class BuildOptions(DesignOptions):
    """Options of `stride index build` besides chunks and design; their help texts describe them.

    A `range` has no more subsets than chunks. With `commit_seconds` of 0 every batch is committed.
    """

    form: str | None = option(
        None,
        "How training had prompts with responses, and messages: in the chat template, joined (concat), or "
        "joined and scored whole (text; without BOS: bare); default: chat with a template, else lines.",
        choices=("text", "bare", "concat", "chat"),
    )
    seed: int = option(0, "Seed of the design.", low=0, high=2**64 - 1, panel=MORE)
    store_text: bool = option(True, "Keep no document texts in the index.", flag="--no-text", panel=MORE)
    range: str | None = option(
        None, "Build part I of N of the corpus, for index merge.", metavar="I/N", panel=MORE, example="1/8"
    )
    workers: int | None = option(
        None, "Tokenise in N processes; default: in the threads of this one.", metavar="N", low=1, panel=MORE
    )
    engine: str = engine_option()
    overwrite: bool = option(False, "Replace the index, or an unfinished build, at DIR.")
    commit_seconds: float = option(
        2.0, "How often progress is saved: what a kill can cost.", low=0, panel=MORE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range is not None:
            Range.parse(self.range)


@dataclass(frozen=True)
class PlanOptions(DesignOptions):
    """Options of `stride index plan` besides chunks and design; their help texts describe them."""

    chunks: int | None = option(None, "Plan for N chunks, no corpus.", metavar="N", low=1, example=100_000)
    gate_dimension: int | None = option(
        None, "Numbers of one operator; default: what stride train fits.", metavar="P", low=1, example=4096
    )
    checkpoints: int = option(0, "How many further models stride train will be given.", metavar="N", low=0)
    project: int | None = option(
        None,
        "Bytes a chunk that stride train will keep. [32,768, or up to 262,144 where few chunks have many "
        "gates; beyond 8,192 chunks fewer, at least 512]",
        metavar="BYTES",
        low=0,
        high=MOST_PROJECTED,
        example=512,
    )
    store_text: bool = option(True, "As for build.", flag="--no-text")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_projection(self.project)
