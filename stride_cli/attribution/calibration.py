"""Calibration: what answers to null prompts look like, kept in the index's ``calibration/`` group; and what
influences are in nats, measured on models that are trained again (`nats`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.nats import choose_scale, scale_of
from stride_cli.attribution.nulls import null_queries
from stride_cli.attribution.verdict import LENGTHS, NullAnswers
from stride_cli.data.query_set import QUERY_TOKENS
from stride_cli.errors import UsageError
from stride_cli.output import note, progress
from stride_cli.randomness import stream
from stride_cli.recovery.problem import dense
from stride_cli.recovery.ranking import strongest_document
from stride_cli.schema.derivation import to_record

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.nats import Nats
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.data.queries import Query
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.recovery.problem import Solution

FORM = 2  # of influences: before, zero was the average chunk
_TENTH = 0.1  # of the documents, that a model does without
_INSIDE, _OUTSIDE = 16, 48  # responses among what one of the models does without, and among what all have
_PARTS = 64  # parts of chunks as responses, of what each model does without, and of what all have
_LENGTHS = (4, 8, 16)  # scored tokens of a part, as of answers
_PROMPT = 8  # tokens that a part has before it, where its chunk is long enough
_FEWEST_DOCUMENTS = 40


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


# ---- influences in nats ----


def measure_scale(pipeline: Pipeline | Several, models: int, *, workers: int | None = None) -> Nats:
    """Train ``models`` + 1 models by the recipe of the index's own, from one seed, and fit the scale.

    What is trained is kept beside the index: an interrupted measurement goes on.

    Parameters
    ----------
    pipeline : as answers are found by default
    models : each without a tenth of the documents of its own
    workers : models trained at the same time

    Raises
    ------
    UsageError      there are fewer than 40 documents, or too few for so many models
    ModelError      the model has no recipe, or it is of another corpus
    and what `retrain` raises
    """
    from stride_cli.training.jobs import Job
    from stride_cli.training.retraining import open_trainer, retrain, store_of, subset_seeds

    # 1. What each model does without, and the responses whose losses are compared
    workspace = pipeline.workspace
    store = store_of(workspace.index)
    removed = removed_parts(workspace, models)
    queries = responses_of(workspace, removed)
    # 2. Losses after training with everything, and without each part: from one seed, so that nothing else
    # differs
    trainer = open_trainer(workspace, queries)
    seed = int(subset_seeds(workspace.seed, 1)[0])
    masks = [np.ones(workspace.n_chunks, bool), *~removed]
    full, *others = retrain(trainer, [Job(mask, seed) for mask in masks], store=store, workers=workers)
    measured = np.stack([other.losses - full.losses for other in others])
    # 3. What influences say of the same parts, and the scale between the two
    sums, totals = predicted_sums(pipeline, queries, removed)
    return choose_scale(sums, totals, measured, heart=workspace.model.pretrained)


def predicted_sums(
    pipeline: Pipeline | Several, queries: QuerySet, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Σ of influences of what is removed, (sets, Q) float64, and of the sizes of all, (Q,), as answers have
    them by default.

    Parameters
    ----------
    removed : (sets, n) bool
    """
    from stride_cli.data.batches import RememberingBatch
    from stride_cli.data.query_set import QUERY_TOKENS

    found, totals = np.zeros((len(removed), len(queries))), np.zeros(len(queries))
    for start in range(0, len(queries), pipeline.together):
        rows = np.arange(start, min(start + pipeline.together, len(queries)))
        groups = queries.groups(pipeline.workspace.model, QUERY_TOKENS, rows)
        batches = [RememberingBatch.of(queries.batch(group)) for group in groups]
        measured = pipeline.measure(batches)
        influences = dense(pipeline.influences(queries.take(rows), batches, measured))
        found[:, rows] = removed.astype(np.float64) @ influences.T
        totals[rows] = np.abs(influences).sum(axis=1)
    return found, totals


def removed_parts(workspace: Workspace, models: int) -> np.ndarray:
    """Draw the chunks that each model does without: (models, n) bool, a tenth of the documents each.

    Raises
    ------
    UsageError
    """
    document = np.asarray(workspace.index.array("corpus/chunk_document"))
    documents = np.unique(document)
    size = max(1, round(_TENTH * len(documents)))
    if len(documents) < _FEWEST_DOCUMENTS or models * size > len(documents) // 2:
        raise UsageError(
            f"{models} tenths of {len(documents):,} documents (expected {_FEWEST_DOCUMENTS} or more, "
            "and five tenths at most)",
            fix="stride calibrate --retrain 3, on a larger corpus",
        )
    order = stream(workspace.seed, "scale parts").permutation(documents)
    return np.stack([np.isin(document, order[k * size : (k + 1) * size]) for k in range(models)])


def responses_of(workspace: Workspace, removed: np.ndarray, *, whole: bool = False) -> QuerySet:
    """Make the responses that a scale is fitted on: chunks of each removed part, and of what is in none.

    Parameters
    ----------
    removed : (models, n) bool
    whole : bool      whole chunks also where they may be memorised; else parts of chunks there
    """
    from stride_cli.data.query_set import QuerySet

    whole = whole or not workspace.model.pretrained
    inside, outside = (_INSIDE, _OUTSIDE) if whole else (_PARTS, _PARTS)
    random, lengths = stream(workspace.seed, "scale responses"), stream(workspace.seed, "scale lengths")
    # 1. Chunks with a scored token, so many of each part
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    for part, count in (*((part, inside) for part in removed), (~removed.any(axis=0), outside)):
        drawn = (
            (int(row), *workspace.chunks.chunk(int(row))) for row in random.permutation(np.flatnonzero(part))
        )
        found.extend(islice((each for each in drawn if each[2].any()), count))
    # 2. Of each the whole, or a few tokens at a random place
    made = [
        (str(row), *((ids, weights) if whole else _random_part(ids, weights, lengths)))
        for row, ids, weights in found
    ]
    names, ids, weights = zip(*made, strict=True)
    return QuerySet(list(ids), list(weights), list(names))


def _random_part(
    ids: np.ndarray, weights: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a chunk behind a few scored tokens, which alone stay scored."""
    length = int(random.choice(_LENGTHS))
    begins = np.flatnonzero(weights)
    begins = begins[: max(1, len(begins) - length + 1)]
    later = begins[begins >= _PROMPT]
    begin = int(random.choice(later if len(later) else begins))
    scored = np.zeros_like(weights)
    scored[begin : begin + length] = weights[begin : begin + length]
    return ids[: begin + length], scored[: begin + length]
