"""``M G`` while it is added up, where the gradients are: in memory, or as products on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stride_cli import side_by_side
from stride_cli.models.devices import total_bytes
from stride_cli.operators.device_memory import free_bytes, size_in_words
from stride_cli.operators.head import block_bytes
from stride_cli.output import note

_COLUMNS = 64 << 20  # numbers of a product that are made at once
_MOST_TURNS = 4  # of more, a device's gradients are rather moved and added up in memory
_HEAD_COPIES = 8  # of a block of logits: itself, and what is made of it


class SubsetSums:
    """(M G)_k = Σ_{i ∈ A_k} share_i g_i of K subsets, space by space, in memory.

    Parameters
    ----------
    n_subsets : K
    sizes : p of each space

    Attributes
    ----------
    turns : int      passes over the corpus that it takes: each adds up some of the subsets
    turn : int       the one that is going on, from 0
    """

    turns = 1

    def __init__(self, n_subsets: int, sizes: Sequence[int]) -> None:
        self.turn = 0
        self._sums = [torch.zeros(n_subsets, size) for size in sizes]

    def add(self, columns: np.ndarray, gradients: Sequence[torch.Tensor], share: torch.Tensor) -> None:
        """Add some chunks' gradients.

        Parameters
        ----------
        columns : (B, d) integers       the subsets of each chunk
        gradients : (B, p) float32 a space
        share : (B, 1) float32, on the CPU      how much each chunk weighs
        """
        from stride_cli.operators.fit_kernels import add_rows

        members = np.asarray(columns).astype(np.int64).ravel()
        # (M G)_k += g_i of every subset k that holds i: M has d ones a column, and no product is formed. A
        # subset's chunks one after the other, so that its sums stay in the cache from one to the next
        order = np.argsort(members, kind="stable")
        rows, chunks = members[order], order // columns.shape[1]
        weights = np.ascontiguousarray(share[:, 0].numpy())
        for total, gradient in zip(self._sums, gradients, strict=True):
            own = np.ascontiguousarray(gradient.float().cpu().numpy())
            # threads have gates of their own, not chunks: no sum depends on how many there are
            cuts = side_by_side.stretches(own.shape[1], torch.get_num_threads())
            pieces = [(total.numpy(), rows, own, chunks, weights, cut.start, cut.stop) for cut in cuts]
            side_by_side.each(lambda piece: add_rows(*piece), pieces)

    def next_turn(self) -> None:
        """Begin with further subsets, all chunks having been added."""
        self.turn += 1

    def resume(self, sums: list[torch.Tensor], turn: int) -> None:
        """Go on from what `sums` gave in that turn."""
        self._sums, self.turn = sums, turn

    def sums(self) -> list[torch.Tensor]:
        """Return (K, p) float32 a space, on the CPU; not a copy where they are added up there. Subsets whose
        turn has not come have zeros."""
        return self._sums


class DeviceSums(SubsetSums):
    """The same on a device, float32: as many subsets at once as its memory has room for.

    What a batch adds is the product of K × B weights with its B × p gradients, of those subsets alone that
    hold one of its chunks where these are few. No number is added to from two sides at once, so that a run
    is the same each time.

    Parameters
    ----------
    device : torch.device
    rows : int       subsets at once
    """

    def __init__(self, n_subsets: int, sizes: Sequence[int], device: torch.device, rows: int) -> None:
        self.turns = -(-n_subsets // max(1, rows))
        # in memory only what further turns leave: K × p zeros that nothing needs cost a fit seconds
        super().__init__(n_subsets if self.turns > 1 else 0, sizes)
        self._rows = -(-n_subsets // self.turns)  # turns of one size
        self._held = [torch.zeros(self._rows, size, device=device) for size in sizes]

    def add(self, columns: np.ndarray, gradients: Sequence[torch.Tensor], share: torch.Tensor) -> None:
        # 1. Which chunks of the batch are in subsets of this turn
        first = self.turn * self._rows
        columns = np.asarray(columns).astype(np.int64)
        chunk, draw = np.nonzero((columns >= first) & (columns < first + self._rows))
        if not len(chunk):
            return
        touched, place = np.unique(columns[chunk, draw] - first, return_inverse=True)
        # 2. The weights M of these subsets, (k, B)
        few = 2 * len(touched) < self._rows  # a product apart, and then added, moves twice the bytes
        weights = np.zeros((len(touched) if few else self._rows, len(columns)), np.float32)
        weights[place if few else touched[place], chunk] = share.numpy()[chunk, 0]
        device = self._held[0].device
        M, rows = torch.from_numpy(weights).to(device), torch.from_numpy(touched).to(device)
        # 3. M G added up; of few subsets by columns, so that the product apart stays small
        at_once = max(1, _COLUMNS // len(weights))
        for held, gradient in zip(self._held, gradients, strict=True):
            if not few:
                held.addmm_(M, gradient)
                continue
            for start in range(0, gradient.shape[1], at_once):
                some = slice(start, start + at_once)
                held[:, some].index_add_(0, rows, M @ gradient[:, some])

    def next_turn(self) -> None:
        self.sums()
        super().next_turn()
        # what was held is in memory now
        for held in self._held:
            held.zero_()

    def resume(self, sums: list[torch.Tensor], turn: int) -> None:
        super().resume(sums, turn)
        for total, held in zip(self._sums, self._held, strict=True):
            part = total[self._now]
            held[: len(part)].copy_(part)
        # of a pass that was begun where it took several
        if self.turns == 1:
            self._sums = []

    def sums(self) -> list[torch.Tensor]:
        # with one turn nothing is kept in memory
        if self.turns == 1:
            return [held.cpu() for held in self._held]
        for total, held in zip(self._sums, self._held, strict=True):
            part = total[self._now]
            part.copy_(held[: len(part)])
        return self._sums

    @property
    def _now(self) -> slice:
        return slice(self.turn * self._rows, (self.turn + 1) * self._rows)


def subset_sums(n_subsets: int, sizes: Sequence[int], device: torch.device, *, beside: int = 0) -> SubsetSums:
    """Choose where gradients of a device are added up; a note says what that takes of its memory.

    Parameters
    ----------
    beside : bytes that are about to be taken of it beside a batch: gradients that are held together
    """
    # gradients in memory are added up there
    if device.type == "cpu" or not n_subsets:
        return SubsetSums(n_subsets, sizes)
    gates, free = sum(sizes), free_bytes(device)
    rows = rows_at_once(n_subsets, gates, device, beside=beside)
    # as few passes as there is room for, and each of about as many subsets
    turns = -(-n_subsets // rows)
    each = -(-n_subsets // turns)
    whole = f"{n_subsets:,} subsets × {gates:,} gates, {size_in_words(4 * n_subsets * gates)},"
    of_free = "" if free is None else f" of {size_in_words(free)} that are free"
    if turns == 1:
        note(f"{whole} are added up on {device}{of_free}")
    elif turns <= _MOST_TURNS:
        note(
            f"{whole} are more than {device} has room for: {turns} passes over the corpus, {each:,} subsets "
            f"each, {size_in_words(4 * each * gates)}{of_free}; a smaller --rank or --buckets needs fewer"
        )
    else:
        note(
            f"{whole} are added up in memory: {device} would need {turns} passes over the corpus{of_free}; a "
            "smaller --rank or --buckets needs fewer"
        )
        return SubsetSums(n_subsets, sizes)
    return DeviceSums(n_subsets, sizes, device, rows)


def rows_at_once(n_subsets: int, gate_size: int, device: torch.device, *, beside: int = 0) -> int:
    """Count the subsets whose sums a device has room for, beside a batch on its way through the model; 1 at
    least, K where its memory is not known."""
    free = free_bytes(device)
    if free is None:
        return n_subsets
    # a quarter: see `tokens_at_once`
    batch = total_bytes(device) // 4 + _HEAD_COPIES * block_bytes(device)
    # what is left, in float32 numbers, is for sums
    room = free - batch - beside
    return max(1, min(n_subsets, room // max(1, 4 * gate_size)))
