"""Choose documents to train on for a task, and equally many at random and by BM25."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.output import to_json
from stride_cli.randomness import stream
from stride_cli.research.selection.aggregation import Choice, check_size, choose
from stride_cli.research.selection.options import SelectOptions
from stride_cli.research.selection.stored import require_stored_text, stored_documents

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.options import SharingOptions
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace, WorkspacePath

SETS = ("chosen", "random", "bm25")


@dataclass(frozen=True)
class Selection:
    """Three selections of the same size.

    Attributes
    ----------
    chosen, bm25 : list of Choice      in the order in which they were chosen
    random : (size,) int64             document numbers
    """

    chosen: list[Choice]
    bm25: list[Choice]
    random: np.ndarray


def run_selection(
    where: WorkspacePath, task: Path, options: SelectOptions, sharing: SharingOptions | None = None
) -> tuple[Workspace, QuerySet, Selection]:
    """Read the queries, select, and write if asked to; refuse what cannot work first.

    Raises
    ------
    UsageError      as `check_selection`; no file `task`, an unknown method, something at `out`
    StageMissing    the index has no operators, and the method needs them
    """
    from index_format.reader import Index
    from stride_cli.data.query_files import read_queries
    from stride_cli.research.evaluation.bench import check_method

    if options.out is not None:
        refuse_existing(options.out, overwrite=options.overwrite)
    check_selection(Index.open(where.index), options.size)
    check_method(options.method)
    if not task.is_file():
        raise UsageError(f"there is no file '{task}'", fix="give the path of a file of queries")
    opened = where.open()
    queries = read_queries(opened, task)
    # alone, it means the operators that the index has
    spec = "stride:stored=true" if options.method == "stride" else options.method
    if sharing is not None and sharing.shared:
        from stride_cli.research.evaluation.workers import shared_document_scores

        scored = shared_document_scores(where, spec, queries, sharing)
    else:
        scored = _document_scores(opened, spec, queries)
    found = select(opened, queries, options.size, scored)
    if options.out is not None:
        write_selection(options.out, opened, found, queries, options)
    return opened, queries, found


def check_selection(index: Index, size: int) -> None:
    """Refuse what cannot work, before anything is scored.

    Raises
    ------
    UsageError      more documents than there are, an index without text, a classifier's index
    """
    refuse_classifier(index, "documents are selected from text")
    check_size(size, index.n_documents)
    require_stored_text(index)


def select(task: Workspace, queries: QuerySet, size: int, scored: Iterable[np.ndarray]) -> Selection:
    """Choose documents by a method's scores, by BM25 in the same way, and at random.

    Parameters
    ----------
    task : Workspace            index and model
    queries : QuerySet          Q queries that should become better
    scored : Q arrays (D,)      the documents' scores, sums over their chunks (for BM25: the best chunk's)

    Raises
    ------
    UsageError      as `check_selection`
    """
    from stride_cli.output import progress

    index = task.index
    owner = np.asarray(index.array("corpus/chunk_document"))

    def rows() -> Iterator[np.ndarray]:
        with progress("scoring", len(queries), unit="queries") as bar:
            for scores in scored:
                yield scores
                bar.advance()

    chosen = choose(rows(), index.n_documents, size, seed=task.seed)
    lexical = _bm25_rows(index, owner, queries)
    bm25 = choose(lexical, index.n_documents, size, seed=task.seed)
    random = stream(task.seed, "random selection").permutation(index.n_documents)[:size]
    return Selection(chosen, bm25, random.astype(np.int64))


def _document_scores(task: Workspace, spec: str, queries: QuerySet) -> Iterator[np.ndarray]:
    """Score documents by a method in this process, (D,) float64 for each query."""
    from stride_cli.research.evaluation.scoring import document_blocks, fitted_method

    for block in document_blocks(fitted_method(task, spec), queries, task.index):
        yield from block


def _bm25_rows(index: Index, owner: np.ndarray, queries: QuerySet) -> Iterator[np.ndarray]:
    """Score documents by the BM25 of their best chunk, over tokens, in Lucene's form (k1 = 1.5, b = 0.75)."""
    from scipy.sparse import csr_array

    tokens = np.asarray(index.array("corpus/tokens"), np.int64)
    lengths = np.asarray(np.diff(np.asarray(index.array("corpus/chunk_offsets"))), np.int64)
    n_chunks, rows = len(lengths), np.repeat(np.arange(len(lengths)), lengths)
    size = int(max(tokens.max(initial=0), *(ids.max(initial=0) for ids in queries.ids))) + 1
    counts = csr_array((np.ones(len(tokens)), (rows, tokens)), shape=(n_chunks, size))
    counts.sum_duplicates()
    frequency = np.bincount(counts.indices, minlength=size)
    rarity = np.log1p((n_chunks - frequency + 0.5) / (frequency + 0.5))
    norm = 1.5 * (0.25 + 0.75 * lengths / max(1.0, lengths.mean()))
    held = np.repeat(norm, np.diff(counts.indptr))
    counts.data *= rarity[counts.indices] / (counts.data + held)
    for ids in queries.ids:
        scores = np.zeros(index.n_documents)
        np.maximum.at(scores, owner, counts @ np.bincount(ids, minlength=size))
        yield scores


def write_selection(
    out: Path, task: Workspace, selection: Selection, queries: QuerySet, options: SelectOptions
) -> None:
    """Write `chosen.jsonl`, `random.jsonl` and `bm25.jsonl` under `out`, all of them or none.

    Every line is a document of the corpus with its provenance under "selection", which readers ignore.
    """
    refuse_existing(out, overwrite=options.overwrite)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        lists: dict[str, tuple[str, list[Choice]]] = {
            "chosen": (options.method, selection.chosen),
            "bm25": ("bm25", selection.bm25),
            "random": ("random", [Choice(int(number), np.nan, 0.0, -1) for number in selection.random]),
        }
        for name in SETS:
            source, choices = lists[name]
            documents = stored_documents(
                task.index,
                task.model.tokenizer,
                [choice.document for choice in choices],
                task.model.spec.permissions,
            )
            with (partial / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for place, (choice, document) in enumerate(zip(choices, documents, strict=True), 1):
                    provenance = {
                        "place": place,
                        "method": source,
                        "rank": choice.rank,
                        "score": choice.score,
                        "query": queries.names[choice.query] if choice.query >= 0 else None,
                    }
                    file.write(to_json({**document, "selection": provenance}) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise UsageError where there is something at `out` already."""
    if out.exists() and not overwrite:
        raise UsageError(f"'{out}' exists already", fix="give another --out, or --overwrite")
    if out.exists() and not (out / "chosen.jsonl").is_file():
        raise UsageError(f"'{out}' is no selection, and is not replaced", fix="give another --out")
