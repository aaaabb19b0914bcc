"""Recognise a checkpoint that `stride model train` wrote, which is read without transformers' modelling code.

Importing that takes longer than most commands compute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FIXED = {
    "architectures": ["NanoChatForCausalLM"],
    "model_type": "nanochat",
    "hidden_act": "relu2",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "num_hidden_layers")
_READ = {*_SIZES, "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "final_logit_softcapping"}
_IDLE = {"transformers_version", "attention_dropout", "initializer_range", "use_cache", "dtype"}
_OTHERS = {"rope_parameters", "bos_token_id", "eos_token_id"}


def own_config(directory: Path) -> dict[str, Any] | None:
    """Read config.json of a checkpoint of our own; None of any other, and of one whose settings were changed
    to what our model code does not do."""
    config = None if (directory / "adapter_config.json").is_file() else read_object(directory / "config.json")
    if config is None or config.keys() - _IDLE != _FIXED.keys() | _READ | _OTHERS:
        return None
    fixed = all(config[name] == value for name, value in _FIXED.items())
    rotary = config["rope_parameters"]
    plain = rotary.keys() == {"rope_type", "rope_theta"} and rotary["rope_type"] == "default"
    own = fixed and plain and config["num_key_value_heads"] == config["num_attention_heads"]
    return config if own else None


def read_object(file: Path) -> dict[str, Any] | None:
    """Read the JSON object of a file; None where it holds none, or cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
