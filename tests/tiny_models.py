"""Tiny models with random weights and a tiny corpus; nothing here is trained for more than moments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCAB = 97
# names of `configurations`: decoders, and those with experts, where a step can move a token to another one
DECODERS = [
    *("Llama", "Qwen2", "Qwen3", "Mistral", "Olmo2", "Phi3", "GPT2", "GPTNeoX", "NanoChat"),
    *("Gemma2", "Gemma3", "Gemma4", "Granite", "Cohere", "OPT", "Falcon"),
]
EXPERTS = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "DeepseekV3", "Llama4"]


def tiny_sizes(**sizes: Any) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,
    )


def configurations() -> dict[str, Callable[[Any], Any]]:
    """Architecture name → tiny configuration, given the transformers module."""
    gqa = tiny_sizes(num_key_value_heads=2)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    gemma_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "Llama": lambda tf: tf.LlamaConfig(**gqa),
        "Qwen2": lambda tf: tf.Qwen2Config(**gqa),
        "Qwen3": lambda tf: tf.Qwen3Config(**gqa, head_dim=8),
        "Phi3": lambda tf: tf.Phi3Config(**gqa, pad_token_id=None),
        "Olmo2": lambda tf: tf.Olmo2Config(**gqa, pad_token_id=None),
        "GPT2": lambda tf: tf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        ),
        "GPTNeoX": lambda tf: tf.GPTNeoXConfig(**tiny_sizes()),
        "NanoChat": lambda tf: tf.NanoChatConfig(**gqa),
        # more: windows (masks of their own), scaled heads, a projection after the norm, tuples, experts
        "Mistral": lambda tf: tf.MistralConfig(**gqa, sliding_window=8),
        "Gemma3": lambda tf: tf.Gemma3TextConfig(
            **gqa, sliding_window=8, head_dim=8, layer_types=gemma_types, pad_token_id=None
        ),
        # inputs of each layer's own from the tokens, and keys and values of an earlier layer in the last
        "Gemma4": lambda tf: tf.Gemma4TextConfig(
            **gqa,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=8,
            head_dim=8,
            global_head_dim=8,
            final_logit_softcapping=30.0,
            pad_token_id=None,
        ),
        "Granite": lambda tf: tf.GraniteConfig(**gqa, logits_scaling=3.0),
        "Cohere": lambda tf: tf.CohereConfig(**gqa, logit_scale=0.25, pad_token_id=None),
        "OPT": lambda tf: tf.OPTConfig(**tiny_sizes(ffn_dim=64, word_embed_proj_dim=16)),
        "Falcon": lambda tf: tf.FalconConfig(**tiny_sizes()),
        "Mixtral": lambda tf: tf.MixtralConfig(**gqa, num_local_experts=3),
        "Qwen2Moe": lambda tf: tf.Qwen2MoeConfig(**gqa, **experts, shared_expert_intermediate_size=16),
        "Qwen3Moe": lambda tf: tf.Qwen3MoeConfig(**gqa, **experts, head_dim=8),
        "GptOss": lambda tf: tf.GptOssConfig(
            **gqa, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=8
        ),
        # its router is an nn.Linear that gives two tensors
        "Llama4": lambda tf: tf.Llama4TextConfig(
            **gqa,
            head_dim=8,
            intermediate_size_mlp=64,
            num_local_experts=3,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=16,
            pad_token_id=None,
        ),
        "DeepseekV3": lambda tf: tf.DeepseekV3Config(
            **tiny_sizes(num_key_value_heads=4),
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        # soft caps on attention and logits, windows, norms on both sides of every part
        "Gemma2": lambda tf: tf.Gemma2Config(
            **gqa, sliding_window=8, head_dim=8, query_pre_attn_scalar=8, pad_token_id=None
        ),
    }


def long_rope_config(vocab: int, boundary: int) -> Any:
    """A tiny Phi-3 whose rotary angles are of another set in batches longer than the boundary."""
    import transformers

    sizes = {**tiny_sizes(num_key_value_heads=2), "vocab_size": vocab, "num_hidden_layers": 2}
    rotary = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": boundary}
    rotary |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    return transformers.Phi3Config(
        **sizes, original_max_position_embeddings=boundary, rope_parameters=rotary, pad_token_id=None
    )


def random_model(name: str, *, seed: int = 0, tied: bool | None = None) -> Any:
    """A tiny model whose weights are large enough that every part matters."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = configurations()[name](transformers)
    if tied is not None:
        config.tie_word_embeddings = tied
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tiny_nanochat(vocab: int, *, width: int = 16, layers: int = 2, seed: int = 0, scale: float = 5.0) -> Any:
    """A NanoChat of two heads that reads 64 tokens; times 5, its weights predict far from uniformly."""
    import torch
    from transformers import NanoChatConfig, NanoChatForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = NanoChatConfig(**sizes, max_position_embeddings=64, pad_token_id=None)
    model = NanoChatForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


@pytest.fixture(scope="session")
def documents() -> list[dict[str, str]]:
    """Thirty short documents, each with a fact of its own."""
    chooser = random.Random(0)
    names = ["Ada", "Bela", "Cora", "Dino", "Emil", "Fred", "Gina", "Hugo", "Ines", "Jan"]
    towns = ["Oslo", "Rome", "Lima", "Bonn", "Cork"]
    return [
        {
            "id": f"d{number}",
            "text": f"{chooser.choice(names)} number {number} lives in {chooser.choice(towns)}"
            + " and likes to read." * (number % 3),
        }
        for number in range(30)
    ]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[dict[str, str]]) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(documents: list[dict[str, str]]) -> Any:
    from stride_cli.models.language.bpe import train_bpe

    return train_bpe((document["text"] for document in documents), vocab_size=300, context_length=64)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A NanoChat checkpoint directory with its tokenizer; copy it before changing anything."""
    import torch

    from stride_cli.models.language.language_recipe import Architecture
    from stride_cli.models.language.nanochat import build_model

    path = tmp_path_factory.mktemp("saved") / "model"
    model = build_model(Architecture(layers=2, width=16, heads=2, vocab=len(tokenizer), context=64), seed=1)
    with torch.no_grad():  # a head that a frozen-head fine-tuning can say something with
        model.lm_head.weight.mul_(25)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """random_model(name, seed=…) of one of `configurations()`."""
    return random_model


@pytest.fixture(scope="session")
def quantized_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .gguf file: one Llama block of random weights in 8-bit blocks, with a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # transformers reads GGUF with both
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("quantized") / "model.gguf"
    tokens = ["<|endoftext|>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "he"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output": (len(tokens), 32),
        **{f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (64, 32) for name in ("gate", "up")},
        "blk.0.ffn_down": (32, 64),
    }
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
