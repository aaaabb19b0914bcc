"""Per-example gradients of linear layers, in factors, from one batched forward and one backward pass.

The gradient of a row's loss in the weight of a linear layer is ``G = Σ_t δ_t ⊗ a_t``, with a_t the layer's
input at token t and δ_t the gradient in its output. Hooks hand both to a visitor as the backward pass arrives
at the layer: a method reduces them at once, and nothing of the size (rows, parameters) is ever held. A bias
is the weight of one more input, which is 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stride_cli.errors import ModelError, UsageError
from stride_cli.operators.head import HeadBlock, check_finite, head_blocks, seeded
from stride_cli.operators.initial_residuals import average_residuals

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.models.protocol import AttributableModel

_CHOICES = "all, body, mlp, attention, head, or a regular expression of module names"
_EMBEDDINGS = "+embeddings"  # added to a choice


@dataclass(frozen=True)
class Layer:
    """A linear layer (Linear, GPT-2's Conv1D, Conv2d on its unfolded input, an embedding on one-hot tokens).

    Attributes
    ----------
    name : str               of the module
    module : nn.Module
    n_in, n_out : int        of the gradient G (n_out, n_in); a bias counts as one more input
    is_head : bool           whether it makes the logits
    """

    name: str
    module: nn.Module
    n_in: int
    n_out: int
    is_head: bool

    @property
    def size(self) -> int:
        return self.n_in * self.n_out


@dataclass(frozen=True)
class Factors:
    """Inputs and output gradients of one layer for some rows of a batch.

    Attributes
    ----------
    layer : int                       number in `Capture.layers`
    rows : slice                      rows of the batch
    inputs : (b, t, n_in) float32     a, its last column 1 where the layer has a bias
    outputs : (b, t, n_out) float32   δ, zero at padding
    active : (b, t) bool              positions that a scored prediction reads; False at padding
    """

    layer: int
    rows: slice
    inputs: Tensor
    outputs: Tensor
    active: Tensor

    def gradients(self) -> Tensor:
        """Multiply out the per-example weight gradients, (b, n_out, n_in) float32."""
        return torch.bmm(self.outputs.transpose(1, 2), self.inputs)

    def blocks(self, floats: int = 1 << 26) -> Iterator[Factors]:
        """Split the rows into blocks whose explicit gradients take at most so many floats."""
        at_once = max(1, floats // (self.inputs.shape[2] * self.outputs.shape[2]))
        for start in range(0, len(self.inputs), at_once):
            stop = min(start + at_once, len(self.inputs))
            part = slice(start, stop)
            rows = slice(self.rows.start + start, self.rows.start + stop)
            yield Factors(self.layer, rows, self.inputs[part], self.outputs[part], self.active[part])


@dataclass(frozen=True)
class Outcome:
    """Loss (B,) float64 of every row, mean nats per scored token; doubt (B,) float64, the mean of 1 − p."""

    loss: Tensor
    doubt: Tensor


Visitor = Callable[[Factors], None]


class Capture:
    """Hooks on the chosen linear layers of a model.

    Parameters
    ----------
    model : AttributableModel             or a classifier with the same interface
    probe : Batch                any batch: it shows which layers run, and which make the logits
    layers : str
        "all"; "body", all but the output head; "mlp", feed-forward parts; "attention";
        "head"; else a regular expression that is searched in module names. "+embeddings"
        behind any of these adds the embedding of tokens, which takes batch_tokens · vocabulary · 4 bytes. An
        embedding that is tied to the head then counts as a second layer; without, only the head's part does.
    bias : bool                  whether biases count as parameters

    Raises
    ------
    UsageError      no layer is chosen
    """

    def __init__(
        self, model: AttributableModel, probe: Batch, *, layers: str = "all", bias: bool = True
    ) -> None:
        self.model = model
        self._bias = bias
        order = _layers_run(model, probe, bias)
        self.layers = _choose(order, layers)
        self._calls: dict[int, int] = {}
        self._arrived: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._visit: Visitor | None = None
        self._rows, self._averaged = slice(0, 0), False
        self._active = torch.zeros(0)

    @property
    def n_parameters(self) -> int:
        return sum(layer.size for layer in self.layers)

    def run(
        self,
        batch: Batch,
        visit: Visitor,
        *,
        uniform: Tensor | None = None,
        output: str = "loss",
        power: float = 1.0,
        averaged: bool = False,
    ) -> Outcome:
        """Hand the factors of every chosen layer to ``visit``, last layer first.

        Parameters
        ----------
        batch : Batch             B rows; a row without a scored token has zero gradients
        visit : callable          called once or (for the head) several times a layer, each row once
        uniform : (B, T) float64, optional
            In [0, 1): labels are drawn from the model's own distribution by inverse CDF instead of being the
            true ones, as the Fisher matrix needs them.
        output : "loss" | "margin"
            The gradient is that of the cross entropy, or of the margin log(p / (1 − p)), summed over the
            scored tokens.
        power : float
            The sum is divided by (scored tokens)**power: 1 is the mean; 0 the sum; ½ makes the mean square of
            gradients with drawn labels the Gauss–Newton matrix of the mean loss.
        averaged : bool
            Tokens count by their mean residual over training instead of that at its end.

        Returns
        -------
        Outcome, for the true labels

        Raises
        ------
        NumericalError      a loss is not finite
        ModelError          a layer does not see one stretch of tokens per row
        """
        ids = batch.ids.to(self.model.device)
        weights = batch.weights.to(self.model.device, copy=True)
        weights[:, 0] = 0.0  # nothing predicts the first token
        scored = weights.sum(dim=1)
        share = weights / scored.clamp_min(1)[:, None] ** power
        # position t matters where a later one is scored
        later = weights.flip(1).cumsum(1).flip(1) - weights > 0
        body = any(not layer.is_head for layer in self.layers)
        self._visit, self._calls, self._arrived, self._averaged = visit, {}, {}, averaged
        try:
            with self._hooks(head=False), torch.set_grad_enabled(body):
                self._rows, self._active = slice(0, len(ids)), later
                hidden = self.model.hidden(ids, 0)
                final = self.model.continue_from(hidden, 0)
            pull, outcome = self._through_head(batch, ids, weights, share, final, uniform, output)
            self._rows, self._active = slice(0, len(ids)), later
            self._arrived.clear()
            if final.requires_grad:
                seeded(final, pull.to(final.dtype)).backward()
            self._flush()
        finally:
            self._visit = None
        return outcome

    def _through_head(
        self,
        batch: Batch,
        ids: Tensor,
        weights: Tensor,
        share: Tensor,
        final: Tensor,
        uniform: Tensor | None,
        output: str,
    ) -> tuple[Tensor, Outcome]:
        """Differentiate through the head, in row blocks so that (B, T, V) is never whole."""
        wants_final = final.requires_grad
        wants_head = any(layer.is_head for layer in self.layers)
        pull_final = torch.zeros_like(final, requires_grad=False)
        losses, doubts = [], []
        body_calls, self._calls = self._calls, {}

        @contextmanager
        def watched(rows: slice, after: slice) -> Iterator[None]:
            self._rows, self._active = rows, weights[rows, after] > 0
            self._calls, self._arrived = {}, {}
            with self._hooks(head=True), torch.set_grad_enabled(wants_head or wants_final):
                yield

        for block in head_blocks(self.model, final, ids, share, tracked=wants_final, around=watched):
            rows, after = block.rows, block.after
            weight = weights[rows, after].double()
            each = weight / weight.sum(dim=1).clamp_min(1)[:, None]
            true = ids[rows, after]
            drawn = None if uniform is None else block.draw(uniform[rows, after].to(true.device))
            for labels in (true,) if drawn is None else (true, drawn):
                with block.labelled(labels) as found:
                    if labels is true:
                        losses.append((found.surprise * each).sum(dim=1))
                        doubts.append((found.doubt * each).sum(dim=1))
                    if self._averaged:
                        before = 1.0 if batch.before is None else batch.before[rows, after].to(true.device)
                        found.error.mul_(average_residuals(found.doubt, before)[..., None])
                    if labels is drawn or drawn is None:
                        pull = -found.error if output == "loss" else _margin(block, labels)
            if block.raw.requires_grad:
                seeded(block.raw, pull.to(block.raw.dtype)).backward()
                if wants_final:
                    assert block.state.grad is not None
                    pull_final[rows, block.stretch] = block.state.grad
                self._flush()
        self._calls = body_calls
        outcome = Outcome(torch.cat(losses), torch.cat(doubts))
        check_finite(outcome.loss, batch)
        return pull_final, outcome

    @contextmanager
    def _hooks(self, *, head: bool) -> Iterator[None]:
        with ExitStack() as hooks:
            for number, layer in enumerate(self.layers):
                if layer.is_head == head:
                    hooks.callback(layer.module.register_forward_hook(self._watch(number)).remove)
            yield

    def _watch(self, number: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            read = args[0].detach()
            result = output
            if not output.requires_grad:
                # the graph starts here: parameters are frozen. A copy goes on: what follows may be in place
                output = output.detach().requires_grad_(True)
                result = output.clone()
            self._calls[number] = self._calls.get(number, 0) + 1
            output.register_hook(lambda gradient: self._arrive(number, read, gradient))
            return result

        return hook

    def _arrive(self, number: int, read: Tensor, gradient: Tensor) -> None:
        self._arrived.setdefault(number, []).append((read, gradient.detach()))
        if len(self._arrived[number]) == self._calls[number]:
            self._hand_over(number)

    def _flush(self) -> None:
        """Hand over layers of which some call had no gradient."""
        for number in list(self._arrived):
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        layer, (n_rows, length) = self.layers[number], self._active.shape
        pairs = [
            _as_tokens(layer, read, gradient, n_rows, length, bias=self._bias)
            for read, gradient in self._arrived.pop(number)
        ]
        masks = [
            self._active
            if inputs.shape[1] == length
            else self._active.any(1)[:, None].expand(inputs.shape[:2])
            for inputs, _ in pairs
        ]
        inputs, outputs, active = (
            torch.cat(list(parts), dim=1) for parts in (*zip(*pairs, strict=True), masks)
        )
        assert self._visit is not None
        with torch.no_grad():
            self._visit(Factors(number, self._rows, inputs, outputs, active))


def _as_tokens(
    layer: Layer, read: Tensor, gradient: Tensor, n_rows: int, length: int, *, bias: bool
) -> tuple[Tensor, Tensor]:
    """Shape a layer's input and output gradient as (b, t, n_in) and (b, t, n_out) float32."""
    module = layer.module
    if isinstance(module, nn.Embedding):
        read = functional.one_hot(read, layer.n_in)
    if isinstance(module, nn.Conv2d):
        padding = module.padding
        assert not isinstance(padding, str)
        read = functional.unfold(
            read.float(), module.kernel_size, module.dilation, padding, module.stride
        ).transpose(1, 2)  # (b, places, channels · kernel)
        gradient = gradient.flatten(2).transpose(1, 2)
    if read[..., 0].numel() == n_rows * length:  # also where tokens of all rows come one after the other
        shape = (n_rows, length)
    elif len(read) == n_rows:  # a classifier that reads one input a row; patches of a convolution
        shape = (n_rows, -1)
    else:
        raise ModelError(
            f"layer '{layer.name}' reads {tuple(read.shape)} for {n_rows} rows of {length} tokens",
            fix="choose other layers with layers=…: this one mixes the rows of a batch",
        )
    inputs = read.float().reshape(*shape, read.shape[-1])
    outputs = gradient.float().reshape(*shape, gradient.shape[-1])
    if bias and getattr(module, "bias", None) is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)
    return inputs, outputs


def _layers_run(model: AttributableModel, probe: Batch, bias: bool) -> list[Layer]:
    """List linear layers, and the embedding of tokens, in the order in which they run."""
    names = {module: name for name, module in model.model.named_modules()}
    embedding: object = getattr(model.model, "get_input_embeddings", lambda: None)()
    seen: dict[nn.Module, bool] = {}  # whether as part of the head
    in_head = False

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.setdefault(module, in_head)

    linear = [module for module in names if layer_sizes(module) is not None]
    chosen = [module for module in linear if not isinstance(module, nn.Embedding) or module is embedding]
    with ExitStack() as hooks, torch.no_grad():
        for module in chosen:
            hooks.callback(module.register_forward_hook(note).remove)
        ids = probe.ids[:1].to(model.device)
        final = model.continue_from(model.hidden(ids, 0), 0)
        in_head = True
        model.logits(final[:, :1])
    layers = []
    for module, is_head in seen.items():
        n_in, n_out = layer_sizes(module) or (0, 0)
        extra = int(bias and getattr(module, "bias", None) is not None)
        layers.append(Layer(names[module], module, n_in + extra, n_out, is_head))
    return layers


def layer_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Give (in, out) of a layer whose weight gradient is Σ δ ⊗ a; None for any other."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        n_in = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
        return (n_in, module.out_channels) if plain else None
    if type(module).__name__ == "Conv1D":  # GPT-2's linear layers, whose weights are (in, out)
        n_in, n_out = module.weight.shape  # type: ignore[misc]
        return int(n_in), int(n_out)
    return None


def _choose(every: Sequence[Layer], choice: str) -> list[Layer]:
    added = [layer for layer in every if isinstance(layer.module, nn.Embedding)]
    layers = [layer for layer in every if layer not in added]
    if choice.endswith(_EMBEDDINGS):
        if not added:
            raise UsageError(
                f"layers={choice}: the model has no embedding of tokens", fix=f"leave {_EMBEDDINGS} out"
            )
        return [*added, *_choose(layers, choice.removesuffix(_EMBEDDINGS))]
    body = [layer for layer in layers if not layer.is_head]
    chosen = {
        "all": list(layers),
        "body": body,
        "mlp": [layer for layer in body if re.search(r"mlp|ffn|feed_?forward|dense_|\bfc\d?\b", layer.name)],
        "attention": [layer for layer in body if re.search(r"attn|attention", layer.name)],
        "head": [layer for layer in layers if layer.is_head],
    }.get(choice)
    if chosen is None:
        try:
            chosen = [layer for layer in layers if re.search(choice, layer.name)]
        except re.error as error:
            raise UsageError(
                f"layers={choice} is not a regular expression: {error}",
                fix=f"one of {_CHOICES}, or a regular expression",
            ) from error
    if not chosen:
        names = ", ".join(layer.name for layer in layers[:4])
        raise UsageError(
            f"layers={choice} names none of the model's {len(layers)} linear layers ({names} …)",
            fix=f"one of {_CHOICES}",
        )
    return chosen


def _margin(block: HeadBlock, labels: Tensor) -> Tensor:
    """Compute ω ∂ log(p / (1 − p)) / ∂logits = ω (onehot − softmax of the other labels), (b, s, V)."""
    chosen = labels[..., None]
    pull = block.values.scatter(-1, chosen, float("-inf")).softmax(-1).neg_()
    return pull.scatter_(-1, chosen, 1.0).mul_(block.weight[..., None])
