"""Measure the scale from influences to nats on models trained again without tenths of the documents."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.nats import Nats, choose_scale
from stride_cli.data.query_set import QUERY_TOKENS, QuerySet
from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.recovery.problem import dense

if TYPE_CHECKING:
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.data.workspace import Workspace

_TENTH = 0.1  # of the documents, that a model does without
_INSIDE, _OUTSIDE = 16, 48  # responses among what one of the models does without, and among what all have
_PARTS = 64  # parts of chunks as responses, of what each model does without, and of what all have
_LENGTHS = (4, 8, 16)  # scored tokens of a part, as of answers
_PROMPT = 8  # tokens that a part has before it, where its chunk is long enough
_FEWEST_DOCUMENTS = 40


def measure_scale(pipeline: Pipeline | Several, models: int, *, workers: int | None = None) -> Nats:
    """Train ``models`` + 1 models by the recipe of the index's own, from one seed, and fit the scale.

    What is trained is kept beside the index: an interrupted measurement goes on.

    Parameters
    ----------
    pipeline : as answers are found by default
    models : each without a tenth of the documents of its own
    workers : models trained at once

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
    # 2. Losses after training with everything, and without each part: from one seed, else nothing differs
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
