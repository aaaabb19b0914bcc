"""Projections: of every chunk's gate gradient the signs of a random projection, some hundred bytes a chunk.

    z_i = h(G_i),   G_i = scored_i g_i        kept of chunk i:  sign(z_i), step_i = Σ_j z_ij² / Σ_j |z_ij|
    G_i · g_x  ≈  z_i · h(g_x)  ≈  step_i · Σ_j sign(z_ij) h(g_x)_j

h folds the p gates of all spaces into r numbers, in stretches in random order and with random signs. Their
products are those of the gates up to noise of ‖G‖ ‖g‖ √(1 / r − 1 / p) (Weinberger et al., ICML 2009). Then
Hadamard matrices turn the numbers, which changes no product. Each number is now a sum of very many gates, and
nearly Gaussian; without turning, the sign of a number that holds few gates would be that of the largest.
h needs no sample of the corpus, and gives a chunk the same bits whatever else is there. So it is made in the
pass that adds up the subsets, and a chunk that is appended gets the bits that it would have had.

Of a chunk only signs are kept (Charikar, STOC 2002), of a query three bits a number. That is the noise of
r / 1.6 numbers in an eighth of the bytes of int8 (`tests/benchmarks/results/projections.jsonl`). Leading
directions of a sample do no better, for gradients share hardly any: the 500 leading directions of a quarter
of 2,000 instruction pairs hold 4 % of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from index_format.errors import IndexDamaged
from stride_cli import side_by_side
from stride_cli.output import note
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from index_format.shards import ShardedArray
    from stride_cli.data.batches import Batch
    from stride_cli.operators.device_sums import DeviceFolding

FORM = 3  # of h, in an index: 1 was not turned, in 2 more gates fell together
PLANES = 3  # bits of each of a query's numbers: eight find as much
STRETCH = 64  # gates that are folded side by side
# by bits: larger numbers, in units of their root mean square, count as that large
_CLIP = {1: 1.0, 2: 1.5, 3: 2.2, 4: 2.6}
_QUERIES_AT_ONCE = 8  # whose planes stay in the processor's cache while the codes pass


class Folding:
    """h: the p gates of all spaces → r numbers.

    Parameters
    ----------
    size : p
    count : r
    seed : int      names the random order and signs
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        random = stream(seed, "projection folding")
        self.count = count
        self._on_device: DeviceFolding | None = None
        # in random order: what has a pattern in its own space, as the leading directions of a matrix, meets
        # nothing of the kind where gates fall together; and no place has two more of them than another
        self._starts = random.permutation(-(-size // STRETCH)) * STRETCH % count
        self._signs = random_signs(random, size)
        # between two turns, of which the second would undo the first
        self._flips = random_signs(random, count)

    def __call__(self, gradients: Sequence[torch.Tensor]) -> np.ndarray:
        """One (B, p) a space → (B, r) float32."""
        from stride_cli.operators.fit_kernels import add_stretches

        folded = np.zeros((len(gradients[0]), self.count), np.float32)
        # 1. Every stretch of gates goes to its place, with the gates' signs
        start = 0
        for gradient in gradients:
            wide = np.ascontiguousarray(gradient.float().cpu().numpy())
            add_stretches(wide, start, STRETCH, self._starts, self._signs, folded)
            start += gradient.shape[1]
        # gates j and j' that fall together have signs of their own: E[h(u) · h(v)] = u · v
        turned(folded, self._flips)
        return folded

    def on(self, device: torch.device) -> DeviceFolding:
        """Fold gradients on a device, where they stay."""
        from stride_cli.operators.device_sums import DeviceFolding

        # made once, for all batches
        if self._on_device is None:
            gates = np.arange(len(self._signs))
            places = (self._starts[gates // STRETCH] + gates % STRETCH) % self.count
            self._on_device = DeviceFolding(places, self._signs, self._flips, device)
        return self._on_device


def random_signs(random: np.random.Generator, count: int) -> np.ndarray:
    """Draw ±1, (count,) float32."""
    return (2 * random.integers(0, 2, count) - 1).astype(np.float32)


def turned(rows: np.ndarray, flips: np.ndarray, *, back: bool = False) -> None:
    """Turn rows (B, r) by Hadamard matrices, in place, with signs (r,) between two turns; or turn back."""
    from stride_cli.operators.fit_kernels import turn, turns

    planned = list(enumerate(turns(rows.shape[1])))
    for number, (start, length) in reversed(planned) if back else planned:
        if number and not back:
            rows *= flips
        turn(rows, start, length)
        if number and back:
            rows *= flips


@lru_cache(maxsize=2)  # to draw one takes longer than to use it
def _folding(size: int, count: int, seed: int) -> Folding:
    return Folding(size, count, seed)


@dataclass(frozen=True)
class Projections:
    """8 b signs of every chunk.

    Attributes
    ----------
    codes : (n, b) uint8      bit j, the highest first: whether z_ij is positive; b is a multiple of 8
    step : (n,) float32       Σ_j z_ij² / Σ_j |z_ij|; 0 of a chunk without a scored token
    seed : int                of the folding

    Both arrays may lie in several files, and stay mapped.
    """

    codes: np.ndarray | ShardedArray
    step: np.ndarray | ShardedArray
    seed: int

    @property
    def size(self) -> int:
        """b, bytes of signs a chunk."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.step.nbytes)

    def __len__(self) -> int:
        return len(self.step)

    def arrays(self) -> dict[str, Any]:
        """Give name within the index's group of operators → values, for `read_projections`."""
        return {"projection_codes": self.codes, "projection_step": self.step}

    def asked(self, *batches: Sequence[torch.Tensor]) -> AskedProjections:
        """Fold queries' gradients, of each batch one (Q, p) float32 a space, so that ``scored_i g_i · g_q``
        can be estimated for every projected chunk."""
        # as chunks were folded, or products mean nothing
        folding = _folding(sum(own.shape[1] for own in batches[0]), 8 * self.size, self.seed)
        # few at a time: what is made of them on the way is several times their planes
        few = (zip(*(own.split(_QUERIES_AT_ONCE) for own in batch), strict=True) for batch in batches)
        found = [bit_planes(folding(group)) for groups in few for group in groups]
        planes, units, noise = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return AskedProjections(self, planes, units, noise)


@dataclass(frozen=True)
class AskedProjections:
    """Estimates of ``scored_i g_i · g_q``, of any of the chunks that are projected.

    Signs are all but independent of a query's numbers v, but for the little that they say of the product:
    the error of ``step_i Σ_j sign_ij v_j`` is Gaussian, step_i ‖v‖ its standard deviation.

    Attributes
    ----------
    projections : Projections
    planes, units : of `bit_planes`, of Q queries
    noise : (Q,) float32      ‖v‖: the estimates' errors have the standard deviation ``noise_q step_i``
    """

    projections: Projections
    planes: np.ndarray
    units: np.ndarray
    noise: np.ndarray

    def estimates(self, start: int, stop: int, queries: slice = slice(None)) -> np.ndarray:
        """Estimate for chunks `start` … `stop`-1, on some of the queries: (Q, stop − start) float32."""
        own, planes, units = self.projections, self.planes[queries], self.units[queries]
        found = np.empty((len(units), stop - start), np.float32)
        pieces = [own.codes] if isinstance(own.codes, np.ndarray) else own.codes.shards
        # each file by itself, so that its codes stay mapped and are read once
        begin = 0
        for piece in pieces:
            low, high = max(start, begin), min(stop, begin + len(piece))
            if low < high:
                codes, step = piece[low - begin : high - begin], np.asarray(own.step[low:high])
                # queries in groups: codes pass once for each, and their planes stay in the cache
                for first in range(0, len(units), _QUERIES_AT_ONCE):
                    some = slice(first, first + _QUERIES_AT_ONCE)
                    scan(codes, step, planes[some], units[some], found[some, low - start : high - start])
            begin += len(piece)
        return found


def about(projections: Projections | None) -> dict[str, int | None]:
    """Describe projections in attributes of the group of operators: bytes a chunk, chunks, seed."""
    if projections is None:
        return {"project": 0, "projected": 0, "project_seed": None, "project_form": None}
    sizes: dict[str, int | None] = {"project": projections.size, "projected": len(projections)}
    return sizes | {"project_seed": projections.seed, "project_form": FORM}


def understood(attributes: Mapping[str, Any]) -> bool:
    """Tell whether the projections of a group of operators, if any, are made as these here."""
    return not attributes.get("project") or attributes.get("project_form") == FORM


def read_projections(arrays: Mapping[str, Any], attributes: Mapping[str, Any]) -> Projections | None:
    """Read projections from arrays and attributes; mapped codes stay mapped.

    Raises
    ------
    IndexDamaged      there are none, or not of the shape that the attributes say
    """
    if attributes.get("sketch"):  # of stride 0.1: signs along leading directions of a sample
        note("sketches that stride 0.1 made are passed over: stride train --project 512 replaces them")
    if not attributes.get("project"):
        return None
    # products of another h would be noise: better no projections, and a word of what to do
    if not understood(attributes):
        size = attributes["project"]
        note(f"projections of another form are passed over: stride train --project {size} replaces them")
        return None
    shape = int(attributes["projected"]), int(attributes["project"])
    codes, step = (arrays.get(f"projection_{name}", np.zeros(0)) for name in ("codes", "step"))
    # both arrays are looked at before any is read: kernels take their shapes for granted
    found = [(each.shape, each.dtype) for each in (codes, step)]
    if found != [(shape, np.uint8), (shape[:1], np.float32)] or shape[1] % 8:
        raise IndexDamaged(
            f"the projections are not {shape[0]:,} rows of {shape[1]:,} bytes of signs, and a scale each",
            fix="fit the operators again: stride train --overwrite",
        )
    return Projections(codes, step, int(attributes["project_seed"]))


class Projector:
    """Projections in the making: a pass hands in chunks' gradients as it meets them.

    Parameters
    ----------
    gate_size : p of all spaces
    size : b, bytes of signs a chunk
    n_chunks : n
    seed : int                          of the folding
    known : Projections, optional       of the first chunks, by the same folding
    folder : directory, optional        where they are kept while they are made, in mapped files: of many
                                        chunks they were more than memory holds; default: in memory
    """

    def __init__(
        self,
        gate_size: int,
        size: int,
        n_chunks: int,
        seed: int,
        known: Projections | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folding = Folding(gate_size, 8 * size, seed)
        self._seed = seed
        if folder is None or not n_chunks:
            self._codes = np.zeros((n_chunks, size), np.uint8)
            self._step = np.zeros(n_chunks, np.float32)
        else:
            # a pass that is gone on with finds what it had written there
            make_room(folder, n_chunks, size)
            self._codes = np.memmap(folder / "codes", np.uint8, "r+", shape=(n_chunks, size))
            self._step = np.memmap(folder / "step", np.float32, "r+", shape=(n_chunks,))
        # chunks that were appended are the only ones to be read
        if known is not None:
            self._codes[: len(known)], self._step[: len(known)] = known.codes, known.step

    def add(self, batch: Batch, gradients: Sequence[torch.Tensor]) -> None:
        """Add a batch's gate gradients g_i, one (B, p) a space."""
        # of the chunk's whole loss: a sum over tokens, which does not change when the corpus grows
        if gradients[0].device.type == "cpu":
            codes, step = encode(self._folding(gradients))
            found = codes, step * batch.scored.numpy()
        else:
            found = self._folding.on(gradients[0].device).encoded(gradients, batch.scored)
        self._codes[batch.rows], self._step[batch.rows] = found

    def state(self) -> dict[str, torch.Tensor]:
        """Give what `resume` goes on from, not a copy; mapped files are flushed, and hold it themselves."""
        if isinstance(self._codes, np.memmap) and isinstance(self._step, np.memmap):
            self._codes.flush()
            self._step.flush()
            return {}
        return {"codes": torch.from_numpy(self._codes), "step": torch.from_numpy(self._step)}

    def resume(self, state: Mapping[str, torch.Tensor]) -> None:
        # of a pass that held them in memory; mapped files were gone on with when they were opened
        if state:
            self._codes[:], self._step[:] = state["codes"].numpy(), state["step"].numpy()

    def projections(self) -> Projections:
        """Return what was handed in; zeros of the others."""
        return Projections(self._codes, self._step, self._seed)


def make_room(folder: Path, n_chunks: int, size: int) -> None:
    """Make the files of so many chunks' projections as long as they will be; what is in them stays."""
    for name, length in (("codes", n_chunks * size), ("step", 4 * n_chunks)):
        with (folder / name).open("ab") as file:
            file.truncate(length)


def encode(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode z (t, r) as codes (t, r / 8) uint8 and steps (t,) float32."""
    from stride_cli.operators.fit_kernels import sizes

    # Σ|z| and Σz² in one pass, without |z| or z² in memory
    size, square = np.empty(len(z), np.float32), np.empty(len(z), np.float32)
    sizes(z, size, square)
    codes = np.packbits(z > 0, axis=1)
    # of step · sign(z), whose product with z itself is to be ‖z‖²
    step = np.divide(square, size, out=np.zeros_like(size), where=size > 0)
    return codes, step


def bit_planes(numbers: np.ndarray, bits: int = PLANES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round rows' numbers v (Q, r) float32 to v_j ≈ unit · Σ_k 2^k t_jk with t_jk = ±1, for `bits` k.

    Returns
    -------
    planes : (Q, bits, r / 64) uint64      bit j of plane k: whether t_jk is 1; ordered as bits of codes are
    units : (Q,) float32
    sizes : (Q,) float32                ‖v‖ as rounded
    """
    most = (1 << bits) - 1  # Σ_k 2^k t_jk is odd, of three bits from −7 to 7
    largest = _CLIP[bits] * np.sqrt(np.square(numbers).mean(axis=1, keepdims=True))
    # places 0 … 7 stand for −7, −5 … 7
    scaled = numbers * (most / np.maximum(largest, most * np.finfo(np.float32).tiny))
    places = np.clip(np.rint((scaled + most) / 2), 0, most)
    # so that the product with v itself is ‖v‖², whatever was cut off
    whole = 2 * places - most
    products = np.einsum("qr,qr->q", numbers, whole)
    squares = np.square(numbers).sum(axis=1)
    units = np.divide(squares, products, out=np.zeros_like(squares), where=products > 0)
    # bit k of a place is whether t_k is 1: Σ_k 2^k t_k = 2 place − 7
    each = places.astype(np.uint8)[:, None] >> np.arange(bits, dtype=np.uint8)[:, None] & 1
    sizes = units * np.sqrt(np.square(whole).sum(axis=1))
    return np.packbits(each, axis=2).view(np.uint64), units.astype(np.float32), sizes.astype(np.float32)


def scan(
    codes: np.ndarray, step: np.ndarray, planes: np.ndarray, units: np.ndarray, found: np.ndarray
) -> None:
    """``found[q, i] = step_i · unit_q · Σ_j sign_ij Σ_k 2^k t_qjk``: chunks shared out among threads.

    Parameters
    ----------
    codes : (n, b) uint8, step : (n,) float32
    planes, units : of `bit_planes`
    found : (Q, n) float32
    """
    from stride_cli.operators.gate_kernels import sign_products

    # 64 signs to a word: a product with t is a count of equal bits
    words = np.require(codes, requirements=["C", "A"]).view(np.uint64)
    side_by_side.each(
        lambda own: sign_products(words[own], step[own], planes, units, found[:, own]),
        side_by_side.stretches(len(words), torch.get_num_threads()),
    )
