"""Options of an audit; light to import."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.options import MORE, Options, option

CONTROLS = ("auto", "absent", "made")


@dataclass(frozen=True)
class AuditOptions(Options):
    """Options of judging a benchmark; shares are of an item's three-word sequences, by their rarity."""

    level: float = option(0.05, "q below which an item has an effect.", above=0, high=1, panel=MORE)
    present: float = option(
        0.7,
        "Share of an item's sequences of words, in runs of five or more, that makes it present.",
        above=0,
        high=1,
        panel=MORE,
    )
    near: float = option(
        0.25, "The same, in runs of any length: present in other words.", above=0, high=1, panel=MORE
    )
    controls_per_item: int = option(10, "Versions of each item and control.", low=2, high=1_000, panel=MORE)
    lambda_ratio: float | None = option(
        None,
        "λ as a share of λ_max; influences are by the subsets alone. [0.03; fine-tuned 0.01; sgd 0.2]",
        above=0,
        high=1,
        example=0.1,
        panel=MORE,
    )
    controls: str = option("auto", choices=CONTROLS)


@dataclass(frozen=True)
class FindingsOptions(Options):
    """Options of writing the findings; without a format a terminal gets a table."""

    format: str | None = option(
        None,
        "What stdout gets; default: a table on a terminal. csv is for spreadsheets: a text that begins with "
        "=, +, - or @ gets an apostrophe before it.",
        choices=("jsonl", "csv", "sarif", "html"),
        listed=True,
    )
    fail_on_leak: bool = option(False, "Exit with 1 where an item was leaked and learnt.")
    fail_on_undecided: bool = option(False, "Exit with 1 where an item is undecided.")
