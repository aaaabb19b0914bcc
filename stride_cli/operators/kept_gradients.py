"""Gate gradients of chunks, kept in memory as 16-bit numbers for the next query.

A query is multiplied with the gradients of a hundred chunks or more, which takes as long as memory takes to
deliver them. Kept as integers of 16 bits with one scale for every 256 they are half as many bytes, and off by
up to 2⁻¹⁶ of the largest number of each 256. (With 8 bits, products of vectors that have little in common
were off by more than the order of chunks can bear.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from stride_cli import side_by_side

if TYPE_CHECKING:
    import torch

    from stride_cli.operators.steered_model import SteeredModel

_BLOCK = 256  # numbers that share a scale
_SLAB = 32  # chunks whose memory is asked for at once


@dataclass(frozen=True)
class _Slab:
    """Room for the gradients of some chunks: of each space (n, p) int16 and (n, ⌈p / 256⌉) float32."""

    values: list[np.ndarray]
    scale: list[np.ndarray]

    @classmethod
    def of(cls, sizes: Sequence[int], count: int) -> _Slab:
        return cls(
            [np.empty((count, size), np.int16) for size in sizes],
            [np.empty((count, -(-size // _BLOCK)), np.float32) for size in sizes],
        )


@dataclass
class _Rows:
    """The chunks that are kept for one model's operators."""

    sizes: list[int]  # p of each space
    slabs: list[_Slab] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)  # slab, place in it
    # chunk → slab, place in it; the one that was asked for longest ago first
    places: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)


class KeptGradients:
    """Gate gradients of chunks that were read, kept in memory for the next query of a process that answers
    many.

    A query whose chunks are all here costs its own two passes and products with them. The last digits of
    these are those of 16-bit numbers, and depend on the batch in which a chunk was read first.

    Parameters
    ----------
    most : int      bytes; of more, those that were asked for longest ago are let go
    """

    def __init__(self, most: int) -> None:
        self._most, self.nbytes = most, 0
        self._rows: dict[int, _Rows] = {}

    @staticmethod
    def bytes_of(steered: SteeredModel) -> int:
        """How many a chunk takes."""
        return sum(2 * space.gate_size + 4 * -(-space.gate_size // _BLOCK) for space in steered.spaces)

    def room_for(self, steered: SteeredModel, count: int) -> bool:
        """Whether so many chunks more can be kept without letting others go."""
        found = self._rows.get(id(steered.operators))
        count -= 0 if found is None else len(found.free)
        return self.nbytes + self.bytes_of(steered) * count <= self._most

    def known(self, steered: SteeredModel, rows: np.ndarray) -> np.ndarray:
        """Those of the chunks that are kept, in their order."""
        found = self._rows.get(id(steered.operators))
        places = {} if found is None else found.places
        return np.array([row for row in rows.tolist() if row in places], np.int64)

    def add(self, steered: SteeredModel, rows: np.ndarray, gradients: Sequence[torch.Tensor]) -> None:
        """Keep the gradients of chunks, (B, p) float32 a space."""
        from stride_cli.operators.gate_kernels import narrow

        wide = [np.ascontiguousarray(gradient.cpu().numpy()) for gradient in gradients]
        found = self._rows.setdefault(
            id(steered.operators), _Rows([space.gate_size for space in steered.spaces])
        )
        for at, row in enumerate(rows.tolist()):
            if row in found.places:
                continue
            place = self._place(found)
            if place is None:
                return
            slab = found.slabs[place[0]]
            for own, values, scale in zip(wide, slab.values, slab.scale, strict=True):
                narrow(own[at], values[place[1]], scale[place[1]])
            found.places[row] = place

    def _place(self, found: _Rows) -> tuple[int, int] | None:
        """Where a chunk more can be kept; another one leaves where there is no room."""
        if not found.free:
            each = sum(2 * size + 4 * -(-size // _BLOCK) for size in found.sizes)
            count = min(_SLAB, (self._most - self.nbytes) // each)
            if count < 1:
                return found.places.popitem(last=False)[1] if found.places else None
            found.free = [(len(found.slabs), place) for place in reversed(range(count))]
            found.slabs.append(_Slab.of(found.sizes, count))
            self.nbytes += count * each
        return found.free.pop()

    def products(
        self,
        steered: SteeredModel,
        queries: Sequence[torch.Tensor],
        rows: np.ndarray,
        needed: np.ndarray | None = None,
    ) -> np.ndarray:
        """What `gradient_products` has of chunks that are kept: (spaces, Q, t) float64.

        Parameters
        ----------
        queries : one (Q, p) float32 a space, on the CPU
        rows : (t,) int64
        needed : (Q, t) bool, optional      products that are looked at; the others are 0
        """
        import torch

        products = np.zeros((len(queries), len(queries[0]), len(rows)))
        if not len(rows):
            return products
        found = self._rows[id(steered.operators)]
        for row in rows.tolist():
            found.places.move_to_end(row)
        wanted = np.ones(products.shape[1:], bool) if needed is None else needed
        wide = [np.ascontiguousarray(query.numpy()) for query in queries]
        where = sorted((*found.places[row], at) for at, row in enumerate(rows.tolist()))

        def multiply(piece: tuple[int, list[int], list[int]]) -> None:
            from stride_cli.operators.gate_kernels import narrow_product

            slab, inside, at = found.slabs[piece[0]], np.array(piece[1]), np.array(piece[2])
            own = np.ascontiguousarray(wanted[:, at].T)
            for number, query in enumerate(wide):
                part = np.empty(own.shape)
                narrow_product(slab.values[number], slab.scale[number], inside, query, own, part)
                products[number][:, at] = part.T

        pieces, shares = list(_by_slab(where)), torch.get_num_threads()

        def multiply_all(own: Sequence[tuple[int, list[int], list[int]]]) -> None:
            for piece in own:
                multiply(piece)

        side_by_side.each(multiply_all, [pieces[first::shares] for first in range(shares)])
        return products


def _by_slab(where: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Of (slab, place in it, column) in order: each slab with its places and columns."""
    for slab, group in groupby(where, key=lambda each: each[0]):
        listed = list(group)
        yield slab, [place for _, place, _ in listed], [column for _, _, column in listed]
