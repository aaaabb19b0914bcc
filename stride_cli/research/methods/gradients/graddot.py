"""GradDot and TracIn: dot products of loss gradients (Pruthi et al. 2020, arXiv:2002.08484).

Written here: kronfluence replaces the model's modules, bergson stores every gradient. A test compares with
bergson's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.options import option
from stride_cli.research.methods.gradients.capture import Factors, Layer
from stride_cli.research.methods.gradients.passes import (
    Passes,
    ProductOptions,
    find_checkpoints,
    open_capture,
    query_room,
)
from stride_cli.research.methods.protocol import in_blocks, takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_KERNEL_FLOATS = 1 << 24  # products of chunk tokens with query tokens held at once


@dataclass(frozen=True)
class GradDotOptions(ProductOptions):
    method = "graddot"
    layers: str | None = option("all", "Linear layers that count, see `Capture`.")


@dataclass(frozen=True)
class TracInOptions(GradDotOptions):
    method = "tracin"
    checkpoints: str | None = option(
        None, "Models, separated by |; default: those kept when the index's was trained, or it alone."
    )
    rates: str | None = option(None, "A weight for each, separated by |; default: its learning rate.")


class TracIn:
    """Σ_checkpoints η · ⟨∇ loss(chunk), ∇ loss(query)⟩ over linear layers, exact.

    Nothing is stored: the corpus is read once for as many queries as fit into memory.

    Raises
    ------
    UsageError      an option out of range
    """

    name = "tracin"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    @takes(TracInOptions)
    def __init__(self, **given: Any) -> None:
        self.options: GradDotOptions = TracInOptions(**given)
        named, self._rates = given.get("checkpoints"), given.get("rates")
        self._along = named is None  # those that were kept
        self.checkpoints = find_checkpoints(named, self._rates if named else None)

    def fit(self, workspace: Workspace) -> None:
        """Find the checkpoints; scores need both gradients at once.

        Raises
        ------
        UsageError      rates, and there are not as many checkpoints
        """
        self._task = workspace
        path = workspace.model.path
        if self._along:
            kept = path if path and (Path(path) / "checkpoints").is_dir() else None
            self.checkpoints = find_checkpoints(kept, self._rates)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        workspace, options = self._task, self.options
        chosen = options.layers or "all"
        layers = open_capture(workspace, chosen).layers
        longest = max((len(ids) for ids in queries.ids), default=1)
        floats = query_room(options.query_bytes, workspace.model.device) // 4
        sharing = min(max(1, floats // sum(layer.size for layer in layers)), max(1, len(queries)))
        explicit = [_explicit_is_cheaper(layer, longest, sharing) for layer in layers]
        each = sum(
            layer.size if whole else longest * (layer.n_in + layer.n_out)
            for layer, whole in zip(layers, explicit, strict=True)
        )
        at_once = max(1, floats // each)
        for start in range(0, len(queries), at_once):
            stop = min(start + at_once, len(queries))
            scores = np.zeros((stop - start, workspace.n_chunks), np.float32)
            for checkpoint in self.checkpoints:
                capture = open_capture(workspace, chosen, checkpoint.load(workspace))
                passes = Passes.of(options, capture, workspace)
                bank = QueryBank(passes, queries, start, stop, explicit)
                scores += np.float32(checkpoint.rate) * bank.dot_corpus(passes, workspace, self.name)
                del bank  # before there is the next: each may take all of the room
            yield from in_blocks(scores)


class GradDot(TracIn):
    """⟨∇ loss(chunk), ∇ loss(query)⟩ at the task's model; options as `TracIn`."""

    name = "graddot"

    @takes(GradDotOptions)
    def __init__(self, **given: Any) -> None:
        self.options = GradDotOptions(**given)
        self.checkpoints, self._along = find_checkpoints(None, None), False


class QueryBank:
    """Gradients of queries start … stop − 1: at each layer as a matrix, or as factors of its tokens.

    Parameters
    ----------
    explicit : sequence of bool, optional
        Which layers have matrices. Default: all, so that they can be transformed in `matrices`.
    """

    def __init__(
        self, passes: Passes, queries: QuerySet, start: int, stop: int, explicit: Sequence[bool] | None = None
    ) -> None:
        n_layers = len(passes.capture.layers)
        self.n_queries = stop - start
        self.matrices: dict[int, Tensor] = {}  # layer → (Q, n_out, n_in)
        self._tokens: list[list[tuple[slice, Tensor, Tensor]]] = [[] for _ in range(n_layers)]
        for rows, batch in passes.query_batches(queries, start, stop):

            def visit(found: Factors, offset: int = rows.start - start) -> None:
                place = slice(offset + found.rows.start, offset + found.rows.stop)
                if explicit is not None and not explicit[found.layer]:
                    self._tokens[found.layer].append((place, found.inputs, found.outputs))
                    return
                layer = passes.capture.layers[found.layer]
                if found.layer not in self.matrices:
                    shape = (self.n_queries, layer.n_out, layer.n_in)
                    self.matrices[found.layer] = torch.zeros(shape, device=found.inputs.device)
                for block in found.blocks():
                    where = slice(offset + block.rows.start, offset + block.rows.stop)
                    self.matrices[found.layer][where] = block.gradients()

            passes.queries(batch, visit)

    def dot(self, found: Factors, scores: Tensor) -> None:
        """Add one layer's products with the rows of a batch to ``scores`` (Q, B)."""
        matrix = self.matrices.get(found.layer)
        if matrix is not None:
            flat = matrix.flatten(1)
            for block in found.blocks():
                scores[:, block.rows] += flat @ block.gradients().flatten(1).T
        for place, inputs, outputs in self._tokens[found.layer]:
            scores[place, found.rows] += _token_products(inputs, outputs, found)

    def dot_corpus(self, passes: Passes, workspace: Workspace, title: str) -> np.ndarray:
        """Multiply with the gradients of every chunk: (Q, n) float32."""
        result = np.zeros((self.n_queries, workspace.n_chunks), np.float32)
        held: list[Tensor] = []

        def visit(found: Factors) -> None:
            if not held:
                held.append(torch.zeros(self.n_queries, passes.batch_tokens, device=found.inputs.device))
            self.dot(found, held[0])

        for batch, _ in passes.corpus(workspace.chunks, visit, title):
            result[:, batch.rows] = held[0][:, : len(batch.rows)].cpu().numpy()
            held[0].zero_()
        return result


@dataclass(frozen=True)
class Preconditioned:
    """One model whose query gradients are transformed before they meet those of the corpus.

    Attributes
    ----------
    apply : callable         transforms the queries' matrices, layer → (Q, n_out, n_in) float32, in place
    weight : float           of the model's products in the sum over models
    """

    passes: Passes
    apply: Callable[[dict[int, Tensor]], None]
    weight: float = 1.0


def preconditioned_scores(
    models: Sequence[Callable[[], Preconditioned]],
    workspace: Workspace,
    queries: QuerySet,
    *,
    query_bytes: int | None,
    title: str,
) -> Iterator[np.ndarray]:
    """Multiply every chunk's gradient with the transformed gradients of the queries, summed over models.

    Parameters
    ----------
    models : sequence of callables      each opens a model, so that one is held at a time
    query_bytes : as for `query_room`

    Yields
    ------
    ndarray (q ≤ QUERY_BLOCK, n) float32
    """
    for start, stop in shared_passes(models[0]().passes, queries, query_bytes):
        scores = np.zeros((stop - start, workspace.n_chunks), np.float32)
        for number, open_model in enumerate(models, 1):
            model = open_model()
            bank = QueryBank(model.passes, queries, start, stop)
            model.apply(bank.matrices)
            named = title if len(models) == 1 else f"{title} {number}/{len(models)}"
            scores += np.float32(model.weight) * bank.dot_corpus(model.passes, workspace, named)
            del bank, model  # before there are the next: each may take all of the room
        yield from in_blocks(scores)


def shared_passes(passes: Passes, queries: QuerySet, query_bytes: int | None) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of queries whose gradients, as matrices of all layers, fit in so many bytes."""
    room = query_room(query_bytes, passes.capture.model.device)
    at_once = max(1, room // (4 * passes.capture.n_parameters))
    for start in range(0, len(queries), at_once):
        yield start, min(start + at_once, len(queries))


def _explicit_is_cheaper(layer: Layer, tokens: int, sharing: int) -> bool:
    """Tell whether matrices take fewer multiplications than `_token_products`, for one chunk and one query of
    so many tokens; ``sharing`` queries share the cost of the chunk's matrix."""
    return layer.size * (1 + tokens / sharing) <= tokens**2 * (layer.n_in + layer.n_out)


def _token_products(inputs: Tensor, outputs: Tensor, found: Factors) -> Tensor:
    """Compute ⟨Σ_s δ_s ⊗ a_s, Σ_t δ_t ⊗ a_t⟩ = Σ_st (δ_s·δ_t)(a_s·a_t): (Q, s, ·) and (b, t, ·) → (Q, b)."""
    n_queries, length = inputs.shape[:2]
    flat_in, flat_out = inputs.flatten(0, 1), outputs.flatten(0, 1)  # (Q·s, ·)
    tokens = found.inputs.shape[1]
    at_once = max(1, _KERNEL_FLOATS // (len(flat_in) * tokens))
    parts = []
    for start in range(0, len(found.inputs), at_once):
        rows = slice(start, start + at_once)
        kernel = flat_in @ found.inputs[rows].flatten(0, 1).T  # (Q·s, b·t)
        kernel *= flat_out @ found.outputs[rows].flatten(0, 1).T
        parts.append(kernel.reshape(n_queries, length, -1, tokens).sum(dim=(1, 3)))
    return torch.cat(parts, dim=1)
