"""A query's top documents put to the test: from index and prompt to the record of `stride verify-hit`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from index_format.location import local_directory
from stride_cli.errors import UsageError
from stride_cli.evaluation.resampling import LEVEL, Interval
from stride_cli.evaluation.verify_hit import find_documents, verify_documents
from stride_cli.output import note
from stride_cli.training.retraining import open_trainer, store_of

if TYPE_CHECKING:
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.evaluation.options import HitOptions, HitQuestion
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.schema.verify_records import SeedMean, VerifyHitRecord


def verify_hit(
    place: WorkspacePath,
    asked: HitQuestion,
    options: QueryOptions,
    check: HitOptions,
    *,
    model: AttributableModel | None = None,
) -> VerifyHitRecord:
    """See `stride_cli.api.verify_hit`."""
    from index_format.reader import Index
    from stride_cli.attribution.session import Session
    from stride_cli.data.queries import form_of
    from stride_cli.data.query_files import as_query
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

    started = time.monotonic()
    local_directory(place.index)  # refused before a model is opened
    if asked.documents is None and options.top < 1:
        raise UsageError(f"--top is {options.top} (expected 1 or more)", fix="try --top 10")
    influences: list[float | None]
    if asked.documents is None:
        session = Session.open(
            place.index, model=model, model_path=place.model, device=place.device, dtype=place.dtype
        )
        index, loaded = session.index, session.model
        answer = session.query(asked.prompt, options, response=asked.response, span=asked.span)
        query, hits = answer.query, answer.supporters
        if not hits:
            raise UsageError(
                "no document supports this response (expected one or more, to be trained without)",
                fix="ask for documents by id: --documents a,b",
            )
        if len(hits) < options.top:
            which = "1 document supports" if len(hits) == 1 else f"{len(hits)} documents support"
            note(f"{which} this response, not {options.top}: the model is trained without {len(hits)}")
        chosen = np.array([hit.document for hit in hits], np.int64)
        influences = [hit.influence for hit in hits]
        backfilled = sum(hit.backfilled for hit in hits)
        if backfilled:
            note(f"{backfilled} of the {len(hits)} documents have no weight of their own in the solution")
    else:
        index = Index.open(place.index)
        chosen = find_documents(index, asked.documents)
        influences = [None] * len(chosen)
        opened = Workspace.open(index, model or place.model, device=place.device, dtype=place.dtype)
        loaded = opened.model
        query = as_query(
            loaded,
            asked.prompt,
            response=asked.response,
            span=asked.span,
            max_new_tokens=options.max_new_tokens,
            form=form_of(opened, options.chat),
        )
    workspace = Workspace.open(index, loaded)
    queries = QuerySet.from_queries([query])
    if check.seeds == 1:
        note("warning: with one seed there is no interval, and no verdict (expected --seeds 3 or more)")
    lengths = np.asarray(workspace.chunks.lengths)
    owners = np.asarray(index.array("corpus/chunk_document"))
    found = verify_documents(
        open_trainer(workspace, queries, recipe=check.recipe, command=check.command),
        chosen,
        check,
        chunk_document=owners,
        chunk_lengths=lengths,
        store=store_of(index),
        seed=index.seed,
    )
    return {
        "schema": "stride.verify_hit/1",
        "index": str(index.path),
        "prompt": query.prompt,
        "response": query.response,
        "template": None if loaded.table is not None else query.form,
        "generated": query.generated,
        "documents": [
            {
                "document": index.document_id(int(document)),
                "influence": influence,
                "tokens": int(lengths[owners == document].sum()),
            }
            for document, influence in zip(chosen, influences, strict=True)
        ],
        "verdict": found.verdict,
        "sentence": found.sentence(),
        "difference": _record(found.difference),
        "attributed": _record(found.attributed),
        "by_chance": _record(found.by_chance),
        "level": LEVEL,
        "effect": found.effect,
        "exceeded": found.exceeded,
        "seeds_needed": found.seeds_needed,
        "seeds": len(found.seeds),
        "random": found.random.shape[1],
        "trained": found.trained,
        "reused": found.reused,
        "runs": found.runs(),
        "seconds": time.monotonic() - started,
    }


def _record(found: Interval) -> SeedMean:
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}
