"""Put a query's top documents to the test: from index and prompt to the record of `stride verify-hit`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.location import local_directory
from stride_cli.errors import QueryError, StrideError, UsageError
from stride_cli.output import note
from stride_cli.prove.verify_hit import find_documents, verify_documents
from stride_cli.schema.derivation import to_record
from stride_cli.training.retraining import open_trainer, store_of

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.prove.options import HitOptions, HitQuestion
    from stride_cli.schema.verify_records import VerifyHitRecord
    from stride_cli.training.command_trainer import Retrain

# keys of the record as a check has them
_TOLD = """verdict difference attributed by_chance level look effect exceeded seeds_needed trained reused"""


def verify_hit(
    place: WorkspacePath,
    asked: HitQuestion,
    options: QueryOptions,
    check: HitOptions,
    *,
    model: AttributableModel | None = None,
    retrain: Retrain | None = None,
) -> VerifyHitRecord:
    """Retrain without a query's documents; see `stride_cli.api.verify_hit`."""
    from stride_cli.attribution.session import Session
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

    started = time.monotonic()
    if retrain is not None:
        if check.command or check.engine != "local" or (check.workers or 1) > 1:
            said = "retrain= trains in this process, and a command, engine or workers are given too"
            raise UsageError(said, fix="leave them out of HitOptions")
        check = replace(check, workers=1)
    local_directory(place.index)  # refused before a model is opened
    prompts = _prompts(asked)
    influences: list[float | None]
    if asked.documents is None:
        if options.top < 1:
            raise UsageError(f"--top is {options.top} (expected 1 or more)", fix="try --top 10")
        session = Session.open(place.index, model=model or place.model)
        answer = (
            next(session.query_all(prompts, options, together=1))
            if len(prompts) == 1
            else session.query_pooled(prompts, options)
        )
        query, workspace = answer.query, session.workspace
        chosen, influences = _top_documents(answer, options.top)
        unit = answer.unit
    else:
        workspace = Workspace.open(place.index, model or place.model)
        query = _query_of(prompts, workspace, options)
        chosen = find_documents(workspace.index, asked.documents)
        influences, unit = [None] * len(chosen), "relative"
    if check.seeds == 1:
        note("warning: with one seed there is no interval, and no verdict (expected --seeds 3 or more)")
    index, table = workspace.index, workspace.model.table
    queries, shares = QuerySet.of_parts(query)
    lengths = np.asarray(workspace.chunks.lengths)
    owners = np.asarray(index.array("corpus/chunk_document"))
    found = verify_documents(
        open_trainer(workspace, queries, recipe=check.recipe, command=retrain or check.command),
        chosen,
        check,
        chunk_document=owners,
        chunk_lengths=lengths,
        store=store_of(index),
        seed=index.seed,
        shares=shares,
    )
    record: Any = {
        "schema": "stride.verify_hit/1",
        "index": str(index.path),
        "prompt": query.prompt,
        "response": query.response,
        "template": None if table is not None else query.form.label,
        "generated": query.generated,
        "documents": [
            {
                "document": index.document_id(int(document)),
                "influence": influence,
                "tokens": int(lengths[owners == document].sum()),
            }
            for document, influence in zip(chosen, influences, strict=True)
        ],
        "unit": unit,
        **{name: to_record(getattr(found, name)) for name in _TOLD.split()},
        "sentence": found.sentence(),
        "seeds": len(found.seeds),
        "random": found.random.shape[1],
        "runs": found.runs(),
        "seconds": time.monotonic() - started,
    }
    if found.compared:
        record["compared"] = True
    if query.comparison is not None:
        record["instead"] = query.comparison.response
    if query.count > 1:
        record["pooled"] = query.count
    checked: VerifyHitRecord = record
    return checked


def _prompts(asked: HitQuestion) -> list[Mapping[str, Any]]:
    """List the prompts that are tested as one, each with what belongs to it."""
    prompt: Any = asked.prompt
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        texts = {"response": asked.response, "span": asked.span, "instead": asked.instead}
        return [{"prompt": prompt, **texts}]
    if asked.response or asked.span:
        said = "a response or a span is given beside prompts that have their own"
        raise UsageError(said, fix='give each prompt its own: {"prompt", "response", "instead"}')
    return list(prompt)


def _top_documents(answer: Answer, top: int) -> tuple[np.ndarray, list[float | None]]:
    """Take the documents of an answer, (m,) int64, and their influences."""
    hits = answer.supporters
    if not hits:
        said = "no document supports this response (expected one or more, to be trained without)"
        raise UsageError(said, fix="ask for documents by id: --documents a,b")
    if len(hits) < top:
        which = "1 document supports" if len(hits) == 1 else f"{len(hits)} documents support"
        note(f"{which} this response, not {top}: the model is trained without {len(hits)}")
    if backfilled := sum(hit.backfilled for hit in hits):
        note(f"{backfilled} of the {len(hits)} documents have no weight of their own in the solution")
    return np.array([hit.document for hit in hits], np.int64), [answer.in_unit(hit.influence) for hit in hits]


def _query_of(prompts: list[Mapping[str, Any]], workspace: Workspace, options: QueryOptions) -> Query:
    """Build the query of given documents, which needs no answer: one, or several as one."""
    from stride_cli.data.queries import form_of, pooled
    from stride_cli.data.query_files import as_queries

    form = form_of(workspace, options.chat)
    queries = []
    for each in as_queries(workspace.model, prompts, max_new_tokens=options.max_new_tokens, form=form):
        if isinstance(each, StrideError):
            raise each
        queries.append(each)
    if not queries:
        raise QueryError("there is no prompt to ask", fix="give one or more")
    return queries[0] if len(queries) == 1 else pooled(queries)
