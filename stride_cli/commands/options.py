"""Options that mean the same in every command, declared once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index_format.location import Location, local_directory, locate
from stride_cli.commands.completion import DEVICES, DTYPES, complete_index, one_of
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.api import QueryOptions

HALVES = 20
Json = Annotated[bool, typer.Option("--json", help="JSON Lines on stdout, also on a terminal.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda, cuda:1 …; default: CUDA where there is one.",
        autocompletion=one_of(*DEVICES),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="fp32 or bf16; default: what the device does best.",
        autocompletion=one_of(*DTYPES),
    ),
]
IndexPath = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="<path>",
        help="The index; default: the only *.stride in the working directory. Only to read: a .zip or a URL.",
        autocompletion=complete_index,
    ),
]
ModelPath = Annotated[
    str | None,
    typer.Option("--model", help="Checkpoint directory, hub id or .gguf file; default: the index's own."),
]

Stability = Annotated[
    bool,
    typer.Option(
        "--stability",
        help="How often each document stays on the list when half of the subsets are left out.",
    ),
]
Halves = Annotated[
    int | None,
    typer.Option(
        "--halves",
        help="Random halves of the subsets that judge the answer, 0 for none; implies --stability. [20; "
        "without --stability 4, for the answer's reliability alone, up to a million chunks]",
    ),
]
Prior = Annotated[
    str | None,
    typer.Option(
        "--prior",
        help="Rank by influence and overlap with the query together, and keep the two apart. pairs: of "
        "neighbouring tokens, nearest to retraining in pre-training; tfidf: words.",
        autocompletion=one_of("tfidf", "pairs"),
    ),
]
Refine = Annotated[
    int | None,
    typer.Option(
        "--refine",
        metavar="<int>",
        help="Read the influence of so many chunks, the likeliest by the recovery and by shared pairs of "
        "tokens, from their own gradients: more exact, a forward and a backward pass for each. [0]",
    ),
]


def check_refine(count: int) -> None:
    """UsageError where `--refine` cannot be; before anything is opened."""
    if count < 0:
        raise UsageError(f"--refine is {count} (expected 0 or more)", fix="try --refine 100")


def check_judges(halves: int | None, prior: str | None) -> None:
    """UsageError where `--halves` or `--prior` cannot be; before anything is opened."""
    from stride_cli.attribution.prior import check_prior

    if halves is not None and halves < 0:
        raise UsageError(f"--halves is {halves} (expected 0 or more)", fix="try --halves 10")
    if prior is not None:
        check_prior(prior)


def with_judges(options: QueryOptions, index: Index, *, stability: bool, halves: int | None) -> QueryOptions:
    """The options with the halves of the subsets that `--stability` and `--halves` ask for; where neither is
    given, those that tell an answer's reliability at almost no cost."""
    from stride_cli.recovery.stability import quick_halves

    stability = stability or bool(halves)
    if halves is None:
        halves = HALVES if stability else quick_halves(index)
    return replace(options, halves=halves, stability=stability)


def query_options(chosen: Any, **more: Any) -> QueryOptions:
    """How a query is answered, from settings of the group "query"; `more` are further fields."""
    from stride_cli import api

    shared = ("top", "bottom", "lambda_ratio", "measure", "intercept", "nonneg", "shrink", "refine")
    names = (*shared, "max_new_tokens")
    return api.QueryOptions(**{**{name: getattr(chosen, name) for name in names}, **more})


def find_index(given: str | None) -> Location:
    """The index to use: the one given, else the one that the settings name, else the only ``*.stride`` here.

    Raises
    ------
    UsageError      none is given, and there is none here or more than one
    """
    from stride_cli.config import resolve

    wanted = given if given is not None else resolve("general", {}).index
    if wanted is not None:
        return locate(wanted)
    found = sorted(path for path in Path().glob("*.stride") if path.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            "no index given, and there is no *.stride in the working directory",
            fix="give one with --index PATH, or build one: stride index build corpus.jsonl --model MODEL",
        )
    raise UsageError(
        f"no index given, and there are {len(found)} in the working directory: "
        + ", ".join(path.name for path in found),
        fix=f"give one with --index, for example --index {found[0].name}",
    )


def writable_index(given: str | None) -> Path:
    """`find_index`, for a command that writes; IndexReadOnly where it is a URL or a zip file."""
    where = find_index(given)
    local_directory(where)
    return Path(str(where))
