"""Checkpoints that `stride model train` wrote, run and trained again without transformers' modelling code.

Importing that takes longer than all else that one query does, or one worker that trains small models. A plain
NanoChat is little: the modules here have the names, the weights and the arithmetic of
`transformers.NanoChatForCausalLM`, operation by operation, so that answers are the same to the last bit. What
is not of that kind, `load_own` leaves to transformers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stride_cli.errors import UsageError
from stride_cli.models.configuration import own_config, read_object
from stride_cli.models.language.files import Source
from stride_cli.models.language.language_recipe import Architecture

# of NanoChatConfig, where `nanochat.build_model` asks for nothing else
RMS_EPS, LOGIT_CAP, ROPE_THETA = 1e-6, 15.0, 10000.0
_INITIAL_STD = 0.02


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Without memory, for weights that are loaded."""
    return nn.Linear(inputs, outputs, bias=False, device="meta")


class RMSNorm(nn.Module):
    """x / √(mean x² + ε), in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class Rotary(nn.Module):
    """cos and sin of positions' angles, (1, T, head width) each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size // config.num_attention_heads
        base = config.rope_parameters["rope_theta"]
        inverse = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(dtype=x.dtype), both.sin().to(dtype=x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin)


class Attention(nn.Module):
    """Causal attention with rotary positions, queries and keys normed after these."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.number, self.head_dim = number, width // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (_linear(width, width) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(config.rms_norm_eps), RMSNorm(config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: list[Any] | None
    ) -> Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (
            layer(hidden).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query = self.q_norm(_rotated(query, cos, sin))
        key = self.k_norm(_rotated(key, cos, sin))
        if cache is not None:
            if (before := cache[self.number]) is not None:
                key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
            cache[self.number] = key, value
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=self.head_dim**-0.5
        )
        joined = attended.transpose(1, 2).contiguous().reshape(*hidden.shape[:-1], -1)
        found: Tensor = self.o_proj(joined)
        return found


class ReLUSquared(nn.Module):
    """relu(x)²."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class FeedForward(nn.Module):
    """fc2 relu(fc1 x)²."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.activation_fn = ReLUSquared()
        self.fc1 = _linear(config.hidden_size, config.intermediate_size)
        self.fc2 = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.fc2(self.activation_fn(self.fc1(hidden)))
        return found


class Block(nn.Module):
    """Attention and the feed-forward part, each added to the stream."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, number), FeedForward(config)
        self.input_layernorm = RMSNorm(config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: list[Any] | None = None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, cache)
        hidden_states = hidden_states + attended
        found: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return found


class Body(nn.Module):
    """The embedding, the blocks, the norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # given, not drawn: to draw normal numbers without memory, torch imports its compiler
        table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.rms_norm_eps)
        self.rotary_emb = Rotary(config)

    def forward(self, input_ids: Tensor, cache: list[Any] | None) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        past = 0 if cache is None or cache[0] is None else cache[0][0].shape[2]
        positions = torch.arange(hidden.shape[1], device=hidden.device) + past
        turned = self.rotary_emb(hidden, position_ids=positions.unsqueeze(0))
        hidden = self.norm(hidden)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=turned, cache=cache)
        found: Tensor = self.norm(hidden)
        return found


class Output(dict[str, Any]):
    """``logits`` and ``cache``, by name and as attributes."""

    def __init__(self, logits: Tensor, cache: list[Any] | None) -> None:
        super().__init__(logits=logits, cache=cache)
        self.logits, self.cache = logits, cache


class Settings(SimpleNamespace):
    """The values of a file of settings, as attributes."""

    def get_text_config(self) -> Settings:
        return self


class NanoChatForCausalLM(nn.Module):
    """A NanoChat, as CausalLM takes one, of its config.json and generation_config.json; `load_own` gives it
    weights."""

    def __init__(self, config: dict[str, Any], generation: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.generation_config = Settings(**config), Settings(**generation)
        self.model = Body(self.config)
        self.lm_head = _linear(self.config.hidden_size, self.config.vocab_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        cache: list[Any] | None = None,
    ) -> Output:
        """Logits (B, T, V) of the last `logits_to_keep` positions, or of all, of ids (B, T) without padding.

        `cache` is that of the tokens before; with `use_cache`, one of all that was read is given.
        """
        if use_cache and cache is None:
            cache = [None] * len(self.model.layers)
        hidden = self.model(input_ids, cache)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return Output(logits, cache)


def load_own(source: Source, dtype: torch.dtype) -> NanoChatForCausalLM | None:
    """A plain checkpoint's model; None of any other, damaged ones too: transformers loads it, or says what is
    wrong with it."""
    directory = source.directory
    config = None if source.gguf is not None else own_config(directory)
    if config is None:
        return None
    generation = read_object(directory / "generation_config.json") or {}
    try:
        from safetensors.torch import load_file

        model = NanoChatForCausalLM(config, generation)
        # copies, which stay what they are when the file is written anew
        found = load_file(directory / "model.safetensors")
        own = {name: value.to(dtype, copy=True) for name, value in found.items()}
        model.load_state_dict(own, strict=True, assign=True)
    except Exception:
        return None
    return model


def new_own(architecture: Architecture, *, seed: int) -> NanoChatForCausalLM:
    """The model that `nanochat.build_model` makes of the same, with its initial weights to the last bit."""
    rotary = {"rope_type": "default", "rope_theta": ROPE_THETA}
    fixed = {"rms_norm_eps": RMS_EPS, "final_logit_softcapping": LOGIT_CAP, "rope_parameters": rotary}
    model = NanoChatForCausalLM(_sizes(architecture) | fixed, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.load_state_dict(_drawn(model), strict=True, assign=True)
    return model


def _sizes(architecture: Architecture) -> dict[str, Any]:
    """Settings of config.json that an architecture decides, and the tokens that begin and end a text."""
    return {
        "vocab_size": architecture.vocab,
        "hidden_size": architecture.width,
        "intermediate_size": 4 * architecture.width,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "max_position_embeddings": architecture.context,
        "bos_token_id": 0,
        "eos_token_id": 3,  # <|end|>
    }


@torch.no_grad()
def _drawn(model: NanoChatForCausalLM) -> dict[str, Tensor]:
    """Initial weights by name, drawn in the order in which transformers draws them: torch's own when a layer
    is made, then those that stay, of the body before the head."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    body = [name for name in shapes if name.startswith("model.")]
    found: dict[str, Tensor] = {}
    for names in (body, [name for name in shapes if name not in body]):
        for name in names:
            found[name] = torch.empty(shapes[name])
            if "embed_tokens" in name:
                nn.init.normal_(found[name])
            else:
                nn.init.kaiming_uniform_(found[name], a=math.sqrt(5))
        for name in names:
            nn.init.normal_(found[name], std=_INITIAL_STD)
            if "o_proj" in name:  # a second time, for its block
                nn.init.normal_(found[name], std=_INITIAL_STD / math.sqrt(2 * len(model.model.layers)))
    return found


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
    """Fill in what was not asked for, from the size of the corpus: `n_bytes` of UTF-8.

    Up to 1 MB gets 4 layers of width 128 (about 1 million parameters), up to 4 MB 5 of 192, more 6 of 256
    (about 9 million with the largest vocabulary). The vocabulary grows with the square root of the corpus, in
    powers of two: 512 (below 30 kB), 1024 (60 kB) … 8192 (2 MB and more).

    Raises UsageError: a width that the heads do not split evenly.
    """
    small_layers, small_width = (
        (4, 128) if n_bytes <= 1_000_000 else (5, 192) if n_bytes <= 4_000_000 else (6, 256)
    )
    layers = small_layers if layers is None else layers
    width = small_width if width is None else width
    heads = max(1, width // _HEAD_WIDTH) if heads is None else heads
    if width % heads or (width // heads) % 2:
        raise UsageError(
            f"--width {width} does not split into {heads} heads of an even width",
            fix=f"give a width that is a multiple of {2 * heads}, or other --heads",
        )
    if vocab is None:
        wanted = 1024 * math.sqrt(max(n_bytes, 1) / 60_000)
        vocab = 2 ** min(13, max(9, round(math.log2(wanted))))
    context = DEFAULT_CONTEXT if context is None else context
    return Architecture(layers=layers, width=width, heads=heads, vocab=vocab, context=context)


def build_model(architecture: Architecture, *, seed: int) -> Any:
    """A NanoChatForCausalLM with initial weights; the same for the same seed, whatever was drawn before."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    # the embedding of a padding token would stay at zero; batches are padded with what nobody reads
    own = {"num_key_value_heads": architecture.heads, "pad_token_id": None}
    config = NanoChatConfig(**_sizes(architecture), **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NanoChatForCausalLM(config)
