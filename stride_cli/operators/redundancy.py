"""Near-duplicates share credit: the leading directions of the kernel of chunks' gradients, by projections.

The Fisher matrix in the bases is a Kronecker product, of labels drawn from the model. It does not know what
the chunks of one corpus share, a template or a task, and gives each chunk full credit for all of it. Let G
(n, p) be the chunks' gradients as the fit weighs them, and K = G Gᵀ with mean diagonal m. Preconditioning the
query's gradient by the chunks' own second moments too,

    g'_x = (I + GᵀG / γ)⁻¹ g_x,      has the influences      w' = γ (K + γ)⁻¹ w,      γ = ridge · m,

is kernel ridge regression in the chunks. The diagonal of K takes the same part of every chunk, which changes
no order. The rest of K has few large directions:

    K ≈ m I + m V Λ Vᵀ,              w' = w − V (Λ / (Λ + ridge + 1)) Vᵀ w      up to a factor.

Projections are a sketch of G, so they hold K, of any two chunks to m π / (2 √r). V and Λ are found in a
random sample of chunks and carried over to all of them by one scan (Nyström; Williams & Seeger, NeurIPS
2000). A chunk is no evidence of its own redundancy. So a sampled chunk is left out where it is carried over
to itself, and for any other chunk its nearest copy in the sample is: copies get the same, whichever were
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.errors import IndexDamaged
from stride_cli import side_by_side
from stride_cli.corpus.gate_budget import shared_directions
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from index_format.shards import ShardedArray
    from stride_cli.operators.projections import Projections

FORM = 2  # of what an index holds: in 1 copies of a chunk shared unlike
SAMPLE = 1024  # chunks whose products are taken; 256 gave nearly the same on two suites
_PERMUTED = 1 << 20  # of more chunks a sample is drawn without a permutation of them all
_LEAST = 1.0  # eigenvalue, in copies of a chunk: less is too little to tell
_COLUMNS = 1 << 14  # of signs that are unpacked together
_ROWS = 1 << 16  # chunks whose columns are added up together
_CARRIED = 1 << 12  # chunks that a scan carries over together
_CARRIED_BITS = 1 << 16  # signs that it looks at: a cosine is then known to .006
_ITSELF = 0.9  # cosine from which a chunk is taken for a copy


@dataclass(frozen=True)
class Redundancy:
    """Directions that many chunks' gradients share.

    Attributes
    ----------
    vectors : (n, k) float32      orthonormal columns, V; of an index they stay mapped, and may lie in several
                                  files
    values : (k,) float64         Λ, descending: roughly how many chunks share each direction
    """

    vectors: np.ndarray | ShardedArray
    values: np.ndarray

    @classmethod
    def of(cls, projections: Projections) -> Redundancy:
        """Find them from the projections of all chunks."""
        count, bits = len(projections), 8 * projections.size
        most = shared_directions(count)
        # 1. A random sample, and its chunks' lengths in units of √m
        random = stream(projections.seed, "redundancy sample")
        drawn = (
            random.permutation(count) if count <= _PERMUTED else random.choice(count, SAMPLE, replace=False)
        )
        sample = np.sort(drawn[:SAMPLE])
        lengths = _lengths(projections, sample)
        mean = float(np.mean(np.square(lengths))) if len(sample) else 0.0
        nothing = cls(np.zeros((count, 1), np.float32), np.zeros(1))  # an array has a column at least
        if not (np.isfinite(mean) and mean > 0):
            return nothing
        # 2. Their kernel (m, m) without its diagonal, and the directions above the noise of signs
        lengths /= np.sqrt(mean)
        kernel = _cosines(np.asarray(projections.codes[sample])) * lengths[:, None] * lengths
        np.fill_diagonal(kernel, 0.0)
        values, vectors = np.linalg.eigh(kernel)
        # noise alone, of π / (2 √bits) a product, has eigenvalues up to 2 √m times that
        noise = np.sqrt(len(sample)) * np.pi / np.sqrt(bits)
        kept = np.flatnonzero(values > max(_LEAST * len(sample) / count, noise))[::-1][:most]
        if not len(kept):
            return nothing
        values, vectors = values[kept], vectors[:, kept]
        # 3. Carried over to all chunks, unless the sample is all of them
        if len(sample) == count:
            return cls(vectors.astype(np.float32), values)
        found = _carried_over(projections, sample, lengths[:, None] * vectors, mean)
        found[sample] = kernel @ vectors
        return cls(*_orthonormal(found, values))

    @cached_property
    def means(self) -> np.ndarray:
        """(k,) float64: of the columns."""
        count, found = len(self.vectors), np.zeros(len(self.values))
        for start in range(0, count, _ROWS):
            found += np.asarray(self.vectors[start : start + _ROWS], np.float64).sum(axis=0)
        return found / max(1, count)

    def arrays(self) -> dict[str, Any]:
        """Name within the index's group of operators → values, for `read_redundancy`."""
        return {"projection_common": self.vectors, "projection_common_values": self.values}


def read_redundancy(
    arrays: Mapping[str, Any], attributes: Mapping[str, Any], n_chunks: int
) -> Redundancy | None:
    """Read what `Redundancy.arrays` gave, of so many chunks; None where none was stored, or of another form:
    then it is found again whenever it is asked for.

    Raises
    ------
    IndexDamaged      the arrays are not of these shapes
    """
    vectors, values = arrays.get("projection_common"), arrays.get("projection_common_values")
    if vectors is None or values is None or attributes.get("common_form") != FORM:
        return None
    if vectors.dtype != np.float32 or vectors.shape != (n_chunks, len(values)):
        raise IndexDamaged(
            f"what chunks have in common is not {n_chunks:,} rows of {len(values)} numbers",
            fix="fit the operators again: stride train --overwrite",
        )
    return Redundancy(vectors, np.asarray(values, np.float64))


def _lengths(projections: Projections, chunks: np.ndarray | slice) -> np.ndarray:
    """Compute lengths of gradients, (t,) float64: a step is √(π / 2) of the root mean square of Gaussians."""
    steps = np.asarray(projections.step[chunks], np.float64)
    return steps * np.sqrt(16.0 * projections.size / np.pi)


def _cosines(codes: np.ndarray) -> np.ndarray:
    """Estimate cosines between chunks from how many of their signs agree: (m, b) uint8 → (m, m) float64."""
    bits = 8 * codes.shape[1]
    agree = np.zeros((len(codes), len(codes)))
    for signs in _signs(codes):
        agree += signs @ signs.T
    # E[sign · sign] = (2 / π) asin ρ (Charikar, STOC 2002)
    return np.sin(agree * (np.pi / 2.0 / bits))


def _signs(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield columns of signs, ±1, (m, c) float32, one part after the other."""
    for start in range(0, codes.shape[1], _COLUMNS // 8):
        signs = np.unpackbits(codes[:, start : start + _COLUMNS // 8], axis=1).astype(np.float32)
        signs *= 2.0
        signs -= 1.0
        yield signs


def _carried_over(
    projections: Projections, sample: np.ndarray, vectors: np.ndarray, mean: float
) -> np.ndarray:
    """Multiply all chunks with combinations of the sample's, (n, k) float32.

    Parameters
    ----------
    vectors : (m, k) float64      times the lengths of the sample's chunks
    mean : square of a length that counts as 1
    """
    import torch

    from stride_cli.operators.gate_kernels import cosines

    size = min(projections.size, _CARRIED_BITS // 8)
    codes, count = projections.codes, len(projections)
    # the angle of two chunks is how many of their signs differ (see `_cosines`): sums of signs instead, with
    # which one pass would do, take those of copies for half as large again
    table = np.cos(np.arange(8 * size + 1) * (np.pi / 8 / size)).astype(np.float32)
    others = np.ascontiguousarray(codes[sample][:, :size]).view(np.uint64)
    found = np.empty((count, vectors.shape[1]), np.float32)
    combined = vectors.astype(np.float32)
    with progress("what chunks have in common", count, unit="chunks") as bar:
        for start in range(0, count, _CARRIED):
            stop = min(start + _CARRIED, count)
            words = np.ascontiguousarray(codes[start:stop][:, :size]).view(np.uint64)
            alike = np.empty((stop - start, len(sample)), np.float32)
            parts = side_by_side.stretches(stop - start, torch.get_num_threads())
            pieces = [(words[part], others, table, alike[part]) for part in parts]
            side_by_side.each(lambda piece: cosines(*piece), pieces)
            nearest = alike.argmax(axis=1)[:, None]
            largest = np.take_along_axis(alike, nearest, axis=1)
            np.put_along_axis(alike, nearest, np.where(largest > _ITSELF, 0.0, largest), axis=1)
            lengths = _lengths(projections, slice(start, stop)) / np.sqrt(mean)
            found[start:stop] = alike @ combined * lengths[:, None].astype(np.float32)
            bar.advance(stop - start)
    return found


def _orthonormal(found: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write F Λ⁻¹ Fᵀ, F (n, k), as V Λ' Vᵀ with orthonormal V (n, k) float32; Λ' descending."""
    gram = (found.T @ found).astype(np.float64)
    # F = Q R with RᵀR the Gram matrix, of which the root is taken: F (RᵀR)^-½ has orthonormal columns
    sizes, turn = np.linalg.eigh(gram)
    kept = sizes > 1e-9 * max(float(sizes.max(initial=0.0)), np.finfo(np.float64).tiny)
    sizes, turn = sizes[kept], turn[:, kept]
    root = np.sqrt(sizes)
    inner = (root[:, None] * turn.T) / values @ (turn * root)
    strength, mixed = np.linalg.eigh(inner)
    strength, mixed = strength[::-1], mixed[:, ::-1]
    basis = (turn / root) @ mixed
    return (found @ basis.astype(np.float32)), np.maximum(strength, 0.0)
