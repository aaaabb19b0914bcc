"""Choose the subsets of an index, and plan it by formula: bytes, memory, coverage, collisions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from stride_cli.corpus import gate_budget as budget
from stride_cli.corpus.options import DEFAULT_BLOCK_SIZE, MAX_SUBSETS, DesignOptions, PlanOptions
from stride_cli.errors import CorpusError, UsageError
from stride_cli.schema.index_records import IndexPlanRecord

DEFAULT_DEGREE = 10  # tab:stride_hparams
_ALL_UP_TO = 1_000  # K = n below: one subset a chunk costs nothing there
_CHUNKS_PER_SUBSET = 3  # design.md section 10, point 5: n / K = 3 keeps 87 % of the direct readout
# tab:stride_hparams: 8 subsets of 2 examples in each of 10,000 steps
_SGD_DRAWS = 8 * 2 * 10_000
# a batch of documents, whatever the corpus: plan.jsonl measured 49 and 67 MB, scale.jsonl 30 of 10⁸ chunks
_BUILD_BYTES = 64 << 20
_DESCRIBED = 10_000  # bytes of what describes an index: zarr.json and manifests


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """The size of a chunked corpus; of `masked_chunks` the scored tokens are no suffix."""

    documents: int
    chunks: int
    tokens: int
    id_bytes: int = 0
    title_bytes: int = 0
    text_bytes: int = 0
    masked_chunks: int = 0


def choose_design(
    n_chunks: int, design: DesignOptions = DesignOptions(), most: int | None = None
) -> tuple[int, int]:
    """Choose K and d for n chunks: what is given, defaults for what is None.

    Default K: n up to 1,000 chunks, then n / 3 but at least 1,000 and at most 65,535; of a language model at
    most `most` (`gate_budget`).
    Default d: 10, at most K / 2 (a chunk in all subsets cannot be told from another).

    Raises:
        CorpusError: No chunk; fewer chunks than the subsets asked for.
        UsageError: A degree of more than K / 2.
    """
    n_subsets, degree = design.n_subsets, design.degree
    if n_chunks < 1:
        raise CorpusError("the corpus has no chunk", fix="give documents that hold text")
    if n_subsets is None:
        n_subsets = max(min(default_subsets(n_chunks), most or MAX_SUBSETS), min(2 * (degree or 1), n_chunks))
    elif n_subsets > n_chunks:
        found = f"--subsets is {n_subsets:,}, expected at most the chunks of the corpus, {n_chunks:,}"
        fix = f"leave --subsets out (here: {default_subsets(n_chunks):,}), or give a larger corpus"
        raise CorpusError(found, fix=fix)
    half = max(1, n_subsets // 2)
    if degree is None:
        degree = min(DEFAULT_DEGREE, half)
    if degree > half:
        raise UsageError(
            f"--degree is {degree}, expected at most half of the {n_subsets:,} subsets, {half:,}: chunks "
            "that are in most of them are hard to tell apart",
            fix="leave it out, or give more subsets (--subsets): there may be as many as chunks",
        )
    return n_subsets, degree


def limited_design(n_chunks: int, design: DesignOptions) -> DesignOptions:
    """Lower K and d, where they were asked for, to what n chunks can have."""
    n_subsets = None if design.n_subsets is None else max(1, min(design.n_subsets, n_chunks))
    half = max(1, (n_chunks if n_subsets is None else n_subsets) // 2)
    degree = None if design.degree is None else max(1, min(design.degree, half))
    return DesignOptions(block_size=design.block_size, n_subsets=n_subsets, degree=degree)


def default_subsets(n_chunks: int) -> int:
    """Choose the number of subsets K for n chunks where the user gives none."""
    return min(n_chunks, max(_ALL_UP_TO, min(n_chunks // _CHUNKS_PER_SUBSET, MAX_SUBSETS)))


def expected_neighbours(n_chunks: int, n_subsets: int, degree: int, shared: int | None = None) -> float:
    """Count the other chunks expected to share `shared` (default d - 1) or more of a chunk's d subsets.

    The number that two columns share is hypergeometric: P(s) = C(d, s) C(K - d, d - s) / C(K, d).
    """
    least = degree - 1 if shared is None else shared
    ways = sum(
        math.comb(degree, s) * math.comb(n_subsets - degree, degree - s) for s in range(least, degree + 1)
    )
    # integers, divided once: exact where floats would overflow
    return float(Fraction((n_chunks - 1) * ways, math.comb(n_subsets, degree)))


def expected_overlapping(n_chunks: int, n_subsets: int, degree: int) -> float:
    """Count those expected to share d / 3 or more: the paper's guarantee, of an expander, asks for none."""
    return expected_neighbours(n_chunks, n_subsets, degree, max(1, -(-degree // 3)))


def plan_index(
    counts: CorpusCounts,
    options: PlanOptions = PlanOptions(),
    *,
    finetuned: bool = False,
    vocabulary: int = 1 << 16,
    most_subsets: int | None = None,
    shape: tuple[int, int, int] | None = None,
) -> IndexPlanRecord:
    """Plan the index of a corpus; `IndexPlanRecord` describes every number.

    Args:
        counts: Zero documents or tokens are unknown, and left out of the bytes.
        options: Design (`choose_design`, which also names the errors), operators and projections.
        finetuned: Whether the model is a fine-tuned one, whose default operators are larger.
        vocabulary: Decides whether a token takes 2 bytes or 4.
        most_subsets, shape: As for `choose_design`, and `default_gates`.
    """
    n = counts.chunks
    k, d = choose_design(n, options, most_subsets)
    p = options.gate_dimension or budget.default_gates(k, counts.tokens, finetuned=finetuned, shape=shape)
    sizes = {
        "corpus/tokens": counts.tokens * (2 if vocabulary <= 1 << 16 else 4),
        "corpus/chunk_offsets": 8 * (n + 1),
        "corpus/chunk_document": 8 * n,
        "corpus/loss_start": 4 * n,
        "corpus/loss_mask": counts.tokens if counts.masked_chunks else 0,
        "corpus/document_offsets": 8 * (counts.documents + 1),
        "corpus/document_id_bytes": counts.id_bytes,
        "corpus/document_id_offsets": 8 * (counts.documents + 1),
        "corpus/title_bytes": counts.title_bytes,
        "corpus/title_offsets": 8 * (counts.documents + 1) if counts.title_bytes else 0,
        "corpus/text_bytes": counts.text_bytes if options.store_text else 0,
        "corpus/text_offsets": 8 * (counts.documents + 1) if options.store_text else 0,
        "design/columns": 2 * n * d,
        "design/row_offsets": 8 * (k + 1),
    }
    bases = budget.basis_bytes(k, *shape[:2], finetuned=finetuned) if shape else 0
    one_model = budget.gate_bytes(k, p) + bases
    size = budget.default_projection(n, p, finetuned=finetuned)
    projected = budget.projected_bytes(n, size if options.project is None else options.project)
    models = 1 + options.checkpoints
    return {
        "schema": "stride.index_plan/1",
        "n_documents": counts.documents or None,
        "n_chunks": n,
        "n_tokens": counts.tokens or None,
        "n_subsets": k,
        "degree": d,
        "chunks_per_subset": n * d / k,
        "coverage_closed": 1.0,
        # the share of chunks that uniform draws are expected to touch: 1 - (1 - 1/n)^draws
        "coverage_sgd": 1.0 if n == 1 else -math.expm1(_SGD_DRAWS * math.log1p(-1 / n)),
        "expected_neighbours": expected_neighbours(n, k, d),
        "expected_overlapping": expected_overlapping(n, k, d),
        "gate_dimension": p,
        "gate_bytes": one_model * models,
        "projection_bytes": projected * models,
        # the byte a token is of the index's own model: with checkpoints beside it, tokens count as at the end
        "pass_bytes": n * models + (counts.tokens if finetuned and models == 1 else 0),
        "bytes": {name: size for name, size in sizes.items() if size},
        "total_bytes": sum(sizes.values()) + _DESCRIBED,
        "build_memory_bytes": _BUILD_BYTES,
        "fit_memory_bytes": 4 * k * p,
        "query_memory_bytes": (sizes["design/columns"] + one_model + projected) * models,
    }


def choose_block_size(requested: int | None, context: int | None) -> int:
    """Choose the tokens of a block: those asked for, else 512 or the context; UsageError for more than it."""
    if requested is None:
        return min(DEFAULT_BLOCK_SIZE, context or DEFAULT_BLOCK_SIZE)
    if context is not None and requested > context:
        most = f"at most the model's context of {context:,} tokens"
        fix = f"give --block-size {context}, or leave it out"
        raise UsageError(f"--block-size is {requested:,}, expected {most}", fix=fix)
    return requested
