"""The parts of a causal language model, found by watching one forward pass instead of by class name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError, first_line
from stride_cli.models.configuration import CONTEXT_NAMES, first_positive


@dataclass(frozen=True)
class Structure:
    blocks: nn.ModuleList
    tail: tuple[nn.Module, ...]  # run between the last block and the head, in order
    head: nn.Module
    tuple_output: tuple[bool, ...]  # per block: does it return a tuple whose first item is the hidden state
    d_model: int


def block_stack(model: Any) -> nn.ModuleList:
    """The decoder blocks of a causal language model, found by structure; ModelError where there are none."""
    return find_structure(model, next(model.parameters()).device).blocks


def largest_stack(model: nn.Module) -> nn.ModuleList:
    """The module list with the most parameters that is no part of another one; no pass is made.

    Raises ModelError: there is none.
    """
    return _largest(list(_outermost_stacks(model)), f"{type(model).__name__}: no stack of blocks")


def _largest(stacks: list[nn.ModuleList], none: str) -> nn.ModuleList:
    if not stacks:
        raise ModelError(
            none, fix="give a decoder-only transformer (Llama, Qwen2, OLMo-2, GPT-2, GPT-NeoX, NanoChat, …)"
        )
    return max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))


def is_quantised(model: Any) -> bool:
    """True where a model of transformers keeps weights in few bits; unpacked ones are plain."""
    return bool(getattr(model, "is_quantized", False))


def context_length(model: Any) -> int:
    """Longest sequence a transformers model has positions for, in tokens; 2,048 where it does not say."""
    return first_positive(model.config.get_text_config(), CONTEXT_NAMES) or 2048


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """ModelError when a tokenizer has ids that the model has no row for, which were not added to it.

    One that was added and never used (to pad) is refused where a text has it.
    """
    added = sum(token >= vocab_size for token in getattr(tokenizer, "added_tokens_decoder", {}))
    if len(tokenizer) - added > vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}",
            fix="they do not belong together: give the tokenizer that the model was trained with",
        )


def find_structure(model: Any, device: torch.device) -> Structure:
    """Watch one short forward pass and read off which modules do what."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder", fix="give a decoder-only language model")
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{name} has no output head", fix="give a causal language model (AutoModelForCausalLM)"
        )
    order: list[nn.Module] = []  # modules in the order in which they were entered
    outputs: dict[nn.Module, Any] = {}
    inputs: dict[nn.Module, Any] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        order.append(module)
        inputs[module] = (args, kwargs)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = output

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False)
    except Exception as error:
        raise ModelError(
            f"{name} does not run on token ids alone: {first_line(error)}",
            fix="give a decoder-only language model, on a device that computes (--device cpu)",
        ) from error
    finally:
        for handle in handles:
            handle.remove()

    def runs_in_order(stack: nn.ModuleList) -> bool:
        places = [order.index(block) if order.count(block) == 1 else -1 for block in stack]
        return min(places) >= 0 and places == sorted(places)

    ordered = [stack for stack in _outermost_stacks(model) if len(stack) and runs_in_order(stack)]
    none = f"{name}: no stack of blocks that run one after the other before an output head"
    blocks = _largest(ordered if head in outputs else [], none)
    last, first_head = order.index(blocks[-1]), order.index(head)
    within = set(blocks[-1].modules())
    after = [index for index in range(last + 1, first_head) if order[index] not in within]
    # of nested modules only the outermost: it runs the others itself
    tail: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for index in after:
        if order[index] not in covered:
            tail.append(order[index])
            covered.update(order[index].modules())
    try:
        hidden = split_call(*inputs[blocks[0]])[0]
        d_model = int(hidden.shape[-1])
    except (IndexError, AttributeError) as error:
        raise ModelError(
            f"{name}: its blocks do not take a hidden state as their first argument",
            fix="give a decoder-only language model",
        ) from error
    as_tuple = tuple(isinstance(outputs[block], tuple) for block in blocks)
    return Structure(blocks, tuple(tail), head, as_tuple, d_model)


def _outermost_stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Module lists that are not part of another one (lists of experts lie within a block)."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_stacks(child)


def split_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden state of a block's call, and the rest of the call."""
    if args:
        return args[0], args[1:], dict(kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


class _Stopped(Exception):
    """Ends a forward pass as soon as what was wanted from it is there."""


def stopped_at(module: nn.Module, run: Callable[[], Any], *, after: bool = False) -> Tensor:
    """The hidden state that a module reads (or, `after`, gives) when `run` calls it in this thread; there the
    pass ends."""
    me = threading.get_ident()

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if threading.get_ident() == me:
            given = output[0] if isinstance(output, tuple) else output
            raise _Stopped(given if after else split_call(args, kwargs)[0])

    hook: Any = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = hook(stop, with_kwargs=True)
    try:
        run()
    except _Stopped as stopped:
        found: Tensor = stopped.args[0]
        return found
    finally:
        handle.remove()
    raise ModelError(f"{type(module).__name__} does not run", fix="give a decoder-only language model")
