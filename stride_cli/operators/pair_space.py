"""The space of pairs of tokens: a gate of its own for each pair that follows another in the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from stride_cli import side_by_side
from stride_cli.corpus.gate_budget import pair_gates
from stride_cli.data.batches import ChunkReader, scored_pairs
from stride_cli.errors import UsageError
from stride_cli.operators.operator_space import BasisOptions, OperatorSpace, Sample

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

_ENTRIES, _DEVICE_ENTRIES = 1 << 21, 1 << 24  # positions × gates looked up at once
_PAIRS_HELD = 1 << 24  # tokens whose pairs are counted at once


class PairLogitSpace(OperatorSpace):
    """One gate for every pair of tokens that follow each other in the corpus: ``a_g`` is added to the logit
    of y wherever the current token is x, g = (x, y).

    What `TokenLogitSpace` says of all tokens in r directions, this says of each pair by itself, so that what
    only a few chunks teach (a name's second half) is not drowned by what all of them do.

    Parameters
    ----------
    start : (V + 1,) int64      the gates of token x are start[x] … start[x + 1] − 1
    second : (p,) int64         y of each gate
    factor : (p,) float32       how strongly each gate shifts its logit

    Raises
    ------
    ValueError      `start` does not rise from 0 to p, or a y is no token
    """

    name = "pair-logit"
    site = "logit"
    source = "tokens"
    whitens = True
    # a few frequent pairs make up the mean eigenvalue, and most gates would hardly count. Of 1, 2, 4 and 8
    # by every second query of the suites of instructions and WikiText
    mean_eigenvalue = 4.0

    def __init__(self, start: torch.Tensor, second: torch.Tensor, factor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("start", start.long().clone())
        self.register_buffer("second", second.long().clone())
        self.register_buffer("factor", factor.float().clone())
        self.start: torch.Tensor
        self.second: torch.Tensor
        self.factor: torch.Tensor
        self.gate_size = len(second)
        inside = not len(second) or (second.min() >= 0 and second.max() < len(start) - 1)
        if start[0] != 0 or start[-1] != len(second) or (start.diff() < 0).any() or not inside:
            raise ValueError("pairs of tokens that the vocabulary does not have")

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        ids, length = hidden, hidden.shape[1]
        shift = gates.new_zeros(ids.numel(), len(self.start) - 1)
        for _, _, position, gate in self._entries(ids.reshape(-1)):
            values = gates[position // length, gate] * self.factor[gate]
            shift.index_put_((position, self.second[gate]), values)  # no place twice: each pair is there once
        return shift.view(*ids.shape, -1)

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        by_loop = cotangent.device.type == "cpu"
        return self._by_loop(hidden, cotangent) if by_loop else self._by_entries(hidden, cotangent)

    def _by_entries(self, ids: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """`gate_gradient` where nothing but whole operations can be asked for.

        Positions of a row that hold the same token are added up first, one after the other, so that no gate
        is written to twice: the gradient is the same each time, which numbers scattered to it are not.
        """
        vocabulary = len(self.start) - 1
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        keys, order = torch.sort((rows * vocabulary + ids).reshape(-1), stable=True)
        own, counts = torch.unique_consecutive(keys, return_counts=True)  # (N,) each token of each row
        ends = counts.cumsum(0)
        flat = cotangent.reshape(ids.numel(), -1)
        row, token = own // vocabulary, own % vocabulary
        gradient = torch.zeros(len(ids) * self.gate_size, device=ids.device)
        for first, last, place, gate in self._entries(token):
            before = int(ends[first - 1]) if first else 0
            some = flat.index_select(0, order[before : int(ends[last - 1])]).float()
            sums = torch.segment_reduce(some, "sum", lengths=counts[first:last], unsafe=True)
            values = sums[place - first, self.second[gate]] * self.factor[gate]
            gradient[row[place] * self.gate_size + gate] = values
        return gradient.view(len(ids), self.gate_size)

    def _by_loop(self, ids: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """`gate_gradient` in memory, without a list of all entries."""
        from stride_cli.operators.fit_kernels import add_pairs

        tokens, values = ids.contiguous().numpy(), cotangent.float().contiguous().numpy()
        start, second, factor = self.start.numpy(), self.second.numpy(), self.factor.numpy()
        gradient = torch.zeros(len(ids), self.gate_size)
        found = gradient.numpy()
        side_by_side.each(
            lambda rows: add_pairs(tokens[rows], values[rows], start, second, factor, found[rows]),
            side_by_side.stretches(len(tokens), torch.get_num_threads()),
        )
        return gradient

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        # a basis of unit vectors, one for each pair: all of the corpus says which, not the sample's moments
        return cls.of_corpus(sample.chunks, sample.model.vocab_size, options.ranks[cls.name])

    @classmethod
    def of_corpus(cls, chunks: ChunkReader, vocab_size: int, most: int) -> Self:
        """Make gates of the corpus's pairs of a token and the scored one after it: the most frequent ones."""
        pairs, counts = token_pairs(chunks, vocab_size)
        if len(pairs) > most:
            kept = np.sort(np.argsort(-counts, kind="stable")[:most])
            pairs, counts = pairs[kept], counts[kept]
        start = np.searchsorted(pairs, np.arange(vocab_size + 1) * vocab_size)
        # the Fisher matrix of such gates is close to diagonal, and close to how often each pair occurs: its
        # inverse root is count^−½, here as if each had been seen once more
        factor = 1.0 / np.sqrt(counts + 1.0)
        return cls(torch.from_numpy(start), torch.from_numpy(pairs % vocab_size), torch.from_numpy(factor))

    @classmethod
    def check_model(cls, model: AttributableModel) -> None:
        if model.classes:
            raise UsageError(f"space {cls.name} is of tokens that follow each other", fix="use --space logit")

    @classmethod
    def choose_rank(cls, model: AttributableModel, n_subsets: int, asked: int | None) -> int:
        """Choose how many pairs, not directions."""
        return pair_gates(n_subsets)

    def scale(self, part: int, factor: float) -> None:
        self.factor.mul_(factor)

    def _entries(self, tokens: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield places of tokens (n,) and their gates, two (N,) int64, in parts that fit in memory, with the
        first place of each part and the one behind its last."""
        first = self.start[tokens]
        counts = self.start[tokens + 1] - first  # gates of each token
        ends = counts.cumsum(0)
        at_once = _ENTRIES if tokens.device.type == "cpu" else _DEVICE_ENTRIES
        begin, total = 0, 0
        while begin < len(tokens):
            # as many tokens as have that many gates together, one at least
            stop = max(begin + 1, int(torch.searchsorted(ends, total + at_once, right=True)))
            own = counts[begin:stop]
            # of counts (2, 3): places 0 0 1 1 1, and the gates within each 0 1 0 1 2
            place = torch.repeat_interleave(torch.arange(begin, stop, device=tokens.device), own)
            before = torch.repeat_interleave(ends[begin:stop] - own - total, own)
            within = torch.arange(len(place), device=tokens.device) - before
            yield begin, stop, place, first[place] + within
            begin, total = stop, int(ends[stop - 1])


def token_pairs(chunks: ChunkReader, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the `scored_pairs` of all chunks: pairs, ascending, and how often each occurs, two (N,) int64."""
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[np.ndarray] = []
    held = 0
    for row in range(chunks.n_chunks):
        waiting.append(scored_pairs(*chunks.chunk(row), vocab_size))
        held += len(waiting[-1])
        if held > _PAIRS_HELD or row + 1 == chunks.n_chunks:
            new, times = np.unique(np.concatenate(waiting), return_counts=True)
            pairs, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
            # exact: sums of integers below 2^53
            counts = np.bincount(place, np.concatenate([counts, times]), len(pairs)).astype(np.int64)
            waiting, held = [], 0
    return pairs, counts
