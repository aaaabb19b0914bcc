"""Measure what a text does to the model: its loss, and where in the corpus the influence on it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stride_cli.attribution.options import SharingOptions
    from stride_cli.attribution.pipeline import Measurement, Pipeline
    from stride_cli.attribution.session import Session
    from stride_cli.attribution.several import Several
    from stride_cli.audit.samples import Sample
    from stride_cli.data.batches import Batch
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.recovery.lasso import Solution

_BLOCK = 16  # texts recovered at once: the columns are read once for all of them
_TOKENS = 4096  # padded tokens of one batch through the model


@dataclass(frozen=True)
class Effect:
    """Influences on one text: of its candidate chunks, summed (> 0 supports), and of the strongest chunk.

    Shares are of Σ|influence of every chunk|, at least 0. -1: none supports more than the average chunk does.
    """

    candidate_influence: float
    candidate_share: float
    strongest_chunk: int
    strongest_share: float


Shared = tuple["WorkspacePath", "SharingOptions"]  # where workers open the index, and who they are
_Block = tuple[Sequence["Sample"], Sequence[np.ndarray]]


def measure_effects(
    session: Session,
    samples: Sequence[Sample],
    candidates: Sequence[np.ndarray],
    *,
    lambda_ratio: float | None = None,
    shared: Shared | None = None,
) -> Iterator[Effect]:
    """Measure influences on each sample, as `Session.query` has them by the subsets alone (it reads none).

    A text of several chunks is one query: their responses are weighted by scored tokens.

    Args:
        candidates: for each sample, the chunks that resemble it
        lambda_ratio: λ / λ_max; default: what the operators' fit asks for
        shared: who measures, in the same blocks, and where they open the index; None: this process

    Yields:
        Effect, one a sample, in order
    """
    from stride_cli.attribution.sharing import SessionWork, shared_out

    task = partial(_block_effects, lambda_ratio=lambda_ratio)
    starts = range(0, len(samples), _BLOCK)
    blocks = ((samples[start : start + _BLOCK], candidates[start : start + _BLOCK]) for start in starts)
    found: Iterator[list[Effect]] = (task(session, block) for block in blocks)
    if shared is not None:
        place, sharing = shared
        found = shared_out(SessionWork(place, task), blocks, sharing)
    for effects in found:
        yield from effects


def _block_effects(session: Session, block: _Block, *, lambda_ratio: float | None) -> list[Effect]:
    """Measure samples that are recovered together."""
    from stride_cli.attribution.options import RecoveryOptions

    samples, candidates = block
    pipeline = session.pipeline(RecoveryOptions(lambda_ratio=lambda_ratio, read=0, estimate="subsets"))
    found = pipeline.influences(None, [], _measure(pipeline, samples))
    return [_effect(each, own) for each, own in zip(found, candidates, strict=True)]


def _measure(pipeline: Pipeline | Several, samples: Sequence[Sample]) -> Measurement:
    """Measure how the subsets answer the samples, each as one query."""
    batches, owner = _batches(samples, pipeline.workspace.model)
    scored = np.concatenate([batch.scored.numpy() for batch in batches])
    share = scored / np.array([samples[number].scored for number in owner], np.float32)

    def of_samples(found: np.ndarray) -> np.ndarray:
        """Add up what is measured of the parts, by their scored tokens."""
        total = np.zeros((len(samples), *found.shape[1:]))
        np.add.at(total, owner, share.reshape(-1, *[1] * (found.ndim - 1)) * found)
        return total

    return pipeline.measure(batches, gather=of_samples)


def _effect(solution: Solution, candidates: np.ndarray) -> Effect:
    values, average, total = solution.values, solution.average, solution.total
    listed = np.isin(solution.indices, candidates)
    inside = float(values[listed].sum() + average * (len(candidates) - listed.sum()))
    share = max(0.0, inside / total) if total else 0.0
    if values.max(initial=0.0) <= max(average, 0.0):
        return Effect(inside, share, -1, 0.0)
    best = int(values.argmax())
    return Effect(inside, share, int(solution.indices[best]), float(values[best] / total))


def model_before(session: Session) -> AttributableModel | None:
    """Load the model that the audited one was fine-tuned from.

    None where its recipe (or adapter) names none that is there, or one that reads other tokens.
    """
    from stride_cli.models.language.fingerprints import cuts_alike
    from stride_cli.models.loading import Opener
    from stride_cli.operators.initial_residuals import recorded_base

    path = recorded_base(session.model, tell=lambda text: None)
    if path is None:
        return None
    before = Opener.like(session.model).load(path)
    theirs, own = before.tokenizer.get_vocab(), session.model.tokenizer.get_vocab()
    alike = cuts_alike(before.tokenizer, session.model.tokenizer) and theirs.items() <= own.items()
    return before if alike else None


def measure_losses(model: AttributableModel, samples: Sequence[Sample], doing: str = "losses") -> np.ndarray:
    """Measure a model's loss on each sample by forward passes: mean nats per scored token, (N,) float64."""
    import torch

    from stride_cli.data.batches import row_losses
    from stride_cli.output import progress

    found = np.zeros(len(samples))
    with progress(doing, len(samples), unit="texts") as bar, torch.no_grad():
        for start in range(0, len(samples), _BLOCK):
            block = samples[start : start + _BLOCK]
            batches, owner = _batches(block, model)
            losses = np.concatenate([row_losses(model, batch).cpu().numpy() for batch in batches])
            np.add.at(found, start + owner, losses)
            found[start : start + _BLOCK] /= [sample.scored for sample in block]
            bar.advance(len(block))
    return found


def _batches(samples: Sequence[Sample], model: AttributableModel) -> tuple[list[Batch], np.ndarray]:
    """Put the rows of samples into batches of like lengths, at most `_TOKENS` padded tokens each.

    Returns the batches, and the sample of every row in their order: (r,) int64.
    """
    from stride_cli.data.batches import consecutive_groups, pad_batch

    ids = [row for sample in samples for row in sample.ids]
    weights = [row for sample in samples for row in sample.weights]
    owner = np.repeat(np.arange(len(samples)), [len(sample.ids) for sample in samples])
    lengths = np.array([len(row) for row in ids])
    order = np.argsort(-lengths, kind="stable")
    groups = [order[group] for group in consecutive_groups(lengths[order], _TOKENS, model.length_kinds)]
    batches = [pad_batch(group, [ids[i] for i in group], [weights[i] for i in group]) for group in groups]
    return batches, owner[order]
