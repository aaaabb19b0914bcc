"""Models of NanoChat's architecture, in a size that fits the corpus."""

from __future__ import annotations

import math
from typing import Any

import torch

from stride_cli.errors import UsageError
from stride_cli.models.language.language_recipe import Architecture

DEFAULT_CONTEXT = 512
_HEAD_WIDTH = 64


def choose_architecture(
    n_bytes: int,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    context: int | None = None,
) -> Architecture:
    """Fill in what was not asked for, from the size of the corpus.

    Parameters
    ----------
    n_bytes : int
        UTF-8 bytes of text: up to 1 MB of it gets 4 layers of width 128 (about 1 million parameters), up to 4
        MB 5 of 192, more 6 of 256 (about 9 million with the largest vocabulary). The vocabulary grows with
        the square root of the corpus, in powers of two: 512 (below 30 kB), 1024 (60 kB) … 8192 (2 MB and
        more).
    """
    small_layers, small_width = (
        (4, 128) if n_bytes <= 1_000_000 else (5, 192) if n_bytes <= 4_000_000 else (6, 256)
    )
    width = small_width if width is None else width
    heads = max(1, width // _HEAD_WIDTH) if heads is None else heads
    if vocab is None:
        wanted = 1024 * math.sqrt(max(n_bytes, 1) / 60_000)
        vocab = 2 ** min(13, max(9, round(math.log2(wanted))))
    architecture = Architecture(
        layers=small_layers if layers is None else layers,
        width=width,
        heads=heads,
        vocab=vocab,
        context=DEFAULT_CONTEXT if context is None else context,
    )
    check_architecture(architecture)
    return architecture


def check_architecture(architecture: Architecture) -> None:
    """UsageError for a size that cannot be built."""
    if architecture.width % architecture.heads or (architecture.width // architecture.heads) % 2:
        raise UsageError(
            f"--width {architecture.width} does not split into {architecture.heads} heads of an even width",
            fix=f"give a width that is a multiple of {2 * architecture.heads}, or other --heads",
        )


def build_model(architecture: Architecture, *, seed: int) -> Any:
    """A NanoChatForCausalLM with initial weights; the same for the same seed, whatever was drawn before."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    config = NanoChatConfig(
        vocab_size=architecture.vocab,
        hidden_size=architecture.width,
        intermediate_size=4 * architecture.width,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.heads,
        max_position_embeddings=architecture.context,
        bos_token_id=0,
        eos_token_id=3,  # <|end|>
        # the embedding of a padding token would stay at zero; batches are padded with what nobody reads
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NanoChatForCausalLM(config)
