"""Opening an index that a user named: one at a URL, or in a zip file, is fetched with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from index_format.location import Given, is_elsewhere, locate
from stride_cli import output

if TYPE_CHECKING:
    from index_format.reader import Index


def open_index(given: Given) -> Index:
    """Open an index; errors are those of `Index.open`."""
    from index_format.reader import Index

    where = locate(given)
    if not is_elsewhere(where):
        return Index.open(where)
    with output.progress(f"fetching {where.name}", unit="MB") as ticker:
        here = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal here
            ticker.describe(f"fetching {where.name} ({total / 1e6:,.0f} MB)")
            ticker.advance(done / 1e6 - here)
            here = done / 1e6

        return Index.open(where, progress=tell)
