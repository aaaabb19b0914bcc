"""Measure the scale from influences to nats on models trained again without tenths of the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from stride_cli.attribution.calibration import SCORED_TOKENS, cut_in_two
from stride_cli.attribution.decisive import CorpusWords, measured
from stride_cli.attribution.nats import TENTH, Nats, choose_scale
from stride_cli.attribution.several import in_passes
from stride_cli.data.queries import Query, build_queries, form_of
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
    from stride_cli.models.language.causal_lm import CausalLM

_ASKED_ABOUT = 32  # chunks of what each model does without, and of what all have
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
    removed = removed_parts(workspace, models)
    queries = QuerySet.from_queries(responses_of(CorpusWords.of(workspace), removed))
    # 2. Losses after training with everything, and without each part: from one seed, else nothing differs
    trainer, seeds = open_trainer(workspace, queries), subset_seeds(workspace.seed, models).tolist()
    pairs = zip(removed, seeds, strict=True)
    jobs = [Job(mask, seed) for part, seed in pairs for mask in (np.ones_like(part), ~part)]
    losses = np.stack([each.losses for each in retrain(trainer, jobs, store=store_of(workspace.index))])
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
    """Draw the chunks of a tenth that each model does without, (models, n) bool; UsageError: too few."""
    document = np.asarray(workspace.index.array("corpus/chunk_document"))
    documents = np.unique(document)
    size = max(1, round(TENTH * len(documents)))
    if len(documents) < _FEWEST_DOCUMENTS or models * size > len(documents) // 2:
        said = f"{models} tenths of {len(documents):,} documents (expected {_FEWEST_DOCUMENTS} or more, and "
        fix = "stride calibrate --retrain 3, on a larger corpus"
        raise UsageError(said + "five tenths at most)", fix=fix)
    order = stream(workspace.seed, "scale parts").permutation(documents)
    return np.stack([np.isin(document, order[k * size : (k + 1) * size]) for k in range(models)])


def responses_of(corpus: CorpusWords, removed: np.ndarray) -> list[Query]:
    """Ask as users do about chunks of each removed part, (models, n) bool, and about some of what is in none.

    Each is asked about twice: by a pair's prompt or a text's beginning, and the model responds; and by that
    or words from any place, and the corpus does. Tokens of a model from scratch are weighed as in answers.
    """
    workspace, model = corpus.workspace, cast("CausalLM", corpus.workspace.model)
    form, random, asked = form_of(workspace), stream(workspace.seed, "scale responses"), []
    for part in (*removed, ~removed.any(axis=0)):
        for row in random.permutation(np.flatnonzero(part))[:_ASKED_ABOUT].tolist():
            for second in (False, True):
                prompt, response = cut_in_two(workspace, row, form, random, within=second)
                given = {"response": response} if second else {}
                asked.append({"prompt": prompt} | given)
    written = build_queries(model, asked, max_new_tokens=SCORED_TOKENS, form=form)
    found = [each for each in written if isinstance(each, Query)]
    return [measured(model, corpus, each, weigh=True) for each in found] if model.pretrained else found
