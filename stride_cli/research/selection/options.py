"""Options of selecting documents, and of judging a selection; light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stride_cli.options import Options, option


@dataclass(frozen=True)
class SelectOptions(Options):
    """Options of choosing documents to train on.

    Attributes
    ----------
    size : documents to choose
    out : directory that gets the three files; None: none
    method : whose scores, as for `stride baseline`
    overwrite : replace a selection at `out`
    """

    size: int = option(1000, "Documents to choose.", low=1)
    out: Path | None = option(None, "Where the three files go.", metavar="DIR")
    method: str = option("stride", "Whose scores: a method of stride baseline --list, with options.")
    overwrite: bool = option(False, "Replace a selection at DIR.")


@dataclass(frozen=True)
class JudgingOptions(Options):
    """Options of judging a selection by models that are fine-tuned on it."""

    seeds: int = option(3, "Models fine-tuned on each file.", low=1, high=1_000)
    max_new_tokens: int = option(64, "Longest greedy answer.", low=1)
