"""What influences are in nats: measured on models that are trained again without a part of the corpus.

    loss of x after training without S  −  loss of x after training with everything  ≈  a Σ_{i ∈ S} w_i

w are influences, whose size grows with the design; a makes them a forecast of what happens when documents
are taken out. It is found by least squares through the origin over random tenths S of the documents and
responses that are chunks of the corpus themselves, some of them in S: a response's own document is the one
whose absence shows most. Influences are against the average chunk, whose own influence by the same readout
has a twentieth of the effect that its size says (2,000 instructions): nothing is added for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.attribution.attributor import Attributor
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.schema.answer_records import ScaleRecord

_TENTH = 0.1  # of the documents, that a model does without
_INSIDE, _OUTSIDE = 16, 48  # responses among what one of the models does without, and among what all have
_FEWEST_DOCUMENTS = 40
_SURE = 3.0  # standard errors that the slope is above zero, for influences to be told in nats


@dataclass(frozen=True)
class Scale:
    """a, and how sure it is.

    Attributes
    ----------
    slope : float           nats per scored token, for a unit of influence
    error : float           its standard error, over responses; not over seeds of training
    correlation : float     of predicted and measured rises
    models : int            trained without a part
    pairs : int             rises, of a response each, that it was found by
    """

    slope: float
    error: float
    correlation: float
    models: int
    pairs: int

    @property
    def sure(self) -> bool:
        """Whether influences can be told in nats."""
        return self.slope > _SURE * self.error

    def to_record(self) -> ScaleRecord:
        return cast("ScaleRecord", asdict(self))


def fit_scale(predicted: np.ndarray, measured: np.ndarray) -> Scale:
    """Least squares through the origin; the error by leaving out one response at a time.

    Parameters
    ----------
    predicted, measured : (models, Q) float64      Σ_{i ∈ S} w_i, and rises of the loss
    """
    products, squares = (predicted * measured).sum(axis=0), np.square(predicted).sum(axis=0)
    if not squares.sum() > 0:
        return Scale(0.0, np.inf, 0.0, len(predicted), predicted.size)
    slope = float(products.sum() / squares.sum())
    rest = np.maximum(squares.sum() - squares, np.finfo(float).tiny)
    without = (products.sum() - products) / rest
    count = len(without)
    error = float(np.sqrt((count - 1) / count * np.square(without - without.mean()).sum()))
    spread = predicted.std() * measured.std()
    product = (predicted * measured).mean() - predicted.mean() * measured.mean()
    return Scale(slope, error, float(product / spread) if spread > 0 else 0.0, len(predicted), predicted.size)


def measure_scale(attributor: Attributor, models: int, *, workers: int | None = None) -> Scale:
    """Train ``models`` + 1 models by the recipe of the index's own, from one seed, and fit the scale.

    What is trained is kept beside the index: an interrupted measurement goes on.

    Parameters
    ----------
    attributor : as answers are found by default
    models : each without a tenth of the documents of its own
    workers : models trained at the same time

    Raises
    ------
    UsageError      there are fewer than 40 documents, or too few for so many models
    ModelError      the model has no recipe, or it is of another corpus
    and what `retrain` raises
    """
    from stride_cli.training.jobs import Job
    from stride_cli.training.retraining import open_trainer, retrain, store_of
    from stride_cli.training.truth import subset_seeds

    workspace = attributor.workspace
    store = store_of(workspace.index)
    removed = removed_parts(workspace, models)
    queries = own_responses(workspace, removed)
    trainer = open_trainer(workspace, queries)
    seed = int(subset_seeds(workspace.seed, 1)[0])
    masks = [np.ones(workspace.n_chunks, bool), *~removed]
    full, *others = retrain(trainer, [Job(mask, seed) for mask in masks], store=store, workers=workers)
    measured = np.stack([other.losses - full.losses for other in others])
    return fit_scale(predicted_sums(attributor, queries, removed), measured)


def predicted_sums(attributor: Attributor, queries: QuerySet, removed: np.ndarray) -> np.ndarray:
    """Σ of influences of what is removed, (sets, Q) float64, as answers have them by default.

    Parameters
    ----------
    removed : (sets, n) bool
    """
    from stride_cli.attribution.attributor import dense
    from stride_cli.data.batches import RememberingBatch
    from stride_cli.data.query_set import QUERY_TOKENS

    found = np.zeros((len(removed), len(queries)))
    for start in range(0, len(queries), attributor.together):
        rows = np.arange(start, min(start + attributor.together, len(queries)))
        groups = queries.groups(QUERY_TOKENS, rows)
        batches = [RememberingBatch.of(queries.batch(group)) for group in groups]
        measured = attributor.measure(batches)
        influences = dense(attributor.influences(queries.take(rows), batches, measured.responses))
        found[:, rows] = removed.astype(np.float64) @ influences.T
    return found


def removed_parts(workspace: Workspace, models: int) -> np.ndarray:
    """What each model does without: (models, n) bool, a tenth of the documents each, none of them twice.

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


def own_responses(workspace: Workspace, removed: np.ndarray) -> QuerySet:
    """Chunks of the corpus as queries: 16 of each removed part, 48 of what is in none."""
    from stride_cli.data.query_set import QuerySet

    random = stream(workspace.seed, "scale responses")
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    for part, count in (*((part, _INSIDE) for part in removed), (~removed.any(axis=0), _OUTSIDE)):
        drawn = (
            (int(row), *workspace.chunks.chunk(int(row))) for row in random.permutation(np.flatnonzero(part))
        )
        found.extend(islice((each for each in drawn if each[2].any()), count))
    rows, ids, weights = zip(*found, strict=True)
    return QuerySet(list(ids), list(weights), [str(row) for row in rows])
