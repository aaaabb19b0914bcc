"""What a text does to the model: its loss, and where in the corpus the influence on it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import NumericalError

if TYPE_CHECKING:
    from stride_cli.audit.samples import Sample
    from stride_cli.recovery.lasso import Solution
    from stride_cli.session import Session

_BLOCK = 16  # texts recovered at once: the columns are read once for all of them
_TOKENS = 4096  # padded tokens of one batch through the model


@dataclass(frozen=True)
class Candidates:
    """Chunks that resemble a sample.

    Attributes
    ----------
    chunks : (c,) int64          each once
    likeness : (c,) float64      0 … 1: about 1 for a copy
    """

    chunks: np.ndarray
    likeness: np.ndarray


@dataclass(frozen=True)
class Effect:
    """The model's side of the evidence for one text.

    Attributes
    ----------
    loss : float                    mean nats per scored token
    candidate_influence : float     summed over the candidate chunks, nats per scored token; > 0 supports
    candidate_share : float         the same / Σ|influence of every chunk|, at least 0: 0 where the candidates
                                    have none, or oppose
    copied_share : float            the same, each candidate counted by how like the sample it is
    strongest_chunk : int           of highest influence; -1 where no chunk supports
    strongest_influence, strongest_share : float
    strongest_is_candidate : bool
    """

    loss: float
    candidate_influence: float
    candidate_share: float
    copied_share: float
    strongest_chunk: int
    strongest_influence: float
    strongest_share: float
    strongest_is_candidate: bool


def measure_effects(
    session: Session,
    samples: Sequence[Sample],
    candidates: Sequence[Candidates],
    *,
    lambda_ratio: float | None = None,
) -> Iterator[Effect]:
    """Loss, measurement of all K subsets and sparse recovery of each sample, as `Session.query` has them.

    A text of several chunks counts as one query: its responses are those of its chunks, weighted by scored
    tokens.

    Parameters
    ----------
    candidates : for each sample, the chunks that resemble it
    lambda_ratio : λ / λ_max; default: what the operators' fit asks for

    Yields
    ------
    Effect, one a sample, in order
    """
    from stride_cli.measurement.additive import additive_measurement
    from stride_cli.recovery.several import solve_models

    intercept = session.defaults["intercept"]
    ratio = session.defaults["lambda_ratio"] if lambda_ratio is None else lambda_ratio
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK]
        responses, losses = _measure(session, block)
        y = additive_measurement(responses, session.designs.row_sizes) if intercept else responses
        solutions = solve_models(
            session.designs.each,
            y,
            n_subsets=session.operators.n_subsets,
            lambda_ratio=ratio,
            intercept=intercept,
        )
        for row, solution in enumerate(solutions):
            yield _effect(float(losses[row]), solution, candidates[start + row])


def _measure(session: Session, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Responses (q, C K) of C models and losses (q,) float64 of the samples."""
    from stride_cli.measurement.checkpoints import stack_checkpoints
    from stride_cli.measurement.exact import measure_exact
    from stride_cli.measurement.linear import measure_linear_with_loss
    from stride_cli.operators.batches import pad_batch

    rows = [(number, ids, weights) for number, s in enumerate(samples) for ids, weights in _rows(s)]
    responses = np.zeros((len(session.pairs), len(samples), session.operators.n_subsets))
    losses = np.zeros(len(samples))
    for group in _of_bounded_tokens([len(ids) for _, ids, _ in rows]):
        batch = pad_batch(group, [rows[i][1] for i in group], [rows[i][2] for i in group])
        for place, (model, operators) in enumerate(session.pairs):
            found, loss = measure_linear_with_loss(model, operators, batch)
            if session.defaults["measure"] == "exact":
                found = measure_exact(model, operators, batch)
            for position, i in enumerate(group):
                share = rows[i][2].sum() / samples[rows[i][0]].scored
                responses[place, rows[i][0]] += share * found[position]
                if place == 0:  # of the index's own model
                    losses[rows[i][0]] += share * loss[position]
    sizes = session.designs.row_sizes if session.defaults["intercept"] else None
    combined = stack_checkpoints(list(responses), sizes)
    if not (np.isfinite(combined).all() and np.isfinite(losses).all()):
        raise NumericalError(
            "a measured response or loss is not finite",
            fix="run with --dtype fp32, or fit the operators anew",
        )
    return combined, losses


def _effect(loss: float, solution: Solution, candidates: Candidates) -> Effect:
    values = solution.values
    _, ours, theirs = np.intersect1d(solution.indices, candidates.chunks, return_indices=True)
    inside = float(values[ours].sum())
    total = float(np.abs(values).sum())
    if not total or values.max() <= 0:
        return Effect(loss, inside, 0.0, 0.0, -1, 0.0, 0.0, False)
    best = int(values.argmax())
    chunk = int(solution.indices[best])
    return Effect(
        loss=loss,
        candidate_influence=inside,
        candidate_share=max(0.0, inside / total),
        copied_share=max(0.0, float(values[ours] @ candidates.likeness[theirs]) / total),
        strongest_chunk=chunk,
        strongest_influence=float(values[best]),
        strongest_share=float(values[best] / total),
        strongest_is_candidate=bool(np.isin(chunk, candidates.chunks)),
    )


def measure_losses(session: Session, samples: Sequence[Sample]) -> Iterator[float]:
    """The model's loss on each sample, mean nats per scored token, by forward passes alone."""
    import torch

    from stride_cli.evaluation.tail_patch import row_losses
    from stride_cli.operators.batches import pad_batch

    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK]
        rows = [(number, ids, weights) for number, s in enumerate(block) for ids, weights in _rows(s)]
        sums = np.zeros(len(block))
        for group in _of_bounded_tokens([len(ids) for _, ids, _ in rows]):
            batch = pad_batch(group, [rows[i][1] for i in group], [rows[i][2] for i in group])
            with torch.no_grad():
                found = row_losses(session.model, batch).cpu().numpy()
            for position, i in enumerate(group):
                sums[rows[i][0]] += found[position]
        yield from (float(total / sample.scored) for total, sample in zip(sums, block, strict=True))


def _rows(sample: Sample) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from zip(sample.ids, sample.weights, strict=True)


def _of_bounded_tokens(lengths: Sequence[int]) -> list[np.ndarray]:
    """Row numbers in groups of like lengths, at most `_TOKENS` padded tokens each."""
    from stride_cli.operators.batches import consecutive_groups

    counted = np.asarray(lengths)
    order = np.argsort(-counted, kind="stable")
    return [order[group] for group in consecutive_groups(counted[order], _TOKENS)]
