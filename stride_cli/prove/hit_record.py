"""A query's top documents put to the test: from index and prompt to the record of `stride verify-hit`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import local_directory
from stride_cli.errors import QueryError, StrideError, UsageError
from stride_cli.output import note
from stride_cli.prove.resampling import LEVEL, Interval
from stride_cli.prove.verify_hit import find_documents, verify_documents
from stride_cli.training.retraining import open_trainer, store_of

if TYPE_CHECKING:
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.data.queries import Form, Query
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.prove.options import HitOptions, HitQuestion
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
    from stride_cli.data.queries import Query, form_of
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.prove.options import HitQuestion

    started = time.monotonic()
    local_directory(place.index)  # refused before a model is opened
    if asked.documents is None and options.top < 1:
        raise UsageError(f"--top is {options.top} (expected 1 or more)", fix="try --top 10")
    if not isinstance(asked.prompt, str | Query):
        if asked.response or asked.span:
            raise UsageError(
                "a response or a span is given beside prompts that have their own",
                fix='give each prompt its own: {"prompt", "response", "instead"}',
            )
        if len(asked.prompt) == 1:
            (only,) = asked.prompt
            texts = {name: only.get(name) for name in ("response", "span", "instead")}
            asked = HitQuestion(only["prompt"], documents=asked.documents, **texts)
    influences: list[float | None]
    if asked.documents is None:
        session = Session.open(
            place.index, model=model, model_path=place.model, device=place.device, dtype=place.dtype
        )
        index, loaded = session.index, session.model
        if isinstance(asked.prompt, str | Query):
            answer = session.query(
                asked.prompt, options, response=asked.response, span=asked.span, instead=asked.instead
            )
        else:
            answer = session.query_pooled(asked.prompt, options)
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
        query = _query_of(asked, loaded, options.max_new_tokens, form_of(opened, options.chat))
    workspace = Workspace.open(index, loaded)
    queries, shares = QuerySet.of_parts(query)
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
        shares=shares,
    )
    record: VerifyHitRecord = {
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
    if found.compared:
        record["compared"] = True
    if query.comparison is not None:
        record["instead"] = query.comparison.response
    if query.count > 1:
        record["pooled"] = query.count
    return record


def _query_of(asked: HitQuestion, model: AttributableModel, max_new_tokens: int, form: Form) -> Query:
    """What is asked, without an answer: one query, or several as one."""
    from stride_cli.data.queries import Query, pooled
    from stride_cli.data.query_files import as_queries

    if isinstance(asked.prompt, str | Query):
        texts = {"response": asked.response, "span": asked.span, "instead": asked.instead}
        prompts: list[Mapping[str, Any]] = [{"prompt": asked.prompt, **texts}]
    else:
        prompts = list(asked.prompt)
    queries = []
    for each in as_queries(model, prompts, max_new_tokens=max_new_tokens, form=form):
        if isinstance(each, StrideError):
            raise each
        queries.append(each)
    if not queries:
        raise QueryError("there is no prompt to ask", fix="give one or more")
    return queries[0] if len(queries) == 1 else pooled(queries)


def _record(found: Interval) -> SeedMean:
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}
