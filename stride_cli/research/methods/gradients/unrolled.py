"""Influence by unrolling a fine-tuning backwards: the query's gradient at the end is carried through the
curvature of the batches to each stretch of the training, and compared there with what Adam made of a chunk.

Segments are those of SOURCE (Bae et al. 2024, arXiv:2405.12186), the products with the Hessian exact, as of
training differentiated (Ilyas & Engstrom 2025, arXiv:2504.16430), which written out step by step says less:
Adam's division by the size of the last few gradients is differentiated there too, and what a chunk would do
that was not in a batch is lost. Written here: no package unrolls Adam without storing every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stride_cli.corpus.chunking import Chunk
from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of_index
from stride_cli.models.language.objective import before_head, head_logits, next_token_loss
from stride_cli.options import option
from stride_cli.output import progress
from stride_cli.research.methods.gradients.passes import MethodOptions, query_room
from stride_cli.research.methods.protocol import in_blocks, takes
from stride_cli.training.epoch_batches import Batch, as_read, make_batch
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import make_optimizers, planned_steps, train
from stride_cli.training.language_trainer import index_chunks, own_recipe

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_READ = 16  # chunks whose gradients are multiplied with those of queries at once
_HELD = 3  # vectors of all parameters that a query takes
_DIRECTIONS = 4


@dataclass(frozen=True)
class Stretch:
    """A part of the training, in which weights are taken to stay as they are in its middle.

    Attributes
    ----------
    weights : (P,) float32
    batches : of some of its steps, evenly chosen: chunk numbers and epoch
    rate : sum of what all its steps' gradients came to be multiplied with
    """

    weights: Tensor
    batches: list[tuple[np.ndarray, int]]
    rate: float


@dataclass(frozen=True)
class UnrolledOptions(MethodOptions):
    method = "unrolled"
    stretches: int = option(8, "Of the training, that the corpus is read in.", low=1)
    batches: int = option(
        16, "Whose curvature is applied, evenly along the training, one a stretch at least.", low=1
    )
    at: str = option(
        "path", "Weights of curvature and gradients: along the training, or its end.", choices=("path", "end")
    )
    query_bytes: int | None = option(
        None, "Most memory for vectors of queries; default: an eighth of what is free.", low=1
    )


class Unrolled:
    """Σ_s ⟨∫_s c A λ dτ, ∇ loss_s(chunk)⟩ over stretches s of the training, replayed by the model's recipe.

    λ is the query's gradient at the end, carried back through every stretch by dλ = −c H A λ dτ, with H the
    Hessian of one batch after the other, exact, τ the learning rates that it stands for, as momentum spreads
    them, and c what clipping leaves of its gradient. A = 1 / (√v + ε) is Adam's division, with v the mean of
    its second moments over the whole training: each step's own would say what rare tokens do to others by
    numbers without meaning. All trained parameters take part. What every token of the corpus does alike is
    taken off.

    A step of descent as long as Adam's would not hold where the loss is steep, which momentum makes up for.
    So each batch's part is solved as the exponential that it is, in the `_DIRECTIONS` that Lanczos finds for
    the query; where the loss curves downwards it is taken to be flat.

    The replay takes one training; a query `_DIRECTIONS` times two bare passes over each of ``batches``; and
    the corpus is read ``stretches`` times, for all queries, or once.

    Raises
    ------
    UsageError      an option out of range; a classifier, or a model that was not trained by AdamW alone
    ModelError      the model has no recipe, or its recipe is of another corpus
    """

    name = "unrolled"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    @takes(UnrolledOptions)
    def __init__(self, **given: Any) -> None:
        self.options = UnrolledOptions(**given)

    def fit(self, workspace: Workspace) -> None:
        """Train once more, keeping the weights in the middle of every stretch and Adam's mean division."""
        if kind_of_index(workspace.index) == "classifier":
            raise UsageError(
                "unrolled is of language models, and the index is of a classifier",
                fix="choose another method: source, ekfac",
            )
        self._recipe = own_recipe(workspace)
        if self._recipe.optimizer != "adamw":
            raise UsageError(
                f"unrolled is of models trained by AdamW, and this one was by {self._recipe.optimizer}",
                fix="choose another method: ekfac, direct",
            )
        self._device, self._chunks = workspace.model.device, index_chunks(workspace)
        model = initial_model(self._recipe).to(self._device)
        self._model, self._parameters = model, [p for p in model.parameters() if p.requires_grad]
        total, planned = planned_steps(self._chunks, self._recipe)
        steps = list(planned)
        parts = np.array_split(np.arange(total), min(self.options.stretches, total))
        middles = {int(part[len(part) // 2]) + 1: number for number, part in enumerate(parts)}
        kept: dict[int, Tensor] = {}
        [optimizer] = make_optimizers(model, self._recipe)
        group = optimizer.param_groups[0]
        spread = torch.zeros(sum(parameter.numel() for parameter in self._parameters), device=self._device)

        def passed(step: int) -> None:
            moments = flat([_second_moment(optimizer, parameter) for parameter in self._parameters])
            spread.add_(moments, alpha=1 / (total * (1 - group["betas"][1] ** step)))
            if self.options.at == "path" and step in middles:
                kept[middles[step]] = flat(self._parameters)

        with progress("unrolled: training", total, unit="steps") as ticker:
            train(model, self._chunks, self._recipe, optimizers=[optimizer], after_step=passed, ticker=ticker)
        self._last = flat(self._parameters)
        self._root = torch.where(spread > 0, (spread.sqrt() + group["eps"]).rsqrt(), 0.0)  # √A
        rates = spread_rates(np.array([step[2] for step in steps]), group["betas"][0]) * self._recipe.adam_lr
        self._stretches = []
        for number, part in enumerate(parts):
            count = min(len(part), max(1, round(self.options.batches * len(part) / total)))
            chosen = part[np.arange(count) * len(part) // count]
            batches = [(steps[step][0], steps[step][1]) for step in chosen]
            weights = kept[number] if self.options.at == "path" else self._last
            self._stretches.append(Stretch(weights, batches, float(rates[part].sum())))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        room = query_room(self.options.query_bytes, self._device)
        at_once = max(1, room // (4 * _HELD * len(self._last)))
        for start in range(0, len(queries), at_once):
            scores = self._scores(queries, range(start, min(start + at_once, len(queries))))
            yield from in_blocks(scores)

    def _scores(self, queries: QuerySet, rows: range) -> np.ndarray:
        put(self._last, self._parameters)
        batches = [asked(queries, row, self._device) for row in rows]
        remaining = torch.stack([self._gradient(batch) for batch in batches])
        remaining.mul_(self._root)  # √A λ, in which the curvature is symmetric
        found = np.zeros((len(rows), len(self._chunks)))
        count = sum(len(stretch.batches) for stretch in self._stretches)
        with progress("unrolled: curvature", count, unit="batches") as ticker:
            for stretch in reversed(self._stretches):
                put(stretch.weights, self._parameters)
                if self.options.at == "path" or stretch is self._stretches[-1]:
                    passed = torch.zeros_like(remaining)
                each = stretch.rate / len(stretch.batches)
                for chunks, epoch in reversed(stretch.batches):
                    self._back(chunks, epoch, each, remaining, passed)
                    ticker.advance()
                if self.options.at == "path" or stretch is self._stretches[0]:
                    self._read(passed.mul_(self._root), found)
        # a step's loss is the mean over its tokens: a chunk more is as many tokens less of all others
        scored = np.array([chunk.n_scored for chunk in self._chunks], np.float64)
        found -= scored * (found.sum(axis=1, keepdims=True) / scored.sum())
        return (found / scored.sum()).astype(np.float32)

    def _back(self, chunks: np.ndarray, epoch: int, rate: float, remaining: Tensor, passed: Tensor) -> None:
        """Carry the rows of `remaining`, √A λ, through what a batch stands for, and add c ∫ √A λ dτ to
        `passed`."""
        batch = make_batch(as_read(self._chunks, chunks, self._recipe, epoch), self._device)
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
            loss = losses(self._model, batch).mean()
            gradient, products = differentiated(loss, self._parameters, self._parameters)
            norm = float(gradient.norm())
            clipped = min(1.0, self._recipe.clip / (norm + 1e-6)) if self._recipe.clip else 1.0

            def curved(vector: Tensor) -> Tensor:
                """c √A H √A v"""
                return clipped * self._root * flat(products(self._root * vector))

            for query, own in enumerate(remaining):
                left, taken = carried(curved, own, rate)
                remaining[query] = left
                passed[query] += clipped * taken

    def _read(self, moved: Tensor, found: np.ndarray) -> None:
        """Add ⟨moved, ∇ loss(chunk)⟩ of every chunk, its loss summed over its tokens."""
        rows = [number for number, chunk in enumerate(self._chunks) if chunk.n_scored]
        with progress("unrolled: reading", len(rows), unit="chunks") as ticker:
            for start in range(0, len(rows), _READ):
                some = rows[start : start + _READ]
                gradients = torch.stack([self._of_chunk(self._chunks[row]) for row in some])
                found[:, some] += (moved @ gradients.T).double().cpu().numpy()
                ticker.advance(len(some))

    def _of_chunk(self, chunk: Chunk) -> Tensor:
        return self._gradient(make_batch([chunk], self._device)) * chunk.n_scored

    def _gradient(self, batch: Batch) -> Tensor:
        """Take the gradient of the mean loss, (P,)."""
        loss = next_token_loss(self._model, batch)
        return flat(torch.autograd.grad(loss, self._parameters, materialize_grads=True))


def losses(model: Any, batch: Batch) -> Tensor:
    """Compute the losses of a batch's scored tokens, (N,) in nats, differentiable twice."""
    final = before_head(model, model.get_output_embeddings(), batch.ids)
    logits = head_logits(model, final.flatten(0, 1).index_select(0, batch.rows)).float()
    return torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")


def asked(queries: QuerySet, row: int, device: torch.device) -> Batch:
    """Turn a query into a batch as training takes it."""
    query = queries.batch([row])
    scored = torch.nonzero(query.weights[0, 1:] > 0)[:, 0].to(device)
    ids = query.ids.to(device)
    return Batch(ids, scored, ids[0, scored + 1])


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Join all parts as one vector (P,)."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def split(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into the shapes of parameters: the inverse of `flat`."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


@torch.no_grad()
def put(vector: Tensor, parameters: Sequence[Tensor]) -> None:
    """Set the parameters' values."""
    for parameter, part in zip(parameters, split(vector, parameters), strict=True):
        parameter.copy_(part)


def differentiated(
    loss: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Take ∇ loss in the parameters, (P,), and v (P,) ↦ ∂⟨v, ∇ loss⟩ / ∂ each of the inputs."""
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    used = [number for number, part in enumerate(gradient) if part.requires_grad]

    def products(vector: Tensor) -> tuple[Tensor, ...]:
        parts = split(vector, parameters)
        return torch.autograd.grad(
            [gradient[number] for number in used],
            inputs,
            [parts[number] for number in used],
            retain_graph=True,
            materialize_grads=True,
        )

    return flat(gradient), products


def carried(curved: Callable[[Tensor], Tensor], vector: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """Compute exp(−t B) v and its integral from 0 to t, for a symmetric B known by its products, in a Krylov
    space of `_DIRECTIONS` vectors; negative eigenvalues count as 0."""
    length = float(vector.norm())
    if length == 0.0:
        return vector.clone(), torch.zeros_like(vector)
    basis = [vector / length]
    inner = torch.zeros(_DIRECTIONS, _DIRECTIONS, dtype=torch.float64)
    for row in range(_DIRECTIONS):
        product = curved(basis[row])
        for column, other in enumerate(basis):  # all of them: in float32 two do not keep it orthogonal
            share = product @ other
            inner[row, column] += float(share)
            product = product - share * other
        rest = float(product.norm())
        if row + 1 == _DIRECTIONS or rest <= 1e-6 * abs(float(inner[row, row])):
            break
        basis.append(product / rest)
    count = len(basis)
    values, vectors = torch.linalg.eigh(inner[:count, :count])  # of the lower triangle, which is all there is
    values.clamp_min_(0.0)
    start = length * vectors[0]  # v in the eigenvectors
    lasting = torch.where(values > 0, -torch.expm1(-time * values) / values.clamp_min(1e-30), time)
    left = (vectors @ (torch.exp(-time * values) * start)).to(vector)
    taken = (vectors @ (lasting * start)).to(vector)
    whole = torch.stack(basis)
    return left @ whole, taken @ whole


def spread_rates(rates: np.ndarray, momentum: float) -> np.ndarray:
    """Spread learning rates over steps as momentum does: each gradient's total factor, (T,), of the same sum.
    The last ones hardly count, the first ones more."""
    steps = np.arange(1, len(rates) + 1)
    left, found = 0.0, np.zeros(len(rates))
    for place in range(len(rates) - 1, -1, -1):
        left = momentum * left + (1 - momentum) * rates[place] / (1 - momentum ** steps[place])
        found[place] = left
    return found


def _second_moment(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Read Adam's running mean of a parameter's squared gradients; 0 before any."""
    state = optimizer.state.get(parameter)
    return state["exp_avg_sq"] if state else torch.zeros_like(parameter)
