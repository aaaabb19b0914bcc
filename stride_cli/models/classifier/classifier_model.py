"""A classifier with the interface of a causal language model, so that every stage works on it unchanged.

An example is a chunk of two tokens, the number of its input and its label: the model "reads" the number,
looks the input up in a table, and predicts the label, the only scored token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError, NumericalError, QueryError
from stride_cli.models.classifier.networks import split_network
from stride_cli.models.kinds import Kind
from stride_cli.models.linear_layers import LayerVisitor, LinearLayers, check_layer, visiting
from stride_cli.models.spec import ModelSpec


@dataclass(frozen=True)
class Standardisation:
    """Inputs become (x − mean) / deviation: one number each for images, one a column for tables."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, inputs: np.ndarray, *, by_column: bool) -> Standardisation:
        """Mean and deviation of training inputs (n, …), float64; a constant column is divided by 1."""
        values = inputs.astype(np.float64)
        axis = 0 if by_column else None
        deviation = np.asarray(values.std(axis=axis))
        return cls(np.asarray(values.mean(axis=axis)), np.where(deviation > 1e-12, deviation, 1.0))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """(B, …) numbers → (B, …) float32."""
        return ((inputs - self.mean) / self.deviation).astype(np.float32)


class InputTable:
    """Inputs by number: the chunks of an index first, then every row of its file, then what queries bring.

    Number i < n is chunk i's input, that of row chunk_rows[i] of data (N, …); n + r is row r of the file, so
    that a held-out row has the same number in every process; later numbers are inputs registered since.
    """

    def __init__(self, data: np.ndarray, chunk_rows: np.ndarray) -> None:
        self.data = data
        self.chunk_rows = np.asarray(chunk_rows, np.int64)
        self._added: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}  # content of an added input → its number

    @property
    def n_chunks(self) -> int:
        return len(self.chunk_rows)

    def __len__(self) -> int:
        return self.n_chunks + len(self.data) + len(self._added)

    def add(self, inputs: np.ndarray) -> np.ndarray:
        """Append inputs (B, …); their numbers, (B,) int64. One that was added before keeps its number."""
        numbers = []
        for row in np.asarray(inputs, np.float64):
            key = row.tobytes()
            if key not in self._known:
                self._known[key] = len(self)
                self._added.append(row)
            numbers.append(self._known[key])
        return np.asarray(numbers, np.int64)

    def of_rows(self, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        """Numbers of rows of the file, (B,) int64."""
        return self.n_chunks + np.asarray(rows, np.int64)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Inputs (B, …) by number.

        Raises QueryError: no such number.
        """
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(wrong):
            raise QueryError(
                f"there is no input number {wrong[0]} (the model knows {len(self):,})",
                fix="give the file of the queries again (--queries FILE); from Python: register() its inputs",
            )
        # 1. numbers → rows of the file; what was added comes behind them
        chunks, rows = numbers < self.n_chunks, numbers - self.n_chunks
        rows[chunks] = self.chunk_rows[numbers[chunks]]
        # 2. all at once, where all are in the file
        if (rows < len(self.data)).all():
            return self.data[rows]
        n = len(self.data)
        return np.stack([self.data[row] if row < n else self._added[row - n] for row in rows.tolist()])


_PROBE_ROWS = 2


class ClassifierModel:
    """A frozen classifier that can be entered and left at any block.

    The interface is `CausalLM`'s, with T = 2: position 0 is the input, position 1 (the label) is never read,
    and zeros stand there.

    Parameters
    ----------
    network : nn.Module             see `networks`; switched to eval mode and frozen
    classes : sequence of str       names, in the order of the logits
    shape : tuple                   of one input
    standardisation : Standardisation
    spec : ModelSpec, optional      the model directory, and how it was loaded
    fingerprint : str, optional     SHA-256 in hex; else computed from weights, classes and standardisation

    Raises ModelError: no blocks and head, or they do not add up to the network's own output.
    """

    kind: Kind = "classifier"
    end_tokens: frozenset[int] = frozenset()
    length_kinds = None
    context_length = 2
    pretrained = False
    capture_layers = ("all",)
    all_layers = "all"
    pools = ("scored",)

    def __init__(
        self,
        network: nn.Module,
        *,
        classes: Sequence[str],
        shape: Sequence[int],
        standardisation: Standardisation,
        spec: ModelSpec | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.model = network.eval()
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        self.classes, self.vocab_size = list(classes), len(classes)
        self.shape = tuple(int(size) for size in shape)
        self.standardisation = standardisation
        self.spec = spec or ModelSpec()
        self.name: str = type(network).__name__
        self._fingerprint = fingerprint
        self.table = InputTable(np.zeros((0, *self.shape)), np.zeros(0, np.int64))
        self.held_out = np.zeros(0, np.int64)  # rows of the table's file that are queries by default
        self.row_ids: list[str] = []  # of the table's file
        self.row_labels = np.zeros(0, np.int64)
        self.read_file: Callable[[str], Any] | None = None  # examples of another file of the same columns
        blocks, head = split_network(network)
        self.blocks, self.n_layers = nn.ModuleList(blocks), len(blocks)
        self.head = head
        self._shapes: list[tuple[int, ...]] = []  # of the activations after 0, 1, … blocks, without batch
        self._check_parts()

    # What it is

    @property
    def path(self) -> str | None:
        return self.spec.place

    @property
    def d_model(self) -> int:
        """Width of the penultimate features; activations of other layers have widths of their own."""
        return math.prod(self._shapes[-1])

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.model.parameters())

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            from stride_cli.models.language.fingerprints import state_fingerprint

            statistics = [self.standardisation.mean.tolist(), self.standardisation.deviation.tolist()]
            text = json.dumps([state_fingerprint(self.model), self.classes, self.shape, statistics])
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    @property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256 in hex of the names of the classes: what a label's number means."""
        return hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()

    @property
    def tokenizer(self) -> Any:
        raise ModelError(
            f"{self.name} is a classifier: it has no tokenizer", fix="choose a method without text"
        )

    def default_space(self, fit: str) -> str:
        """The network's own linear layers; the logits alone where the head is none, or blocks have none."""
        if fit != "closed" or not isinstance(self.head, nn.Linear):
            return "logit"
        if self.linear_layers("all"):
            return "head-matrix+linear-matrix"
        return "head-matrix" if self.n_layers <= 1 else "logit"

    # Inputs

    def share_inputs(self, other: Any) -> None:
        """Read the inputs of another model of the same index, by the same numbers."""
        self.table = other.table

    def attach(
        self, data: np.ndarray, chunk_rows: np.ndarray, labels: np.ndarray, ids: Sequence[str]
    ) -> None:
        """Put the rows of a file, data (N, …), labels (N,) int64 and N ids, behind the numbers
        (`InputTable`); `chunk_rows`, (n,) int64, are the rows of the index's chunks."""
        self.check_shape(data.shape[1:], "the file's inputs")
        self.table = InputTable(data, chunk_rows)
        self.row_labels, self.row_ids = np.asarray(labels, np.int64), list(ids)

    def inputs(self, ids: Tensor) -> Tensor:
        """Standardised inputs of (input number, label): (B, 2) int64 → (B, …), the model's dtype."""
        if ids.ndim != 2 or ids.shape[1] != 2:
            raise ValueError(f"ids must have shape (B, 2), not {tuple(ids.shape)}")
        found = self.table.take(ids[:, 0].cpu().numpy())
        return torch.from_numpy(self.standardisation.apply(found)).to(self.device, self.dtype)

    # Running it

    def hidden(self, ids: Tensor, layer: int) -> Tensor:
        """Activations (B, 2, d_layer) of (B, 2) input numbers and labels after `layer` blocks: flattened at
        position 0, zeros at position 1. 0 blocks: the standardised input."""
        check_layer(layer, self.n_layers)
        state = self.inputs(ids)
        for block in self.blocks[:layer]:
            state = block(state)
        return _with_label_position(state.flatten(1))

    def continue_from(self, hidden: Tensor, layer: int) -> Tensor:
        """Continue activations (B, 2, d_layer), steered or not, to the penultimate features (B, 2, d_model).

        Differentiable in `hidden`, of which position 1 is not read; zeros at position 1.
        """
        check_layer(layer, self.n_layers)
        return self.advance(hidden, layer, self.n_layers)

    def advance(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Blocks `start` … `stop` − 1, from activations (B, 2, d_start) to (B, 2, d_stop); differentiable."""
        state = hidden[:, 0].reshape(len(hidden), *self._shapes[start])
        for block in self.blocks[start:stop]:
            state = block(state)
        return _with_label_position(state.flatten(1))

    @cached_property
    def _linear_layers(self) -> LinearLayers:
        """Those inside the blocks that run once, on one vector an example."""
        ran: list[nn.Module] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            # of several vectors: twice, so that it counts as one that runs more than once
            ran.extend([module] if args[0].ndim == 2 else [module, module])

        with ExitStack() as stack:
            for module in self.blocks.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(note).remove)
            with torch.no_grad():
                state = torch.zeros(1, *self.shape, device=self.device, dtype=self.dtype)
                for block in self.blocks:
                    state = block(state)
        return LinearLayers(all=[module for module in ran if ran.count(module) == 1])

    def linear_layers(self, which: str) -> list[nn.Module]:
        """Return some of `LinearLayers`, of the blocks and not the head: all, or none."""
        return self._linear_layers.all if which == "all" else []

    def adapter_matrices(self, which: str) -> None:
        """None: it was trained in all its weights."""

    def check_padding(self, length: int) -> None:
        """Nothing: all sequences have one length."""

    def remarks(self, spaces: Sequence[str]) -> list[str]:
        """None: what its spaces act at is named by them."""
        return []

    @contextmanager
    def at_layers(self, which: str, length: int, visit: LayerVisitor) -> Iterator[None]:
        """See `CausalLM.at_layers`; T is 2, with zeros where the label stands."""

        def first(number: int, read: Tensor, output: Tensor) -> Tensor:
            read, output = (nn.functional.pad(part, (0, 0, 0, 1)) for part in (read, output))
            given = visit(number, read, output)
            return (output if given is None else given)[:, :1]

        with visiting(self._linear_layers, which, 1, first):
            yield

    def uncapped_logits(self, final: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The same as `logits`: no cap is there; of the classes `tokens` (…, m) alone, if given."""
        logits = self.logits(final)
        return logits if tokens is None else logits.gather(-1, tokens)

    def token_losses(self, final: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of targets (B, T) at penultimate features (B, T, d_model), fp32 nats."""
        logits = self.logits(final).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="none").reshape(targets.shape)

    def soft_cap(self, logits: Tensor) -> Tensor:
        """The logits themselves."""
        return logits

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """None, there being no cap."""
        return None

    def logits(self, final: Tensor) -> Tensor:
        """The head: penultimate features (…, d_model) → logits (…, classes)."""
        flat = self.head(final.reshape(-1, *self._shapes[-1]))
        return flat.reshape(*final.shape[:-1], flat.shape[-1])

    @torch.no_grad()
    def predict(self, ids: Tensor) -> Tensor:
        """Logits of inputs (B, 2) → (B, classes); NumericalError where one is not finite."""
        logits = self.logits(self.continue_from(self.hidden(ids, 0), 0)[:, 0])
        if not bool(torch.isfinite(logits).all()):
            raise NumericalError("a logit is not finite", fix="check the weights, or run with --dtype fp32")
        return logits

    def prepare(self, length: int) -> list[Any]:
        """Nothing: blocks are called with their input only."""
        return []

    # Inside

    @torch.no_grad()
    def _check_parts(self) -> None:
        """Blocks and head, one after the other on a probe, give what the network gives; notes the shapes."""
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBE_ROWS, *self.shape, generator=generator).to(self.device, self.dtype)
        try:
            whole = self.model(probe)
            state = probe
            self._shapes = [tuple(state.shape[1:])]
            for block in self.blocks:
                state = block(state)
                self._shapes.append(tuple(state.shape[1:]))
            parts = self.head(state)
        except Exception as error:  # a user's network can raise anything
            raise ModelError(
                f"{self.name} does not take inputs of shape {self.shape}: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                fix="inputs are (B, …) as in the data file; blocks take one tensor each",
            ) from error
        expected = (_PROBE_ROWS, self.vocab_size)
        if not isinstance(whole, Tensor) or tuple(whole.shape) != expected:
            found = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise ModelError(
                f"{self.name} gives {found} (expected logits of shape {expected})",
                fix="end it with a layer of one output a class",
            )
        if not torch.isfinite(whole).all():
            raise ModelError(f"{self.name}: the logits of a probe are not finite", fix="check its weights")
        tolerance = 1e-4 * float(whole.abs().max().clamp_min(1e-6))
        if parts.shape != whole.shape or float((parts - whole).abs().max()) > tolerance:
            raise ModelError(
                f"{self.name}: running its blocks and head does not give its own output",
                fix="forward must run `blocks` one after the other, then `head`, and nothing else",
            )

    def check_shape(self, found: Sequence[int], what: str) -> None:
        """QueryError for inputs of another shape than the model's; `what` names them."""
        if tuple(found) != self.shape:
            raise QueryError(
                f"{what} have shape {tuple(found)} (expected {self.shape}, as the model's)",
                fix="give data of the kind that the model was trained on",
            )

    def __repr__(self) -> str:
        where = f" from {Path(self.path).name}" if self.path else ""
        return f"<ClassifierModel {self.name}{where}: {self.n_layers} blocks, {self.vocab_size} classes>"


def _with_label_position(state: Tensor) -> Tensor:
    """(B, d) → (B, 2, d), zeros where the label stands."""
    return torch.stack([state, torch.zeros_like(state)], dim=1)
