"""Projections of examples' gradients, gathered while somebody else's loop trains: hooks on its model.

    kept of example i:   Σ_steps lr · Qᵀ G_i P,      G_i = −∂(loss of i summed over its scored tokens)/∂W

(TracIn's sum over checkpoints, with every step as one; Pruthi et al., NeurIPS 2020.) What the loss of a batch
is divided by, and what mixed precision and accumulation multiply it with, is taken out: see `Gatherer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stride_cli.errors import UsageError
from stride_cli.models.language.structure import find_structure
from stride_cli.models.linear_layers import find_linear_layers, layer_widths
from stride_cli.operators.layer_projections import ProjectedLayers

_OFF = "leave projections out: StrideCallback(out)"
_ALIKE = 1e-3  # of the coefficients of log-probabilities, which 16-bit floats round


@dataclass(frozen=True)
class TrainedLayer:
    """A linear layer that training moves.

    Attributes
    ----------
    name : as the model has it that is saved
    module : gives what the layer gives; of one with low-rank parts, the two together
    widths : numbers that it reads, and gives
    """

    name: str
    module: nn.Module
    widths: tuple[int, int]


@torch.no_grad()
def trained_layers(model: Any) -> list[TrainedLayer]:
    """The linear layers inside the blocks that training moves, in the order in which they run.

    Raises
    ------
    ModelError      the model's blocks cannot be found
    UsageError      training moves none of their linear layers
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    device = next(base.parameters()).device
    modes = {module: module.training for module in model.modules()}

    def run() -> None:
        base(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False)

    try:
        model.eval()  # without dropout no random number is drawn
        structure = find_structure(base, device)
        layers = find_linear_layers(structure.blocks, structure.d_model, run).all
    finally:
        for module, mode in modes.items():
            module.training = mode
    found: list[TrainedLayer] = []
    names = {module: name for name, module in base.named_modules()}
    for layer in layers:
        name = names[layer]
        if name.endswith(".base_layer"):  # of PEFT: low-rank parts train in its place
            name = name.removesuffix(".base_layer")
            found.append(TrainedLayer(name, base.get_submodule(name), layer_widths(layer)))
        elif ".lora_" not in name and layer.get_parameter("weight").requires_grad:
            found.append(TrainedLayer(name, layer, layer_widths(layer)))
    if not found:
        raise UsageError("training moves no linear layer of the model's blocks, to project", fix=_OFF)
    return found


class Gatherer:
    """Hooks on a model in training that add up projections, example by example.

    A forward pass of the whole model in training mode, then its backward pass, then `add`: a batch. What
    counts as a token's loss is found from the labels that the model is called with, and its scale from
    the gradient that arrives at the model's own loss, or at the log-probabilities of its tokens: 1 over
    what is accumulated, times the factor of 16-bit floats. Layers are looked at once a batch, so that
    gradient checkpointing, which runs them twice, counts once.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
    trained : of `trained_layers`
    layers : ProjectedLayers            the same
    rows : callable                     (rows of the batch, how it was called) → their examples' numbers

    Attributes
    ----------
    sums : (examples, numbers) float32
    lost : int                          batches that were left out, a gradient not being finite
    """

    def __init__(
        self,
        model: Any,
        trained: Sequence[TrainedLayer],
        layers: ProjectedLayers,
        n_examples: int,
        rows: Callable[[int, Mapping[str, Any]], np.ndarray],
    ) -> None:
        self.sums = np.zeros((n_examples, layers.size), np.float32)
        self.lost = 0
        self._rows = rows
        self._batch: _Batch | None = None
        self._waiting = self._twice = False
        self._size = layers.size
        device = next(model.parameters()).device
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
        for number, (layer, span) in enumerate(zip(trained, layers.spans, strict=True)):
            P, Q = (side.to(device) for side in layers.sides(number))
            self._handles.append(layer.module.register_forward_hook(self._watch(span, P, Q)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def expect(self) -> None:
        """A batch is to come."""
        self._batch, self._twice, self._waiting = None, False, True

    def add(self, rate: float) -> None:
        """What the batch that has passed left, times a learning rate.

        Raises
        ------
        UsageError      the model ran otherwise than once, on examples with labels, for its own loss
        """
        batch, self._batch, self._waiting = self._batch, None, False
        if batch is None or self._twice:
            what = "did not run in training" if batch is None else "ran more than once"
            raise UsageError(
                f"the model {what} in a step's batch, so that gradients cannot be told apart by example",
                fix=_OFF,
            )
        if batch.factor is None:
            raise UsageError(
                "the trainer trains by another loss than the mean of the tokens' (compute_loss_func, "
                "loss_type), whose scale is not known",
                fix=_OFF,
            )
        values = (batch.found * (rate * batch.tokens / batch.factor)).cpu().numpy()
        if not np.isfinite(values).all():  # 16-bit floats overflowed: the step is not taken either
            self.lost += 1
            return
        np.subtract.at(self.sums, batch.rows, values)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if not self._waiting:
            self._twice = True
            return
        self._waiting = False
        ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
        if ids is None or labels is None:
            raise UsageError(
                "the trainer calls the model without input_ids and labels (compute_loss_func), by "
                "which gradients are told apart",
                fix=_OFF,
            )
        items = kwargs.get("num_items_in_batch")
        tokens = (labels[..., 1:] != -100).sum() if items is None else items
        rows = self._rows(len(ids), kwargs)
        found = torch.zeros(len(ids), self._size, device=ids.device)
        self._batch = _Batch(rows, torch.as_tensor(tokens, device=ids.device).clamp_min(1), found)

    def _end(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        batch = self._batch
        if batch is None or batch.watched:
            return
        batch.watched = True
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad:
            loss.register_hook(batch.loss_arrived)
        # TRL adds up the tokens' log-probabilities itself
        logarithms = getattr(output, "log_probs", None)
        if isinstance(logarithms, Tensor) and logarithms.requires_grad:
            logarithms.register_hook(batch.logarithms_arrived)

    def _watch(self, span: slice, P: Tensor, Q: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        def ran(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            batch = self._batch
            # the first of two passes of reentrant checkpointing has no gradient, the second of others is
            # for what was forgotten alone
            if (
                batch is None
                or module in batch.seen
                or not (torch.is_grad_enabled() and output.requires_grad)
            ):
                return
            batch.seen.add(module)
            read = _product(args[0].detach(), P)  # (B·T, k)

            def pulled(gradient: Tensor) -> None:
                outer, inner = (
                    each.unflatten(0, (len(batch.rows), -1)) for each in (_product(gradient, Q), read)
                )
                batch.found[:, span] = torch.bmm(outer.transpose(1, 2), inner).flatten(1)

            output.register_hook(pulled)

        return ran


class _Batch:
    """What passes of a batch.

    Attributes
    ----------
    rows : (B,) int64                   the examples' numbers
    tokens, factor : what the sum of the tokens' losses was divided by, and then multiplied with
    found : (B, numbers) float32        Qᵀ (∂loss/∂W) P
    seen : layers that have run
    """

    def __init__(self, rows: np.ndarray, tokens: Tensor, found: Tensor) -> None:
        self.rows, self.tokens, self.found = rows, tokens, found
        self.factor: Tensor | None = None
        self.watched = False
        self.seen: set[nn.Module] = set()

    def loss_arrived(self, gradient: Tensor) -> None:
        self.factor = gradient.detach().float()

    def logarithms_arrived(self, gradient: Tensor) -> None:
        """Of every token's log-probability; where all that count do so alike, that is the scale."""
        counted = -gradient.detach().float()
        counted = counted[counted != 0]
        if not len(counted):
            self.factor = torch.ones((), device=gradient.device)
        elif counted.max() - counted.min() <= _ALIKE * counted.max().abs():
            self.factor, self.tokens = counted.mean(), torch.ones((), device=gradient.device)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows (…, width) times columns, (…, k) flattened; float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.dtype == torch.float16:  # scaled gradients overflow
        flat = flat.float()
    with torch.autocast(flat.device.type, enabled=False):
        return (flat @ columns.to(flat.dtype)).float()
