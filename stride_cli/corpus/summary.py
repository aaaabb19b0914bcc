"""Describe an index in the numbers that commands report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.location import Location, RemotePath
from stride_cli.corpus.plan import expected_neighbours, expected_overlapping

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.index_records import IndexInfoRecord, IndexRecord, IndexSummary


def summarise(index: Index, path: Location) -> IndexSummary:
    """Count what is in an index."""
    on_disk = disk_bytes(path)
    counts = index.attributes.get("counts") or {}
    return {
        "index": str(path),
        "documents": index.n_documents,
        "chunks": index.n_chunks,
        "tokens": index.n_tokens,
        "scored_tokens": counts.get("scored_tokens"),
        "unscored_documents": counts.get("unscored_documents"),
        "conversations": counts.get("conversations"),
        "skipped_records": counts.get("skipped_records"),
        "subsets": index.n_subsets,
        "degree": index.degree,
        "block_size": index.attributes["block_size"],
        "bytes": index.n_bytes if on_disk is None else on_disk,
    }


def made(index: Index, path: Location, seconds: float) -> IndexRecord:
    """Describe an index that was just made or changed, in so many seconds."""
    return {"schema": "stride.index/1", **summarise(index, path), "seconds": round(seconds, 3)}


def describe(index: Index, path: Location) -> IndexInfoRecord:
    """Describe an index: its counts, its design, its stages and what it was built from."""
    stated = index.attributes.get
    design = index.n_chunks, index.n_subsets, index.degree
    return {
        "schema": "stride.index_info/1",
        **summarise(index, path),
        "seed": index.seed,
        "chunks_per_subset": index.n_chunks * index.degree / index.n_subsets,
        "expected_neighbours": expected_neighbours(*design),
        "expected_overlapping": expected_overlapping(*design),
        "texts": index.has("corpus/text_bytes"),
        "operators": _operators(index) if index.has("operators") else None,
        "truth": _truth(index) if index.has("truth") else None,
        "fingerprints": index.attributes["fingerprints"],
        "model_path": stated("model_path"),
        "created_by": stated("created_by"),
        "format_version": index.attributes["format_version"],
        "config": stated("config"),
    }


def _operators(index: Index) -> dict[str, Any]:
    """Return the attributes of the operators, with their share of the chunks of today."""
    found = dict(index.group_attributes("operators"))
    if index.has("operators/seen") and found.get("coverage") is not None:
        found["coverage"] *= index.fitted_share
    return found


def _truth(index: Index) -> dict[str, Any]:
    """Count the retrained models; queries and losses are in the group's arrays."""
    subsets, seeds, queries = index.shape("truth/losses")
    alphas = sorted({round(float(alpha), 3) for alpha in index.array("truth/alpha")[:]})
    return {"subsets": subsets, "seeds": seeds, "queries": queries, "alpha": alphas}


def disk_bytes(path: Location) -> int | None:
    """Sum the bytes of a directory, unfinished stages too; None for a zip file or a URL."""
    if isinstance(path, RemotePath) or path.is_file():
        return None
    return sum(
        (Path(directory) / name).stat().st_size for directory, _, names in os.walk(path) for name in names
    )
