"""Options of an audit; light to import."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.options import MORE, Options, option

CONTROLS = ("auto", "absent", "made")


@dataclass(frozen=True)
class AuditOptions(Options):
    """Options of judging a benchmark.

    Attributes
    ----------
    level : float            q below which there is an effect
    present : float          share of an item's 8-grams found in the corpus from which on it is present there
                             (0.7 in PaLM: Chowdhery et al. 2022, section 8)
    near : float             share of an item's 3-grams, held by one chunk, from which on the corpus holds the
                             item in other words; and 1.5 times as much as of the median item
    top : int                chunks most like the item by BM25, whose influence is added up (and all within
                             10 % of the best score, at most 128)
    controls_per_item : int  made for each item
    lambda_ratio : float     λ / λ_max; default: as `stride query`
    controls : str           where no controls are given: "absent", the items of which the corpus holds no
                             copy; "made", versions of the items; "auto", absent ones if there are enough
    """

    level: float = option(
        0.05, "q below which an item counts as having an effect.", above=0, high=1, panel=MORE
    )
    present: float = option(
        0.7, "Share of an item's 8-grams that makes it present.", above=0, high=1, panel=MORE
    )
    near: float = option(
        0.25,
        "Share of an item's 3-grams in one chunk that makes it present in other words.",
        above=0,
        high=1,
        panel=MORE,
    )
    top: int = option(20, "Chunks most like an item whose influence is added up.", low=1, panel=MORE)
    controls_per_item: int = option(10, "Controls made from each item.", low=1, high=1_000, panel=MORE)
    lambda_ratio: float | None = option(
        None, "λ as a share of λ_max; default: as stride query.", above=0, high=1, example=0.1, panel=MORE
    )
    controls: str = option("auto", choices=CONTROLS)


@dataclass(frozen=True)
class FindingsOptions(Options):
    """Options of writing the findings; without a format a terminal gets a table.

    Attributes
    ----------
    fail_on_leak : float, optional      the exit code is 1 where an item has a q-value up to this
    """

    format: str | None = option(
        None,
        "What stdout gets; default: a table on a terminal. csv is for spreadsheets: a text that begins with "
        "=, +, - or @ gets an apostrophe before it.",
        choices=("jsonl", "csv", "sarif", "html"),
        listed=True,
    )
    fail_on_leak: float | None = option(
        None, "Exit with 1 where an item has a q-value up to Q.", metavar="Q", low=0, high=1, example=0.05
    )
