"""Whether a checkpoint is a NanoChat as `stride model train` writes them, by its config.json alone.

Such ones are read without transformers, which takes longer to import than most commands compute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DTYPES = (None, "float32", "bfloat16", "float16")


def own_config(directory: Path) -> dict[str, Any] | None:
    """config.json of a plain NanoChat: every key is one that is known here, and of a value that means what it
    means in transformers; None of any other, damaged ones too."""
    config = read_object(directory / "config.json")
    if config is None or config.keys() - {"transformers_version"} != _KNOWN.keys():
        return None
    if not all(known(config[name]) for name, known in _KNOWN.items()):
        return None
    heads = config["num_attention_heads"]
    whole = config["num_key_value_heads"] == heads and config["hidden_size"] % (2 * heads) == 0
    return config if whole else None


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where it holds none, or cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _size(value: Any) -> bool:
    return type(value) is int and value > 0


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _token(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _end(value: Any) -> bool:
    return all(_token(token) for token in value) if isinstance(value, list) else _token(value)


def _rotary(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"rope_type", "rope_theta"}
        and value["rope_type"] == "default"
        and _number(value["rope_theta"])
    )


_KNOWN: dict[str, Any] = {
    "architectures": lambda value: value == ["NanoChatForCausalLM"],
    "model_type": lambda value: value == "nanochat",
    "hidden_act": lambda value: value == "relu2",
    "attention_bias": lambda value: value is False,
    "tie_word_embeddings": lambda value: value is False,
    "pad_token_id": lambda value: value is None,
    "rope_parameters": _rotary,
    "rms_norm_eps": lambda value: type(value) is float,
    "final_logit_softcapping": lambda value: value is None or type(value) is float,
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), _size),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), _size),
    "bos_token_id": _token,
    "eos_token_id": _end,
    # these change no answer
    "attention_dropout": _number,
    "initializer_range": _number,
    "use_cache": lambda value: type(value) is bool,
    "dtype": lambda value: value in _DTYPES,
}
