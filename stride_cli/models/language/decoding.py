"""Greedy continuations by our own NanoChat, token by token, without torch between two tokens.

A small model reads its weights in a tenth of a millisecond, and torch takes two for the sixty operations of a
step. Here a block is one compiled call. Sums are taken in another order than torch takes them, so numbers
differ in the last digits; a token counts only where the likeliest one is ahead by more than that can be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from stride_cli.models.language.own_nanochat import NanoChatForCausalLM

_MARGIN = 1e-3  # of logits, whose rounding errors are a hundredth of that
_MOST_NUMBERS = 1 << 24  # of a model's weights; a larger one's take longer to read than torch to be called


def decodes(model: Any) -> bool:
    """Whether `decode` can go on from what this model has read: our own NanoChat, in float32, in memory."""
    if not isinstance(model, NanoChatForCausalLM):
        return False
    weights = list(model.parameters())
    return (
        all(each.dtype == torch.float32 and each.device.type == "cpu" for each in weights)
        and all(each.is_contiguous() for each in weights)
        and sum(each.numel() for each in weights) <= _MOST_NUMBERS
    )


@torch.no_grad()
def decode(
    model: NanoChatForCausalLM, prompts: Sequence[Sequence[int]], counts: Sequence[int], ends: Collection[int]
) -> list[list[int] | None]:
    """Greedy continuations of prompts of any lengths, each as if it were alone.

    Parameters
    ----------
    model : of `decodes`
    prompts : token ids, one or more each
    counts : most tokens to write after each
    ends : tokens that end one, and are not part of it

    Returns
    -------
    list of token ids; None where two tokens are too close to each other to tell which torch would take, or a
    logit is not finite
    """
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
    # what stands to the right of a token does not change it: padding is read, and never looked at
    cache: list[Any] = [None] * len(model.model.layers)
    final = model.model(ids, cache).numpy()  # (B, T, d)
    decoder = _Decoder(model)
    found: list[list[int] | None] = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        read = [(keys[row, :, :length].numpy(), values[row, :, :length].numpy()) for keys, values in cache]
        found.append(decoder.continued(final[row, length - 1], read, count, ends))
    return found


class _Decoder:
    """A model's weights, as arrays in torch's own memory, and what positions are turned by."""

    def __init__(self, model: NanoChatForCausalLM) -> None:
        config: Any = model.config
        blocks: Any = model.model.layers
        self._blocks = [
            tuple(
                layer.weight.numpy()
                for layer in (
                    block.self_attn.q_proj,
                    block.self_attn.k_proj,
                    block.self_attn.v_proj,
                    block.self_attn.o_proj,
                    block.mlp.fc1,
                    block.mlp.fc2,
                )
            )
            for block in blocks
        ]
        self._embedding = model.model.embed_tokens.weight.numpy()
        self._head = model.lm_head.weight.numpy()
        self._frequencies = model.model.rotary_emb.inv_freq.numpy()
        self._eps = np.float32(config.rms_norm_eps)
        cap = config.final_logit_softcapping
        self._cap = np.float32(0 if cap is None else cap)

    def continued(
        self,
        final: np.ndarray,
        read: Sequence[tuple[np.ndarray, np.ndarray]],
        count: int,
        ends: Collection[int],
    ) -> list[int] | None:
        """See `decode`, of one prompt.

        Parameters
        ----------
        final : (d,) float32      what the head reads at its last token
        read : of each block its keys and values, (H, T, d / H) float32
        """
        from stride_cli.models.language.decoding_kernels import block_step, likeliest, normed

        heads, length, width = read[0][0].shape
        caches = []
        for parts in read:
            room = np.zeros((2, heads, length + count, width), np.float32)
            room[:, :, :length] = parts
            caches.append(room)
        written: list[int] = []
        state = np.array(final, np.float32)
        while len(written) < count:
            token, margin = likeliest(self._head, state, self._cap)
            if not margin > _MARGIN:
                return None
            if token in ends:
                break
            written.append(token)
            if len(written) == count:
                break
            place = length + len(written) - 1
            angles = np.float32(place) * self._frequencies
            cos, sin = np.cos(angles), np.sin(angles)
            state = normed(self._embedding[token], self._eps)
            for weights, (keys, values) in zip(self._blocks, caches, strict=True):
                block_step(state, weights, (keys, values), (cos, sin), place, self._eps)
            state = normed(state, self._eps)
        return written
