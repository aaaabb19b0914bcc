"""Calibration: what answers to null prompts look like, kept in the index's ``calibration/`` group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.nats import scale_of
from stride_cli.attribution.nulls import null_queries
from stride_cli.attribution.verdict import LENGTHS, NullAnswers
from stride_cli.data.query_set import QUERY_TOKENS
from stride_cli.errors import UsageError
from stride_cli.output import note, progress
from stride_cli.recovery.ranking import strongest_document
from stride_cli.schema.derivation import to_record

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.nats import Nats
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.data.queries import Query
    from stride_cli.recovery.problem import Solution

FORM = 2  # of influences: before, zero was the average chunk


def calibrate(pipeline: Pipeline | Several, nulls: int, scale: Nats | None = None) -> NullAnswers:
    """Ask null prompts, and publish the index's ``calibration/`` group.

    Parameters
    ----------
    pipeline : as by default, of a language model; the calibration is of its operators and chunks
    nulls : how many prompts
    scale : what influences are in nats, where that was measured

    Raises
    ------
    UsageError          the index is of a classifier
    IndexReadOnly       it is a URL or a zip file
    NumericalError      see `Pipeline`
    """
    from index_format.writer import GroupWriter

    workspace = pipeline.workspace
    index = workspace.index
    if workspace.model.table is not None:
        raise UsageError(
            f"index '{index.path}' is of a classifier, of which there are no null prompts",
            fix="compare rows of known cause instead (stride evaluate --help)",
        )
    queries = null_queries(workspace, nulls)
    answers = replace(ask(pipeline, queries), scale=scale)
    about = _about(index) | {"nulls": [{"prompt": q.prompt, "response": q.response} for q in queries]}
    about["scale"] = to_record(scale)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    # all that is in it is made at once: an unfinished write is not worth keeping
    with GroupWriter(index.directory, "calibration", key, overwrite=True) as writer:
        writer.append("calibration/null_scored", answers.scored)
        writer.append("calibration/null_losses", answers.losses)
        writer.append("calibration/null_strengths", answers.strengths)
        if answers.read is not None:
            writer.append("calibration/null_read", answers.read)
        writer.publish(about)
    return answers


def stored_calibration(index: Index) -> NullAnswers | None:
    """The calibration of an index; None where there is none, or it is of other operators or chunks."""
    if not index.has("calibration"):
        return None
    attributes = index.group_attributes("calibration")
    if any(attributes.get(name) != value for name, value in _about(index).items()):
        return None
    names = ["scored", "losses", "strengths", *(["read"] if index.has("calibration/null_read") else [])]
    with index.understanding("calibration"):
        scale = attributes.get("scale")
        arrays = {name: np.asarray(index.array(f"calibration/null_{name}")) for name in names}
        for values in list(arrays.values())[1:]:
            if values.ndim != 2 or len(values) != len(arrays["scored"]):
                raise ValueError(f"should be a row for each of {arrays['scored'].shape}, are {values.shape}")
        return NullAnswers(**arrays, scale=None if scale is None else scale_of(scale))


def readable_calibration(index: Index) -> NullAnswers | None:
    """`stored_calibration`; None too where it is damaged, which is told: it is about to be replaced."""
    from index_format.errors import IndexDamaged

    try:
        return stored_calibration(index)
    except IndexDamaged as error:
        note(f"{error.message}: it is made anew, without what it said of nats (--retrain measures that)")
        return None


def ask(pipeline: Pipeline | Several, queries: list[Query]) -> NullAnswers:
    """Measure losses and strengths of queries at every length that their responses are cut to.

    Where chunks are read for them, strengths are measured without that too.
    """
    from stride_cli.data.batches import RememberingBatch
    from stride_cli.data.query_set import QuerySet

    model, index = pipeline.workspace.model, pipeline.workspace.index
    chunk_document = index.array("corpus/chunk_document")
    shape = (len(LENGTHS), len(queries))
    losses, strengths, read = (np.full(shape, np.nan) for _ in range(3))
    cut = [
        (row, column, _first_tokens(query, length))
        for row, length in enumerate(LENGTHS)
        for column, query in enumerate(queries)
        if query.weights.sum() >= length
    ]
    asked = QuerySet.from_queries([query for _, _, query in cut])
    together, looks = pipeline.together, pipeline.settings.looks_at_chunks

    def relative(solutions: Sequence[Solution], losses: np.ndarray) -> np.ndarray:
        found: np.ndarray = [strongest_document(each, chunk_document) for each in solutions] / losses
        return found

    with progress("measuring unrelated prompts", len(cut), unit="responses") as bar:
        for start in range(0, len(cut), together):
            some = cut[start : start + together]
            places = tuple(np.array([place[:2] for place in some]).T)
            rows = asked.groups(model, QUERY_TOKENS, np.arange(start, start + len(some)))
            batches = [RememberingBatch.of(asked.batch(group)) for group in rows]
            part = asked.take(np.concatenate(rows))
            measured = pipeline.measure(batches)
            found = pipeline.influences(part, batches, measured)
            losses[places] = measured.losses
            strengths[places] = relative(pipeline.subsets_alone(measured), measured.losses)
            if looks:
                read[places] = relative(found, measured.losses)
            bar.advance(len(some))
    scored = np.asarray(LENGTHS, np.int64)
    return NullAnswers(scored, losses, strengths, read if looks else None)


def _first_tokens(query: Query, count: int) -> Query:
    """The query with no more than its first `count` scored tokens."""
    weights = np.zeros_like(query.weights)
    weights[np.flatnonzero(query.weights)[:count]] = 1.0
    return replace(query, weights=weights)


def _about(index: Index) -> dict[str, Any]:
    """Name the operators, chunks and kind of influences that a calibration holds for."""
    return {"operators": index.group_digest("operators"), "index": index.digest, "influences": FORM}
