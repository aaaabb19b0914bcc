"""A causal language model cut at a layer: residual stream up to it, continuation from it, output head.

The decoder is found by structure, not by class name: the outermost list of blocks that a forward pass runs
one after the other, the modules that run between the last block and the output head (the final norm), and the
head with its scaling or soft-capping. A probe at construction compares the parts with the model's own forward
pass, so that an architecture which does something else in between is refused instead of being measured
wrongly.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stride_cli.corpus.gate_budget import is_small
from stride_cli.errors import ModelError, NumericalError, QueryError, first_line
from stride_cli.models.kinds import Kind
from stride_cli.models.language.block_calls import BlockCall, read_tokens, repeated
from stride_cli.models.language.files import files_fingerprint
from stride_cli.models.language.fingerprints import state_fingerprint, tokenizer_fingerprint
from stride_cli.models.language.language_recipe import Recipe, read_recipe, was_finetuned
from stride_cli.models.language.lora import trained_matrices
from stride_cli.models.language.objective import (
    head_logits,
    logit_cap,
    plain_head,
    soft_cap,
    token_losses,
    uncapped_logits,
)
from stride_cli.models.language.structure import (
    check_vocabulary,
    context_length,
    find_structure,
    is_quantised,
    split_call,
    stopped_at,
)
from stride_cli.models.length_kinds import length_kinds
from stride_cli.models.linear_layers import (
    AdapterMatrices,
    LayerVisitor,
    LinearLayers,
    check_layer,
    find_linear_layers,
    visiting,
)
from stride_cli.models.spec import ModelSpec

_CALLS_KEPT = 64  # lengths that keep what blocks are called with (rotary tables; masks of sliding windows)
_GENERATED_TOGETHER = 4096  # tokens whose keys and values are held
_PROBE_LENGTH = 12


class CausalLM:
    """A frozen causal language model that can be entered and left at any layer.

    Batches are right-padded and no attention mask is passed: with causal attention, what stands to the right
    of a token cannot change it, so padding positions only have to be left unscored. Where positions depend on
    a batch's length, sequences of one of `length_kinds` share a batch.

    Parameters
    ----------
    model : any `AutoModelForCausalLM`      is switched to eval mode, its parameters to requires_grad False
    tokenizer : optional                    left out only where token ids come from elsewhere
    spec : ModelSpec, optional              where the checkpoint was loaded from, and how

    Raises ModelError: the model is not causal, has no stack of blocks, or its parts do not add up to its own
    forward pass.
    """

    kind: Kind = "language"
    table = None  # its inputs are its tokens
    classes: Sequence[str] = ()
    capture_layers = ("mlp", "body")  # as in the paper's runs; fused experts are no linear layers
    all_layers = "body"
    pools = ("mean", "scored")

    def __init__(self, model: Any, tokenizer: Any = None, *, spec: ModelSpec | None = None) -> None:
        self.model = model
        self.spec = spec or ModelSpec()
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._calls: OrderedDict[int, list[BlockCall]] = OrderedDict()
        self._own = threading.local()  # calls of the blocks for the tokens of this thread's last pass
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.name: str = type(model).__name__
        self.length_kinds = length_kinds(model)
        self._structure = found = find_structure(model, self.device)
        self.blocks, self.head, self.n_layers = found.blocks, found.head, len(found.blocks)
        self.d_model = found.d_model
        self.vocab_size = 0  # set by the probe: the width of the logits
        self.reads_tokens = False  # as well: blocks take more of the tokens than the hidden state
        self._check_parts()
        if tokenizer is not None:
            check_vocabulary(tokenizer, self.vocab_size)

    # What it is

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ModelError("this model has no tokenizer", fix="pass one to CausalLM(model, tokenizer)")
        return self._tokenizer

    @property
    def path(self) -> str | None:
        return self.spec.place

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def context_length(self) -> int:
        """Longest sequence the model has positions for, in tokens."""
        return context_length(self.model)

    @property
    def device(self) -> torch.device:
        # a streamed block that does not run has no numbers anywhere
        return next(each.device for each in self.model.parameters() if not each.is_meta)

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())

    @property
    def _n_tokens(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def fingerprint(self) -> str:
        return state_fingerprint(self.model) if self.path is None else files_fingerprint(self.spec)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def pretrained(self) -> bool:
        """True unless its directory says that it was fine-tuned."""
        return not was_finetuned(self.path)

    def default_space(self, fit: str) -> str:
        """See `AttributableModel`."""
        if fit != "closed":
            return "residual"
        if self.adapter_matrices("all") is not None:
            return "linear-matrix"  # all that training has moved
        finetuned = "linear" if is_small(self.n_layers, self.d_model) else "output"
        parts = "residual" if not self.linear_layers("mlp") else "mlp" if self.pretrained else finetuned
        return f"{parts}-matrix+logit+token-logit+pair-logit"

    def share_inputs(self, other: Any) -> None:
        """Nothing: inputs are tokens."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a generation."""
        sources = (
            getattr(self.model, "generation_config", None),
            self.model.config.get_text_config(),
            self._tokenizer,
        )
        ends: set[int] = set()
        for end in (getattr(source, "eos_token_id", None) for source in sources):
            ends.update(end if isinstance(end, list | tuple) else [] if end is None else [end])
        return frozenset(ends)

    # Running it

    def hidden(self, ids: Tensor, layer: int) -> Tensor:
        """Residual stream (B, T, d_model) of right-padded ids (B, T) int64 after `layer` blocks, which alone
        are run: 0 is what the first block reads, n_layers what the last gives, before the final norm."""
        check_layer(layer, self.n_layers)
        self._check_ids(ids)
        after = layer == self.n_layers  # what the last block gives
        with self._lock:
            if not self.reads_tokens or after:
                return stopped_at(self.blocks[layer - after], lambda: self._forward(ids), after=after)
            # later blocks are passed through: their calls are of these tokens, and of earlier blocks
            calls: list[BlockCall] = []
            with self._blocks_passed_through(calls, layer) as entered:
                stopped_at(self.head, lambda: self._forward(ids))
        known = getattr(self._own, "ids", None)
        if known is None or not torch.equal(known, ids):
            self._own.ids, self._own.calls = ids.clone(), {}
        self._own.calls[layer], self._own.going_on = calls, None
        return entered[0]

    def _calls_from(self, hidden: Tensor, start: int) -> list[BlockCall]:
        """Calls of blocks `start`… for the tokens that `hidden` was last asked about in this thread.

        `hidden` has their rows, or a multiple, one batch behind the other.
        """
        if not self.reads_tokens:
            return self.prepare(hidden.shape[1])[start:]
        ids, going_on = getattr(self._own, "ids", None), getattr(self._own, "going_on", None)
        if going_on is not None and going_on[0] == start and going_on[1] == hidden.shape[:2]:
            found: list[BlockCall] = going_on[2]
            return found
        if (
            ids is None
            or start not in self._own.calls
            or hidden.shape[1] != ids.shape[1]
            or len(hidden) % len(ids)
        ):
            raise ModelError(
                f"{self.name}: its blocks read the tokens too, and are continued from states alone",
                fix="fit operators with --fit closed, and measure linearly",
            )
        return repeated(self._own.calls[start], len(ids), len(hidden) // len(ids))

    def continue_from(self, hidden: Tensor, layer: int) -> Tensor:
        """Blocks `layer`…end and the final norm, from `hidden(ids, layer)`, steered or not, to what the head
        reads: (B, T, d_model) both.

        Differentiable in `hidden`. Safe under `torch.func` transforms once `prepare(T)` has been called;
        forward mode needs PyTorch's plain attention, `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
        """
        hidden = self.advance(hidden, layer, self.n_layers)
        for module in self._structure.tail:
            hidden = module(hidden)
        return hidden

    def advance(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Blocks `start` … `stop` − 1: the residual stream (B, T, d_model) after `stop` blocks."""
        check_layer(start, self.n_layers)
        check_layer(stop, self.n_layers)
        calls = self._calls_from(hidden, start) if start < stop else []
        for block, call in zip(self.blocks[start:stop], calls, strict=False):
            output = block(hidden, *call.args, **call.kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        if self.reads_tokens:
            self._own.going_on = stop, hidden.shape[:2], calls[stop - start :]
        return hidden

    @cached_property
    def _found_layers(self) -> LinearLayers:
        def run() -> None:
            # inference tensors do not count their changes
            with self._lock, torch.inference_mode(False), torch.no_grad():
                stopped_at(
                    self.head,
                    lambda: self._forward(torch.zeros((1, 1), dtype=torch.int64, device=self.device)),
                )

        return find_linear_layers(self.blocks, self.d_model, run)

    @cached_property
    def _adapted(self) -> Mapping[nn.Module, AdapterMatrices | None]:
        """Layers that an adapter is on, and what it adds to each (None: unknown, or merged by now)."""
        modules, merged = dict(self.model.named_modules(remove_duplicate=False)), self._merged
        own = getattr(self.model, "adapted_layers", dict.fromkeys((merged and merged.lora_layers) or ()))
        return {modules[name]: added for name, added in own.items() if name in modules}

    @cached_property
    def _merged(self) -> Recipe | None:
        """The recipe of a training whose low-rank matrices are in the weights."""
        found = None if self.path is None else read_recipe(self.path)
        return found if found and found.lora_rank and not hasattr(self.model, "adapted_layers") else None

    @cached_property
    def _beyond(self) -> bool:
        """True where an adapter's layers in the blocks are more than linear ones (routers, fused experts), or
        none: training moved what no low-rank change of linear layers tells."""
        inside = self._adapted.keys() & set(self.blocks.modules())
        return bool(self._adapted) and not (inside and inside <= set(self._found_layers.all))

    @cached_property
    def _linear_layers(self) -> LinearLayers:
        found = self._found_layers
        if not self._adapted or self._beyond:
            return found
        return replace(found, all=[layer for layer in found.all if layer in self._adapted])

    @cached_property
    def _adapter_matrices(self) -> Mapping[nn.Module, AdapterMatrices]:
        if self._merged is not None:
            return {} if self._beyond else trained_matrices(self.model, self._merged)
        known = {layer: added for layer, added in self._adapted.items() if added is not None}
        return {} if self._beyond else known

    def remarks(self, spaces: Sequence[str]) -> list[str]:
        """See `AttributableModel`."""
        inside = {"mlp-matrix", "output-matrix", "linear-matrix"} & set(spaces)
        left = self._found_layers.left_out if inside else {}
        said = [f"left out of the operators: {name} ({why})" for name, why in left.items()]
        names = {module: name for name, module in self.model.named_modules()}
        if self._beyond:
            others = self._adapted.keys() - set(self._found_layers.all)
            last = sorted({names[each].rsplit(".", 1)[-1] for each in others})
            said.append(
                f"the adapter is also on {', '.join(last)}, no linear layer of a block: attributed as if "
                "all weights had been trained"
            )
        return said

    def adapter_matrices(self, which: str) -> list[AdapterMatrices] | None:
        """See `AttributableModel`."""
        layers, known = self.linear_layers(which), self._adapter_matrices
        if not layers or any(layer not in known for layer in layers):
            return None
        return [known[layer] for layer in layers]

    def linear_layers(self, which: str) -> list[nn.Module]:
        """Return some of `LinearLayers`; of all layers of a model with an adapter, those that it is on."""
        return list(getattr(self._linear_layers, which))

    @contextmanager
    def at_layers(self, which: str, length: int, visit: LayerVisitor) -> Iterator[None]:
        """Within: `visit(number, inputs, outputs)` is called after each of `linear_layers` in this thread,
        with (B, T, in) and (B, T, out) in the autograd graph; T is `length`. What it returns, if anything,
        takes the place of the outputs."""
        self.prepare(length)  # runs the model's own forward pass
        with visiting(self._linear_layers, which, length, visit):
            yield

    def logits(self, final: Tensor) -> Tensor:
        """The output head, with the model's own scaling and soft-capping: (…, d_model) → (…, vocab_size)."""
        return head_logits(self.model, final)

    def uncapped_logits(self, final: Tensor, tokens: Tensor | None = None) -> Tensor:
        """As `logits`, before the model's soft cap: where logit spaces act.

        `tokens` (…, m) int64 selects m of the vocabulary at each position; gives (…, m).
        """
        return uncapped_logits(self.model, final, tokens)

    def token_losses(self, final: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of targets (B, T) at final (B, T, d): (B, T) fp32 nats; differentiable once.

        Where the head is a plain product, not all logits are held at once.
        """
        if (weight := plain_head(self.model)) is not None:
            flat = final.reshape(-1, final.shape[-1])
            losses = token_losses(flat, weight, targets.flatten(), soft_cap=logit_cap(self.model))
        else:
            logits = self.logits(final).float().flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.reshape(targets.shape)

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Cap logits softly as `logits` does; the same where the model has no cap."""
        return soft_cap(self.model, logits)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the soft cap at capped logits, without a graph; None where there is no cap."""
        cap = logit_cap(self.model)
        if cap is None:
            return None
        # 1 − (z / c)², in one pass
        return torch.addcmul(logits.new_ones(()), logits.detach(), logits.detach(), value=-1 / cap**2)

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation of one prompt; see `generate_together`."""
        return self.generate_together([prompt_ids], max_new_tokens)[0]

    def generate_each(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> list[list[int] | QueryError | NumericalError]:
        """Greedy continuations of prompts of any lengths, each as if alone; for a failure its error.

        Those of about one length are continued together in float32: in half precision rounding changes them.
        """
        waiting: list[list[int]] = []
        for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
            group, length = waiting[-1] if waiting else [], len(prompts[number]) + max_new_tokens
            near = bool(group) and length <= len(prompts[group[0]]) + 2 * max_new_tokens
            full = length * (len(group) + 1) > _GENERATED_TOGETHER
            if not near or full or self.dtype != torch.float32:
                waiting.append([])
            waiting[-1].append(number)
        found: dict[int, list[int] | QueryError | NumericalError] = {}
        while waiting:
            group = waiting.pop()
            try:
                written = self.generate_together([prompts[number] for number in group], max_new_tokens)
                found.update(zip(group, written, strict=True))
            except (QueryError, NumericalError) as error:
                if len(group) == 1:
                    found[group[0]] = error
                else:  # the others are not to suffer for it
                    waiting += [[number] for number in group]
        return [found[number] for number in range(len(prompts))]

    @torch.no_grad()
    def generate_together(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily: each to before an end-of-sequence token, `max_new_tokens`, or the end
        of the context.

        All are read to the end of the shortest, and go on token by token, a longer one with its own: nothing
        is padded. QueryError where there is no prompt or no room; NumericalError where a logit is not finite.
        """
        lengths, most = [len(prompt) for prompt in prompts], self.context_length
        if not min(lengths):
            raise QueryError("the prompt has no token", fix="give at least one word")
        if max(lengths) >= most:
            found = f"the prompt has {max(lengths)} tokens, the model's context is {most}"
            raise QueryError(found, fix=f"shorten it to fewer than {most} tokens")
        ends = torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=self.device)
        room = [min(length + max_new_tokens, most) for length in lengths]
        ids = torch.full((len(prompts), max(room)), -1, dtype=torch.int64)  # −1: no token yet
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ids, limit = ids.to(self.device), torch.tensor(room, device=self.device)
        # transformers 5.24 renamed it, and warns of the old name
        kept = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        cache, begin = None, 0  # the tokens before are in the cache
        writes = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        for at in range(min(lengths), max(room)):
            if begin and not self._share_a_batch(at - 1, at):
                cache, begin = None, 0
            new = ids[:, begin:at].clamp(min=0)
            output = self.model(input_ids=new, use_cache=True, logits_to_keep=1, **{kept: cache})
            last = output.logits[:, -1]
            if not bool(torch.isfinite(last).all()):
                raise NumericalError(
                    f"a logit after {at} tokens is not finite",
                    fix="load the model with --dtype fp32, or check its weights",
                )
            token, free = last.argmax(dim=-1), ids[:, at] < 0
            writes &= ~(free & (torch.isin(token, ends) | (at >= limit)))
            if not bool(writes.any()):
                break
            ids[:, at] = torch.where(free & writes, token, ids[:, at])
            cache, begin = output[kept], at
        rows = zip(ids.tolist(), lengths, strict=True)
        return [[token for token in row[length:] if token >= 0] for row, length in rows]

    def prepare(self, length: int) -> list[BlockCall]:
        """Capture the arguments of the blocks at a sequence length, once, from the model's own forward pass.

        The blocks themselves are passed through meanwhile, so this costs an embedding of one sequence.
        """
        with self._lock:
            if length in self._calls:
                self._calls.move_to_end(length)
                return self._calls[length]
            calls = self._captured(torch.zeros((1, length), dtype=torch.int64, device=self.device))
            self._calls[length] = calls
            while len(self._calls) > _CALLS_KEPT:
                self._calls.popitem(last=False)
            return calls

    def _captured(self, ids: Tensor) -> list[BlockCall]:
        calls: list[BlockCall] = []
        # inference tensors could not take part in a later backward pass
        with torch.inference_mode(False), torch.no_grad(), self._blocks_passed_through(calls):
            stopped_at(self.head, lambda: self._forward(ids))
        return calls

    def _forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False)

    @contextmanager
    def _blocks_passed_through(self, calls: list[BlockCall], first: int = 0) -> Iterator[list[Tensor]]:
        """Within: blocks from the first on return their input, and what they are called with is recorded in
        `calls`; gives a list, which will hold their inputs."""
        me = threading.get_ident()
        entered: list[Tensor] = []

        def pass_through(forward: Callable[..., Any], as_tuple: bool) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != me:  # another thread is running the real model meanwhile
                    return forward(*args, **kwargs)
                hidden, rest, keywords = split_call(args, kwargs)
                calls.append(BlockCall(rest, keywords))
                entered.append(hidden)
                return (hidden,) if as_tuple else hidden

            return wrapped

        blocks = list(self.blocks)[first:]
        shadowed = [block.__dict__.get("forward") for block in blocks]
        for block, as_tuple in zip(blocks, self._structure.tuple_output[first:], strict=True):
            block.forward = pass_through(block.forward, as_tuple)
        try:
            yield entered
        finally:
            for block, before in zip(blocks, shadowed, strict=True):
                if before is None:
                    del block.forward
                else:
                    block.forward = before

    def _share_a_batch(self, length: int, other: int) -> bool:
        return self.length_kinds is None or len(set(self.length_kinds([length, other]))) == 1

    def _apart(self, wanted: Tensor, found: Tensor) -> bool:
        """True where logits differ by more than rounding."""
        # weights in four or eight bits are multiplied in what their library sees fit, for few rows otherwise
        exact = wanted.dtype == torch.float32 and not is_quantised(self.model)
        scale = wanted.abs().max().clamp_min(1e-6)
        return not bool((found - wanted).abs().max() <= scale * (1e-4 if exact else 5e-2))

    @torch.no_grad()
    def _check_parts(self) -> None:
        """Compare the parts with the whole on a probe; check that later tokens change nothing before."""
        length = min(_PROBE_LENGTH, self.context_length)
        ids = (torch.arange(2 * length, device=self.device) * 7 % self._n_tokens).view(2, length)
        whole = self._forward(ids).logits
        self.vocab_size = int(whole.shape[-1])
        if not torch.isfinite(whole).all():
            raise ModelError(
                f"{self.name}: the logits of a probe are not finite",
                fix="the weights are damaged, or the dtype cannot hold them: try --dtype fp32",
            )
        short = length // 2 if self._share_a_batch(length // 2, length) else length
        if self._apart(whole[:, :short], self._forward(ids[:, :short]).logits):
            raise ModelError(
                f"{self.name} is not causal: later tokens change earlier predictions",
                fix="give a decoder-only language model",
            )
        self.reads_tokens = read_tokens(self._captured(ids[:1]), self._captured(ids[1:]))
        middle = self.n_layers // 2
        hidden = self.hidden(ids, middle)
        try:
            parts = self.logits(self.continue_from(hidden, middle))
        except (RuntimeError, TypeError, ValueError) as error:
            # e.g. Bloom: its position biases are laid out for one batch size
            raise ModelError(
                f"{self.name}: blocks cannot be continued with another batch size: {first_line(error)}",
                fix="use another architecture: Llama, Qwen, OLMo, GPT-2, GPT-NeoX, NanoChat and others work",
            ) from error
        if parts.shape != whole.shape or self._apart(whole, parts):
            raise ModelError(
                f"{self.name}: continuing from layer {middle} does not give the model's own logits",
                fix="this architecture does more than run blocks, a norm and a head: please report it",
            )

    @torch.no_grad()
    def check_padding(self, length: int) -> None:
        """See `AttributableModel`."""
        length = min(length, self.context_length)
        places = torch.arange(length, device=self.device)
        ids = places[None] * 7 % self._n_tokens
        for short in (max(2, length // 2), min(_PROBE_LENGTH, length)):
            if not self._share_a_batch(short, length):
                continue
            alone, padded = (
                self.logits(self.continue_from(self.hidden(each, 0), 0)[:, :short])
                for each in (ids[:, :short], ids * (places < short))
            )
            if self._apart(alone, padded):
                raise ModelError(
                    f"{self.name}: padded from {short} to {length} tokens, a sequence has other logits",
                    fix=f"build the index with --block-size {short}, and please report the architecture",
                )

    def _check_ids(self, ids: Tensor) -> None:
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids must have shape (B, T) with T ≥ 1, not {tuple(ids.shape)}")
        if ids.shape[1] > self.context_length:
            raise QueryError(
                f"a sequence has {ids.shape[1]} tokens, the model's context is {self.context_length}",
                fix=f"use blocks of at most {self.context_length} tokens",
            )

    def __repr__(self) -> str:
        where = f" from {Path(self.path).name}" if self.path else ""
        size = f"{self.n_layers} layers × {self.d_model}, vocabulary {self.vocab_size}"
        return f"<CausalLM {self.name}{where}: {size}>"
