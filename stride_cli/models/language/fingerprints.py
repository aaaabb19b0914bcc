"""Fingerprints: equal ones mean equal weights, equal tokens, and settings that answer alike."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from index_format.durable import sha256_file
from stride_cli.errors import ModelError
from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.spec import GivenModel


def state_fingerprint(model: Any) -> str:
    """SHA-256, in hex, of name, dtype, shape and bytes of each tensor of a module's state dict, by name."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, of everything that decides how text becomes ids: the tokenizer's JSON with sorted
    keys, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # what a caller's last call asked for, not what the tokenizer is
        state["truncation"] = state["padding"] = None
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
    canonical = {
        "tokenizer": state,
        "special": special,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cuts_alike(one: Any, other: Any) -> bool:
    """True where two tokenizers cut every text alike. They may differ in tokens that no text is cut
    into: how they pad, or one that was added for it."""
    backends = [getattr(each, "backend_tokenizer", None) for each in (one, other)]
    if None in backends:
        return tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    first, second = (json.loads(each.to_str()) for each in backends)  # type: ignore[union-attr]
    return all(first[part] == second[part] for part in ("normalizer", "pre_tokenizer", "model"))


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


def settings_fingerprint(model: GivenModel) -> str:
    """SHA-256, in hex, of the settings of a checkpoint.

    Canonical: sorted keys, whole numbers without a point, rotary settings as transformers 5 names them.

    - config.json: all that can change an answer
    - generation_config.json: the tokens that end an answer
    - tokenizer_config.json: what the tokenizer's own fingerprint does not show
    - an adapter beside the weights; of an adapter alone, its settings and those of its base model
    - a .gguf file holds all of that itself: one fingerprint for all

    Raises ModelError: there is no checkpoint, or a file of settings cannot be read.
    """
    source = find_checkpoint(model)
    directory, settings = source.directory, dict[str, Any]()
    if source.gguf is None:
        tokenizer = _read(directory / "tokenizer_config.json")
        settings["tokenizer"] = {name: True for name in _OF_TOKENIZERS if tokenizer.get(name)}
    if source.base is not None:
        settings["base"] = settings_fingerprint(source.base.given)
        settings["adapter"] = _canonical(_read(directory / "adapter_config.json"), _IDLE_OF_LONE_ADAPTERS)
    elif source.gguf is None:
        settings["config"] = _canonical(_read(directory / "config.json"))
        ends = _read(directory / "generation_config.json").get("eos_token_id")
        settings["end"] = [] if ends is None else sorted(ends) if isinstance(ends, list) else [ends]
        settings["adapter"] = None
        if (directory / "adapter_config.json").is_file():  # transformers adds it to what lies beside it
            weights = [sha256_file(file)[1] for file in sorted(directory.glob("adapter_model.*"))]
            own = _canonical(_read(directory / "adapter_config.json"), _IDLE_OF_ADAPTERS)
            settings["adapter"] = {"config": own, "weights": weights}
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
