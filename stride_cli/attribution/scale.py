"""Measure the scale from influences to nats on models trained again without tenths of the documents."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stride_cli.attribution.nats import Nats, choose_scale
from stride_cli.attribution.several import in_passes
from stride_cli.data.query_set import QuerySet
from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.recovery.problem import dense
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of, subset_seeds

if TYPE_CHECKING:
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.data.workspace import Workspace

_TENTH = 0.1  # of the documents, that a model does without
_INSIDE, _OUTSIDE = 32, 48  # responses among what one of the models does without, and among what all have
_PARTS = 64  # parts of chunks as responses, of what each model does without, and of what all have
_LENGTHS = (4, 8, 16)  # scored tokens of a part, as of answers
_PROMPT = 8  # tokens that a part has before it, where its chunk is long enough
_FEWEST_DOCUMENTS = 40


def measure_scale(pipeline: Pipeline | Several, models: int) -> Nats:
    """Train 2 ``models`` models by the recipe of the index's own, and fit the scale; interrupted, it goes on.

    Parameters
    ----------
    pipeline : as answers are found by default
    models : without a tenth of the documents, from a seed of its own each, beside one with all

    Raises
    ------
    UsageError      there are fewer than 40 documents, or too few for so many models
    ModelError      the model has no recipe, or it is of another corpus
    and what `retrain` raises
    """
    # 1. What each model does without, and the responses whose losses are compared
    workspace = pipeline.workspace
    store = store_of(workspace.index)
    removed = removed_parts(workspace, models)
    queries = responses_of(workspace, removed)
    # 2. Losses after training with everything, and without each part: from one seed, else nothing differs
    trainer, seeds = open_trainer(workspace, queries), subset_seeds(workspace.seed, models).tolist()
    pairs = zip(removed, seeds, strict=True)
    jobs = [Job(mask, seed) for part, seed in pairs for mask in (np.ones_like(part), ~part)]
    losses = np.stack([each.losses for each in retrain(trainer, jobs, store=store)])
    measured = losses[1::2] - losses[::2]
    # 3. What influences say of the same parts, and the scale between the two
    sums, totals = predicted_sums(pipeline, queries, removed)
    return choose_scale(sums, totals, measured, heart=workspace.model.pretrained)


def predicted_sums(
    pipeline: Pipeline | Several, queries: QuerySet, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add up influences of what is removed, (sets, n) bool: (sets, Q) float64, and the sizes of all, (Q,), as
    answers have them by default."""
    found, totals = np.zeros((len(removed), len(queries))), np.zeros(len(queries))
    for rows, solutions in in_passes(pipeline, queries):
        influences = dense(solutions)
        found[:, rows] = removed.astype(np.float64) @ influences.T
        totals[rows] = np.abs(influences).sum(axis=1)
    return found, totals


def removed_parts(workspace: Workspace, models: int) -> np.ndarray:
    """Draw the chunks that each model does without, a tenth of the documents: (models, n) bool; UsageError
    where there are too few."""
    document = np.asarray(workspace.index.array("corpus/chunk_document"))
    documents = np.unique(document)
    size = max(1, round(_TENTH * len(documents)))
    if len(documents) < _FEWEST_DOCUMENTS or models * size > len(documents) // 2:
        said = f"{models} tenths of {len(documents):,} documents (expected {_FEWEST_DOCUMENTS} or more, and "
        fix = "stride calibrate --retrain 3, on a larger corpus"
        raise UsageError(said + "five tenths at most)", fix=fix)
    order = stream(workspace.seed, "scale parts").permutation(documents)
    return np.stack([np.isin(document, order[k * size : (k + 1) * size]) for k in range(models)])


def responses_of(workspace: Workspace, removed: np.ndarray) -> QuerySet:
    """Make the responses that a scale is fitted on, of each removed part, (models, n) bool, and of what is in
    none: chunks, of a model that may have memorised them a few tokens; every second one goes on as the model
    does, for so do answers."""
    whole = not workspace.model.pretrained
    inside, outside = (_INSIDE, _OUTSIDE) if whole else (_PARTS, _PARTS)
    random, lengths = stream(workspace.seed, "scale responses"), stream(workspace.seed, "scale lengths")
    # 1. Chunks with a scored token, so many of each part; of each the whole, or a few tokens
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    for part, count in (*((part, inside) for part in removed), (~removed.any(axis=0), outside)):
        rows = random.permutation(np.flatnonzero(part)).tolist()
        drawn = ((row, *workspace.chunks.chunk(row)) for row in rows)
        found.extend(islice((each for each in drawn if each[2].any()), count))
    made = [each[1:] if whole else _random_part(*each[1:], lengths) for each in found]
    # 2. What the model says in their place, up to as many tokens as an answer has
    own = [(number, int(np.flatnonzero(made[number][1])[0])) for number in range(0, len(made), 2)]
    prompts = [made[number][0][:begin].tolist() for number, begin in own]
    written = cast("Any", workspace.model).generate_each(prompts, max(_LENGTHS))
    for (number, begin), prompt, said in zip(own, prompts, written, strict=True):
        if isinstance(said, list) and said:
            ids = np.array([*prompt, *said[: len(made[number][0]) - begin]], made[number][0].dtype)
            made[number] = ids, (np.arange(len(ids)) >= begin).astype(made[number][1].dtype)
    ids, weights = zip(*made, strict=True)
    return QuerySet(list(ids), list(weights), [str(row) for row, *_ in found])


def _random_part(ids: np.ndarray, weights: np.ndarray, random: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cut a chunk behind a few scored tokens, which alone stay scored."""
    length = int(random.choice(_LENGTHS))
    begins = np.flatnonzero(weights)
    begins = begins[: max(1, len(begins) - length + 1)]
    later = begins[begins >= _PROMPT]
    begin = int(random.choice(later if len(later) else begins))
    scored = np.zeros_like(weights)
    scored[begin : begin + length] = weights[begin : begin + length]
    return ids[: begin + length], scored[: begin + length]
