"""Direct readout: the influence of single chunks in gate space, from their own gradients.

What `measure_linear` says of a subset is the mean of what these say of its chunks, so that recovery is not
needed; but each chunk costs a forward and a backward pass for every query.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import UsageError
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gradient_products
from stride_cli.operators.linear_response import gradients_with_loss, joined
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.refinement import Chosen


def query_gradients(steered: SteeredModel, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Gate gradients of queries, one (Q, p) float32 on the CPU a space."""
    found = [gradients_with_loss(steered, batch)[0] for batch in batches]
    return [joined(parts) for parts in zip(*found, strict=True)]


def direct_scale(operators: Operators) -> float:
    """Factor of a chunk's gate gradient in the unit of the gates.

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    if operators.direct_scale is None:
        raise UsageError(
            "--read reads single chunks in the gates' own units, which these operators do not have",
            fix="fit a language model's operators by the default, in closed form with Kronecker factors "
            "(stride train --overwrite), or read none (--read 0)",
        )
    return operators.direct_scale


@dataclass(frozen=True)
class Projected:
    """What one model's projections say of every chunk, and how it counts among second estimates.

    Attributes
    ----------
    products : (Q, n) float32          estimates of scored_i g_i · g_q
    step : (n,) float32                of `Projections`
    noise : (Q,) float64               the products' errors have the standard deviation noise_q step_i
    weights : of each guide, (Q,)      products / √step are added times this
    """

    products: np.ndarray
    step: np.ndarray
    noise: np.ndarray
    weights: list[np.ndarray]


@dataclass(frozen=True)
class SecondEstimates:
    """What says, beside the recovery, which chunks are worth a direct look.

    Attributes
    ----------
    values : (Q, n) float64             each query's at mean 0 and variance 1 (0 where all are equal)
    alone : (Q, n) float64 or None      likewise, projections by themselves, whose errors are known
    projected : of each model with projections, in order, its part
    """

    values: np.ndarray
    alone: np.ndarray | None
    projected: list[Projected]

    def odds(self, query: int, chosen: Chosen, exact: Sequence[np.ndarray]) -> np.ndarray | None:
        """How likely each chunk that was read was to be, over the errors of the projections.

        Parameters
        ----------
        query : its number
        chosen : with projections guiding half of the choice
        exact : of each model with projections, (t,): scored_i g_i · g_q as read

        Returns
        -------
        ndarray (t,) float64, 0 … 1; None where nothing is known of errors: there are no projections, or not
        of all chunks
        """
        if not self.projected or any(len(part.step) < self.values.shape[1] for part in self.projected):
            return None
        from scipy.special import ndtr  # takes a tenth of a second to import

        odds = np.zeros(len(chosen.chunks))
        for guide, margins in enumerate(chosen.margins):
            # the strength that exact numbers would have had, and how far errors take it from there
            spare, variance = margins.copy(), np.zeros(len(odds))
            for part, products in zip(self.projected, exact, strict=True):
                weight = part.weights[guide][query]
                size = np.sqrt(part.step[chosen.chunks].astype(np.float64))
                error = products - part.products[query, chosen.chunks]
                spare += weight * np.divide(error, size, out=np.zeros_like(size), where=size > 0)
                variance += np.square(weight * part.noise[query] * size)
            # errors are the same for every guide: a chunk is read where the kindest of them would
            certain, spread = np.where(spare > 0, np.inf, -np.inf), np.sqrt(variance)
            odds = np.maximum(odds, ndtr(np.divide(spare, spread, out=certain, where=spread > 0)))
        return odds


def projected_influences(
    models: Iterable[SteeredModel], batches: Sequence[Batch], n_chunks: int
) -> SecondEstimates | None:
    """Estimates of every chunk's influence from its projection.

    The error of an estimate is as large as the chunk's gradient. Estimates are divided by the root of that:
    halfway to units of their errors the 100 highest hold more of the 50 strongest chunks (instructions: .43
    for .37 at 512 bytes a chunk) and as many of the 10 strongest.

    Parameters
    ----------
    models : with their operators
    batches : the Q queries, in order
    n_chunks : n                    chunks appended later have no projection: 0, the mean

    Returns
    -------
    SecondEstimates                 the mean over the models that have projections; None where none has
    """
    parts: list[Projected] = []
    total = np.zeros(0)
    for steered in models:
        projections = steered.operators.projections
        if projections is None:
            continue
        products, noise = projections.products(query_gradients(steered, batches))
        if not parts:
            total = np.zeros((len(products), n_chunks))
        own, size = products.astype(np.float64), np.sqrt(projections.step)
        np.divide(own, size, out=own, where=size > 0)
        spread = _standardise(own)
        total[:, : own.shape[1]] += own
        parts.append(Projected(products, projections.step, noise.astype(np.float64), [1.0 / spread]))
    if not parts:
        return None
    spread = _standardise(total)
    for part in parts:
        part.weights[0] /= spread
    return SecondEstimates(total, total, parts)


def second_estimates(
    models: Iterable[SteeredModel],
    queries: QuerySet,
    batches: Sequence[Batch],
    workspace: Workspace,
) -> SecondEstimates:
    """The pairs of tokens that chunks share with queries, and projections, where the operators have them.

    Projections also stand alone: by them what is strong is found however few pairs it shares and whatever the
    recovery makes of it, which is what statements about recall rest on.

    Parameters
    ----------
    models : with their operators
    queries : Q queries
    batches : the same, in order
    workspace : the n chunks, in the model's vocabulary
    """
    from stride_cli.attribution.shared_pairs import shared_pairs

    pairs = shared_pairs(queries, workspace.chunks, workspace.model.vocab_size).astype(np.float64)
    _standardise(pairs)
    projected = projected_influences(models, batches, workspace.n_chunks)
    if projected is None:
        return SecondEstimates(pairs, None, [])
    pairs += projected.values
    spread = _standardise(pairs)
    for part in projected.projected:
        part.weights.append(part.weights[0] / spread)
    return SecondEstimates(pairs, projected.values, projected.projected)


def _standardise(values: np.ndarray) -> np.ndarray:
    """Each row to mean 0 and variance 1 (0 where all are equal), in place; what it was divided by, (Q,)."""
    values -= values.mean(axis=1, keepdims=True)
    spread = values.std(axis=1, keepdims=True)
    spread[spread == 0] = 1.0
    values /= spread
    return spread[:, 0]


@dataclass(frozen=True)
class Readout:
    """Chunks as their own gradients say.

    Attributes
    ----------
    influences : (Q, t) float64
    products : of each model, (Q, t) float64      scored_i g_i · g_q
    """

    influences: np.ndarray
    products: list[np.ndarray]


def chunk_influences(
    models: Iterable[SteeredModel],
    batches: Sequence[Batch],
    chunks: ChunkReader,
    rows: np.ndarray | Sequence[np.ndarray],
    responses: np.ndarray,
    row_sizes: np.ndarray,
    *,
    intercept: bool = True,
) -> Readout:
    """Influences of the given chunks, in the unit of the recovered ones.

        w_i = (s_i − s̄) / m̄,      s_i = share_i g_i · g_x / λ_stab

    s̄ is the mean over all chunks, which the subsets' responses tell, m̄ the subsets' mean size; see
    `additive_measurement`. Of several models the mean, each on the scale of the first.

    Parameters
    ----------
    models : with their operators, the index's own first
    batches : the Q queries, in order
    rows : (t,) int64               distinct chunks; or Q of these, of each query its own: the t that are read
                                    are then all of them, ascending, and a query's numbers of others' mean
                                    nothing
    responses : (Q, C K) float64    of `stack_checkpoints`
    row_sizes : (K,) or (C, K)      |A_k|
    intercept : bool                whether recovery fits one; without, s̄ is 0

    Returns
    -------
    Readout

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    needed: np.ndarray | None = None
    if not isinstance(rows, np.ndarray):
        each, rows = rows, np.unique(np.concatenate(rows))
        needed = np.array([np.isin(rows, own) for own in each])  # (Q, t)
    total = np.zeros((len(responses), len(rows)))
    read: list[np.ndarray] = []
    sizes = np.atleast_2d(np.asarray(row_sizes, np.float64))
    for number, steered in enumerate(models):
        operators = steered.operators
        scale = direct_scale(operators)
        asked = query_gradients(steered, batches)
        own = np.asarray(responses)[:, number * operators.n_subsets : (number + 1) * operators.n_subsets]
        with progress("reading chunks", len(rows), unit="chunks") as bar:
            products = gradient_products(steered, asked, chunks, rows, needed=needed, advance=bar.advance)
        read.append(chunks.typical * products.sum(axis=0))
        single = scale * products.sum(axis=0)
        if number:  # the others' responses were put on the scale of the first model's
            raw = sum(
                gate_responses(gates, query.numpy())
                for gates, query in zip(operators.gates, asked, strict=True)
            )
            spread = np.std(raw, axis=1, keepdims=True)
            ratio = np.std(own, axis=1, keepdims=True)
            single *= np.divide(ratio, spread, out=np.zeros_like(spread), where=spread > 0)
        middle = (own * sizes[number]).sum(axis=1, keepdims=True) / max(1.0, sizes[number].sum())
        total += (single - (middle if intercept else 0.0)) / max(1.0, sizes[number].mean())
    return Readout(total / len(sizes), read)
