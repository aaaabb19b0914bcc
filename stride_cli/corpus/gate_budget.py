"""Choose the gates of the default operators for K subsets, and the bytes of projections.

Arithmetic alone: the plan of an index needs it before there is a model.
"""

from __future__ import annotations

import math

from stride_cli.errors import UsageError

# K × p of all spaces, up to K of about 1,000: 2 GB while they are fitted, 0.54 stored. Half as much loses .03
# of LDS in pre-training, half as much again gains .01
_GATES = 1 << 29
_MOST_GATES = 1 << 30  # where K is large, and p would become too small to tell chunks apart
# K of a language model by default: projections tell chunks apart for fewer bytes, and a fit has K × p sums in
# memory. Of small fine-tuned models subsets tell more: 256 of 800 chunks lose .008 of LDS; large ones few
FEWEST_SUBSETS, _MOST_SUBSETS, _OF_LARGE, _SMALL = 64, 1000, 32, 1 << 20
# more bytes of gates are stored in a few bits a gate (`gate_bits`), of a basis in a byte a number
PACKED_BYTES, LARGE_BASIS = 4 << 20, 1 << 20
_PAIRS_A_TOKEN = 0.2  # different pairs of neighbouring tokens: .06 to .25 in the suites
LOGIT_GATES = (1 << 15, 1 << 18)  # of one logit space, at least and at most; see `logit_gates`
_LOGIT_RANK = 128  # directions of one, at most, by default
# bytes of a chunk's projection by default, at least, and at most where all chunks' are no more than so many
_LEAST_PROJECTED, _PROJECTED = 512, ((1 << 17, 1 << 28), (8192, 1 << 30))
_OF_ANY_GATES, MOST_PROJECTED = 32_768, 1 << 18  # of any number of gates; at all: see `projections`
# directions that chunks have in common: so many at most, and of all chunks so many numbers
_SHARED, _ALL_SHARED = 64, 1 << 23


def inside_gates(n_subsets: int, *, finetuned: bool, adapted: bool = False) -> int:
    """Choose p of the space inside the blocks, for K subsets; `adapted`: half of it, of an adapter."""
    # fewer lose LDS: fine-tuned 2¹⁸ .02 to 2¹⁹, of SmolLM2 2¹⁹ .01, from scratch 2¹⁶ to 2¹⁷
    whole, most = (1 << 29, 1 << (21 if adapted else 20)) if finetuned else (1 << 28, 1 << 17)
    affordable = min(max(whole // max(1, n_subsets), 1 << 16), _MOST_GATES // max(1, n_subsets) // 2)
    return max(1, min(affordable, most))


def pair_gates(n_subsets: int) -> int:
    """Choose the most pairs of tokens, each of which has a gate of its own, for K subsets."""
    return min(max((1 << 28) // max(1, n_subsets), 1 << 12), 1 << 18)


def logit_gates(n_subsets: int, others: int, count: int, *, finetuned: bool = False) -> int:
    """Choose p of each of `count` logit spaces, for K subsets, beside `others` gates of other spaces.

    A whitened space counts by its gates. In fine-tuning the head's many rare tokens would drown the others:
    instructions, 2¹⁹ gates inside and 2¹⁸ instead of 2¹⁵ of each logit space, .79 instead of .81 of LDS; 480
    pairs in 38 steps .60 instead of .70.
    """
    count = max(1, count)
    wanted = 0 if finetuned else (_GATES // max(1, n_subsets) - others) // count
    affordable = (_MOST_GATES // max(1, n_subsets) - others) // count
    return max(1, min(min(max(wanted, LOGIT_GATES[0]), LOGIT_GATES[1]), affordable))


def gate_bits(n_gates: int, *, whitened: bool = True) -> int:
    """Choose the bits of a packed gate: products by two are wrong by .4 / √p of two lengths, which is little
    where p is large; operators without projections beside them keep more."""
    return 2 if whitened and n_gates >= 1 << 16 else 4


def gate_bytes(n_subsets: int, n_gates: int) -> int:
    """Return the bytes on disk of a language model's gates."""
    packed, whole = gate_bits(n_gates) * -(-n_gates // 8) + 4, 4 * n_gates
    return n_subsets * (whole if n_subsets * whole <= PACKED_BYTES else packed)


def most_subsets(n_layers: int, width: int) -> int:
    """Choose the most subsets of a fine-tuned model by default."""
    return _MOST_SUBSETS if is_small(n_layers, width) else _OF_LARGE


def is_small(n_layers: int, width: int) -> bool:
    """Tell whether a fine-tuned model is steered at all linear layers, not only at those that write: of width
    128 these have .71 of LDS for .80, of 256 and 576 more directions of them as much as all."""
    return 8 * n_layers * width**2 <= _SMALL


def steered_blocks(n_layers: int) -> range:
    """Choose the blocks of a large fine-tuned model that are steered, last first: of 16 or more every second,
    of 24 every third, …; neighbours say nearly the same."""
    return range(n_layers - 1, -1, -max(1, n_layers // 8))


def _inside(n_layers: int, width: int, finetuned: bool) -> tuple[float, float]:
    """Return the gates inside the blocks, in d², and the rows of their bases, in d, at full rank."""
    if finetuned and not is_small(n_layers, width):
        return 2.63 * (count := len(steered_blocks(n_layers))), 7.36 * count
    return (8 * n_layers, 22 * n_layers) if finetuned else (2 * n_layers, 9 * n_layers)


def default_gates(
    n_subsets: int, n_tokens: int, *, finetuned: bool = False, shape: tuple[int, int, int] | None = None
) -> int:
    """Estimate p of the default operators of a language model; 0 tokens are unknown, and as if many.

    `shape`: layers, width and vocabulary, of which a small model has no more gates.
    """
    inside = inside_gates(n_subsets, finetuned=finetuned)
    head = logit_gates(n_subsets, inside, 2, finetuned=finetuned)
    if shape is not None:
        layers, width, vocabulary = shape
        inside = min(inside, int(_inside(layers, width, finetuned)[0] * width**2))
        head = min(head, vocabulary * min(width, _LOGIT_RANK))
    pairs = pair_gates(n_subsets)
    if n_tokens:
        pairs = min(pairs, round(_PAIRS_A_TOKEN * n_tokens))
    return inside + 2 * head + pairs


def basis_bytes(n_subsets: int, layers: int, width: int, *, finetuned: bool = False) -> int:
    """Estimate the bytes of the default bases."""
    gates, rows = _inside(layers, width, finetuned)
    rank = min(width, int(math.sqrt(inside_gates(n_subsets, finetuned=finetuned) / gates)))
    return (numbers := int(rank * rows * width)) * (1 if 4 * numbers >= LARGE_BASIS else 4)


def default_projection(n_chunks: int, n_gates: int, *, finetuned: bool = False) -> int:
    """Choose the bytes of a chunk's projection: a power of 2 from 512 to 131,072.

    A query scans a gigabyte at most. Beyond 32,768 there is a sign for each gate of a small fine-tuned model;
    of a large one 480 chunks lose nothing with 8,192.
    """
    found = max(min(most, _power(whole // max(1, n_chunks))) for most, whole in _PROJECTED)
    small = n_gates // 8 if finetuned and n_gates <= _SMALL else 0
    return max(_LEAST_PROJECTED, min(found, max(_OF_ANY_GATES, _power(small))))


def _power(value: int) -> int:
    """Return the largest power of 2 up to a value, or 1."""
    return 1 << max(1, value).bit_length() - 1


def check_projection(size: int | None) -> None:
    """UsageError for bytes a chunk that projections cannot have."""
    if size is not None and (not 0 <= size <= MOST_PROJECTED or size % 8):
        found = f"--project is {size:,} (expected a multiple of 8, 0 to {MOST_PROJECTED:,})"
        raise UsageError(found, fix="try --project 512")


def projected_bytes(n_chunks: int, size: int) -> int:
    """Return the bytes on disk of projections, at most: `size` and a scale a chunk, and shared directions."""
    return n_chunks * (size + 4) + (4 * n_chunks + 8) * shared_directions(n_chunks) if size else 0


def shared_directions(n_chunks: int) -> int:
    """Choose how many directions that chunks share are kept, at most; see `operators.redundancy`."""
    return min(_SHARED, max(1, _ALL_SHARED // max(1, n_chunks)), n_chunks)
