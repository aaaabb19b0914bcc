"""Projections of examples' gradients, gathered while somebody else's loop trains: hooks on its model.

    kept of example i:   Σ_steps lr · Qᵀ G_i P,      G_i = −∂(loss of i summed over its scored tokens)/∂W

(TracIn's sum over checkpoints, with every step as one; Pruthi et al., NeurIPS 2020.) What the loss of a batch
is divided by, and what mixed precision and accumulation multiply it with, is taken out: see `Gatherer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stride_cli.errors import UsageError
from stride_cli.models.language.structure import find_structure
from stride_cli.models.linear_layers import find_linear_layers
from stride_cli.operators.layer_projections import ProjectedLayers
from stride_cli.operators.layer_spaces import layer_widths

_OFF = "leave projections out: StrideCallback(out)"


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers that read the same.

    Attributes
    ----------
    names : of the layers, as the model has them that is saved
    modules : that give what these layers give; of a layer with low-rank parts, the two together
    widths : of each layer, (numbers that it reads, that it gives)
    """

    names: list[str]
    modules: list[nn.Module]
    widths: list[tuple[int, int]]


@torch.no_grad()
def trained_layers(model: Any) -> list[LayerGroup]:
    """The linear layers inside the blocks that training moves, in the order in which they run.

    Raises
    ------
    ModelError      the model's blocks cannot be found
    UsageError      training moves none of their linear layers
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    device = next(base.parameters()).device
    modes = {module: module.training for module in model.modules()}
    chosen: list[tuple[str, nn.Module, nn.Module]] = []
    read: dict[nn.Module, Any] = {}

    def run() -> None:
        base(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False)

    def seen(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        read[module] = args[0]

    try:
        model.eval()  # without dropout no random number is drawn
        structure = find_structure(base, device)
        names = {module: name for name, module in base.named_modules()}
        for layer in find_linear_layers(structure.blocks, structure.d_model, run).all:
            name = names[layer]
            if name.endswith(".base_layer"):  # of PEFT: low-rank parts train in its place
                name = name.removesuffix(".base_layer")
                chosen.append((name, base.get_submodule(name), layer))
            elif ".lora_" not in name and layer.weight.requires_grad:
                chosen.append((name, layer, layer))
        handles = [module.register_forward_hook(seen) for _, module, _ in chosen]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not chosen:
        raise UsageError("training moves no linear layer of the model's blocks, to project", fix=_OFF)
    groups: list[LayerGroup] = []
    for _, same in itertools.groupby(chosen, key=lambda each: id(read[each[1]])):
        own = list(same)
        widths = [layer_widths(layer) for _, _, layer in own]
        groups.append(LayerGroup([name for name, _, _ in own], [module for _, module, _ in own], widths))
    return groups


class Gatherer:
    """Hooks on a model in training that add up projections, example by example.

    A forward pass of the whole model in training mode, then its backward pass, then `add`: a batch. What
    counts as a token's loss is found from the labels that the model is called with, and its scale from
    the gradient that arrives at the model's own loss: 1 over what is accumulated, times the factor of
    16-bit floats. Layers are looked at once a batch, so that gradient checkpointing, which runs them twice,
    counts once.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
    groups : of `trained_layers`
    layers : ProjectedLayers            of the same groups
    rows : callable                     (rows of the batch, how it was called) → their examples' numbers

    Attributes
    ----------
    sums : (examples, numbers) float32
    lost : int                          batches that were left out, a gradient not being finite
    """

    def __init__(
        self,
        model: Any,
        groups: Sequence[LayerGroup],
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
        self._sites: list[_Site] = []
        device = next(model.parameters()).device
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
        starts = itertools.accumulate((r * s for r, s in layers.ranks), initial=0)
        spans = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        for number, (group, span) in enumerate(zip(groups, spans, strict=True)):
            P, Qs = layers.sides(number)
            site = _Site(number, span, P.to(device), len(group.modules))
            self._sites.append(site)
            for place, (module, Q) in enumerate(zip(group.modules, Qs, strict=True)):
                self._handles.append(module.register_forward_hook(self._watch(site, place, Q.to(device))))

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
                "the trainer trains by another loss than the model's own (compute_loss_func), whose scale is "
                "not known",
                fix=_OFF,
            )
        for site in self._sites:
            if site.number in batch.pulled:  # a layer of its group had no part in the loss
                batch.multiply(site)
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
                "the trainer calls the model without input_ids and labels (compute_loss_func, or a loss of its "
                "own), by which gradients are told apart",
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
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            return

        def arrived(gradient: Tensor) -> None:
            batch.factor = gradient.detach().float()

        loss.register_hook(arrived)

    def _watch(self, site: _Site, place: int, Q: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        def ran(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            batch, key = self._batch, (site.number, place)
            # the first of two passes of reentrant checkpointing has no gradient, the second of others is
            # for what was forgotten alone
            if batch is None or key in batch.seen or not (torch.is_grad_enabled() and output.requires_grad):
                return
            batch.seen.add(key)
            if site.number not in batch.read:
                batch.read[site.number] = _product(args[0].detach(), site.P)

            def pulled(gradient: Tensor) -> None:
                low = _product(gradient, Q)
                known = batch.pulled.get(site.number)
                batch.pulled[site.number] = low if known is None else known.add_(low)
                batch.arrived[site.number] = batch.arrived.get(site.number, 0) + 1
                if batch.arrived[site.number] == site.count:
                    batch.multiply(site)

            output.register_hook(pulled)

        return ran


@dataclass(frozen=True)
class _Site:
    """A group: its number, its place among an example's numbers, P (in, k), and how many layers it has."""

    number: int
    span: slice
    P: Tensor
    count: int


class _Batch:
    """What passes of a batch.

    Attributes
    ----------
    rows : (B,) int64                   the examples' numbers
    tokens, factor : what the sum of the tokens' losses was divided by, and then multiplied with
    found : (B, numbers) float32        Qᵀ (∂loss/∂W) P
    read, pulled : of groups, (B·T, k) float32      Pᵀ a and Σ Qᵀ δ
    """

    def __init__(self, rows: np.ndarray, tokens: Tensor, found: Tensor) -> None:
        self.rows, self.tokens, self.found = rows, tokens, found
        self.factor: Tensor | None = None
        self.watched = False
        self.seen: set[tuple[int, int]] = set()
        self.read: dict[int, Tensor] = {}
        self.pulled: dict[int, Tensor] = {}
        self.arrived: dict[int, int] = {}

    def multiply(self, site: _Site) -> None:
        outer = self.pulled.pop(site.number).unflatten(0, (len(self.rows), -1))
        inner = self.read.pop(site.number).unflatten(0, (len(self.rows), -1))
        self.found[:, site.span] = torch.bmm(outer.transpose(1, 2), inner).flatten(1)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows (…, width) times columns, (…, k) flattened; float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.dtype == torch.float16:  # scaled gradients overflow
        flat = flat.float()
    with torch.autocast(flat.device.type, enabled=False):
        return (flat @ columns.to(flat.dtype)).float()
