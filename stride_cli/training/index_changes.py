"""An index before it is built, and after: its plan, and documents added to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.errors import UsageError
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.output import progress

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.corpus.options import PlanOptions
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.schema.index_records import IndexPlanRecord


def plan_index(
    corpus: Sequence[str], model: GivenModel | None, options: PlanOptions, reading: ReadOptions
) -> IndexPlanRecord:
    """Plan the index of a corpus, which is read once, or of `options.chunks`.

    Raises
    ------
    UsageError      neither is given, or both
    """
    from stride_cli.corpus import plan
    from stride_cli.corpus.build import survey_corpus
    from stride_cli.corpus.gate_budget import FEWEST_SUBSETS
    from stride_cli.models.configuration import context_length, shape_of, subsets_bound
    from stride_cli.models.language.language_recipe import was_finetuned
    from stride_cli.models.language.tokenizer import load_tokenizer

    if corpus and options.chunks is not None:
        raise UsageError(
            "--chunks plans without a corpus, and a corpus was given too", fix="give one of the two"
        )
    if options.chunks is None and (not corpus or model is None):
        raise UsageError(
            "nothing to plan for: expected a corpus with --model, or --chunks",
            fix="stride index plan corpus.jsonl --model model, or stride index plan --chunks 100000",
        )
    counts = plan.CorpusCounts(documents=0, chunks=options.chunks or 0, tokens=0)
    if model is None:
        return plan.plan_index(counts, options, most_subsets=FEWEST_SUBSETS)
    tokenizer, finetuned = load_tokenizer(model), was_finetuned(place_of(model))
    if corpus:
        size = plan.choose_block_size(options.block_size, context_length(model))
        counts = survey_corpus(corpus, tokenizer=tokenizer, block_size=size, reading=reading)
    return plan.plan_index(
        counts,
        options,
        finetuned=finetuned,
        vocabulary=len(tokenizer),
        most_subsets=subsets_bound(model, finetuned=finetuned),
        shape=shape_of(model),
    )


def append_documents(path: Path, corpus: Sequence[str], model: ModelSpec, reading: ReadOptions) -> Index:
    """Add a corpus to the index at `path`, tokenized as by its model; what is in it stays as it is."""
    from index_format.reader import Index

    with progress("opening the index and its tokenizer"):
        from stride_cli.corpus.build import append_to_index
        from stride_cli.models.configuration import vocabulary_size
        from stride_cli.models.language.fingerprints import tokenizer_fingerprint
        from stride_cli.models.language.tokenizer import load_tokenizer
        from stride_cli.models.loading import path_of_model

        spec = model if model.place else model.at(path_of_model(Index.open(path), model.permissions))
        tokenizer = load_tokenizer(spec)
    return append_to_index(
        path,
        corpus,
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocabulary=vocabulary_size(spec),
        reading=reading,
    )


_MOST_COMPARED = 100_000  # documents; of larger corpora it is not looked up which were trained on


def untrained_documents(index: Index, model: str | Path | None) -> frozenset[int] | None:
    """Find the documents of an index that its model was not trained on, by the record of its training.

    Returns
    -------
    Their numbers; empty: which they are is not known; None: there are none, or nothing is recorded
    """
    from stride_cli.corpus.readers import Fields, ReadOptions, read_documents
    from stride_cli.errors import CorpusError
    from stride_cli.models.language.language_recipe import read_recipe

    recipe = None if model is None else read_recipe(model)
    config = index.attributes.get("config") or {}
    trained = None if recipe is None else recipe.corpus.get("fingerprint")
    if trained in (None, index.attributes["fingerprints"]["corpus"]) or config.get("merged_exactly") is False:
        return None
    assert recipe is not None and model is not None
    sources = [str(Path(model) / each if (Path(model) / each).exists() else each)
               for each in recipe.corpus.get("sources", [])]  # fmt: skip
    known = config.get("reading") or {}
    fields = Fields(**known.get("fields", {}))
    reading = ReadOptions(**{**known, "fields": fields, "on_bad": "skip", "number_ids": True})
    try:
        if index.n_documents > _MOST_COMPARED or not index.has("corpus/text_bytes"):
            return frozenset()
        count = recipe.corpus.get("documents")  # what was added to the file since is none of them
        texts = {each.plain_text for each in islice(read_documents(sources, reading), count)}
    except CorpusError:
        return frozenset()
    lacking = (n for n in range(index.n_documents) if index.document_text(n) not in texts)
    return frozenset(lacking) or None
