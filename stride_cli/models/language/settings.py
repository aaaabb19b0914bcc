"""Fingerprint of settings that change a checkpoint's answers, beside weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from index_format.durable import sha256_file
from stride_cli.errors import ModelError
from stride_cli.models.language.files import find_checkpoint

# keys of config.json that change no answer: a resave by another version of transformers may change them
_IDLE = frozenset(
    (
        # who wrote it, and where it lay
        *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
        # precision is said when a model is loaded, and code of its own is never run
        *("torch_dtype", "dtype", "auto_map"),
        # what a call gives beside the logits
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        # weights before training; heads for other tasks
        *("initializer_range", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        *("task_specific_params", "classifier_dropout"),
        # of sampling, as old versions wrote it: answers are the likeliest tokens
        *("do_sample", "temperature", "top_k", "top_p", "num_beams", "max_length", "min_length"),
    )
)
_IDLE_OF_ADAPTERS = frozenset(("peft_version", "auto_mapping", "inference_mode", "revision"))
# the base model's own fingerprints say which it is
_IDLE_OF_LONE_ADAPTERS = _IDLE_OF_ADAPTERS | {"base_model_name_or_path"}
# of tokenizer_config.json: what its fingerprint does not show, for it takes effect when text goes in or out
_OF_TOKENIZERS = ("split_special_tokens", "clean_up_tokenization_spaces")


def settings_fingerprint(path_or_id: str | Path) -> str:
    """SHA-256, in hex, of the settings of a checkpoint.

    Of config.json all that can change an answer, canonical: sorted keys, whole numbers without a point,
    rotary settings as transformers 5 names them. Of generation_config.json the tokens that end an answer, of
    tokenizer_config.json what the tokenizer's own fingerprint does not show, and an adapter beside the
    weights; of an adapter alone, its own and those of its base model. A .gguf file holds all of that itself,
    so that its settings are none: one number for all.

    Raises
    ------
    ModelError      there is no checkpoint, or a file of settings cannot be read
    """
    source = find_checkpoint(path_or_id)
    settings: dict[str, Any] = {}
    if source.base is not None:
        adapter = _canonical(_read(source.directory / "adapter_config.json"), _IDLE_OF_LONE_ADAPTERS)
        tokenizer = _read(source.directory / "tokenizer_config.json")
        settings = {
            "base": settings_fingerprint(source.base.given),
            "tokenizer": {name: True for name in _OF_TOKENIZERS if tokenizer.get(name)},
            "adapter": adapter,
        }
    elif source.gguf is None:
        directory = source.directory
        tokenizer = _read(directory / "tokenizer_config.json")
        settings = {
            "config": _canonical(_read(directory / "config.json")),
            "end": _ends(_read(directory / "generation_config.json")),
            "tokenizer": {name: True for name in _OF_TOKENIZERS if tokenizer.get(name)},
            "adapter": _adapter(directory),
        }
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", fix="copy it again") from error
    return found


def _canonical(value: Any, idle: frozenset[str] = _IDLE) -> Any:
    """Without what changes nothing; 10000.0 is 10000."""
    if isinstance(value, dict):
        kept = {key: _canonical(item, idle) for key, item in value.items() if key not in idle}
        return _with_rotary_settings(kept)
    if isinstance(value, list):
        return [_canonical(item, idle) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _with_rotary_settings(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, as transformers wrote them up to version 4, in one."""
    if "rope_theta" not in config or "rope_parameters" in config or "rope_type" in config:
        return config
    scaling = dict(config.pop("rope_scaling", None) or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
        del scaling["type"]
    rotary = {"rope_type": "default", **scaling, "rope_theta": config.pop("rope_theta")}
    return {**config, "rope_parameters": rotary}


def _ends(generation: dict[str, Any]) -> list[int]:
    found = generation.get("eos_token_id")
    return [] if found is None else sorted(found) if isinstance(found, list) else [found]


def _adapter(directory: Path) -> Any:
    """Low-rank changes that transformers adds when it loads what lies beside them."""
    config = directory / "adapter_config.json"
    if not config.is_file():
        return None
    weights = [sha256_file(file)[1] for file in sorted(directory.glob("adapter_model.*"))]
    return {"config": _canonical(_read(config), _IDLE_OF_ADAPTERS), "weights": weights}
