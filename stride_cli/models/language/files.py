"""Finding a language model's checkpoint (a directory, the hub's cache, a GGUF file) and its weight files."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stride_cli.errors import ModelError, first_line
from stride_cli.models.configuration import (
    ADAPTER_CONFIG,
    adapter_config,
    base_name,
    is_adapter,
    names_hub,
    remember_base,
)
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.permissions import Permissions

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # the first kind found is what is loaded
_FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_NOT_MERGED = {
    "megatron_config": "of a Megatron model",  # peft would import a module that the file names
    "alora_invocation_tokens": "that acts on some of the tokens",
    "arrow_config": "of several, chosen token by token",
}
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A checkpoint found on this machine: its directory and, for GGUF, the file in it; of a LoRA adapter, the
    model that it is put on."""

    given: str
    directory: Path
    gguf: str | None = None
    base: Source | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        return options


def find_checkpoint(model: GivenModel) -> Source:
    """A checkpoint by its path, or by its hub id: fetched, where it is not in the hub's cache.

    Raises ModelError: nothing there, nothing that can be loaded, or only by running code of its own.
    """
    given = place_of(model)
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            there = f": {path.parent}" if (path.parent / "config.json").is_file() else ""
            raise ModelError(
                f"'{given}' is a file; expected a directory with config.json, a .gguf file or a hub id",
                fix=f"give the directory that save_pretrained wrote{there}",
            )
        return Source(given, path.parent, path.name)
    if path.is_dir():
        return _in_directory(model, path)
    if not names_hub(given):
        raise ModelError(f"there is no model at '{given}'", fix="check the path (stride model info PATH)")
    return _in_directory(model, _from_hub(given))


def find_offline(model: GivenModel) -> Source | None:
    """`find_checkpoint`, on this machine or in the hub's cache; None of a hub id that would be fetched."""
    given = place_of(model)
    if Path(given).expanduser().exists() or not names_hub(given):
        base = base_name(model)[0] if is_adapter(given) else None
        return None if base is not None and find_offline(base) is None else find_checkpoint(model)
    cached = _cached(given)
    return None if cached is None else _in_directory(model, cached)


def refuse_download(path_or_id: str, permissions: Permissions, *, named_by: str, beside: str = "") -> None:
    """Refuse a hub id that the user has not given, where it would be fetched: what names it may be anybody's.

    `named_by` is for people: "index 'run.stride'"; `beside`: what else is to be given with it. Raises
    ModelError: neither on this machine nor in the hub's cache, and no permission to download.
    """
    if permissions.allow_download or Path(path_or_id).expanduser().exists() or not names_hub(path_or_id):
        return
    if _cached(path_or_id) is None:
        raise ModelError(
            f"{named_by} names the hub model '{path_or_id}', which is not in the hub's cache: it was not "
            "downloaded",
            fix=f"give it yourself (--model {path_or_id}{beside}), or let it be downloaded with "
            "general.allow_download in stride.yaml, or STRIDE_GENERAL_ALLOW_DOWNLOAD=1",
        )


def _in_directory(model: GivenModel, path: Path) -> Source:
    given = place_of(model)
    if (path / "config.json").is_file():
        _refuse_code(given, path / "config.json")
        return Source(given, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Source(given, path, ggufs[0].name)
    if ggufs:
        raise ModelError(f"'{given}' holds {len(ggufs)} .gguf files", fix=f"name one of them: {ggufs[0]}")
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(ModelSpec.of(model), path)
    partial = path.name.endswith(".partial") or (path / "training.json").is_file()
    raise ModelError(
        f"'{given}' has no config.json",
        fix="its training has not finished: run the same `stride model train` again to resume it"
        if partial
        else "give the directory that save_pretrained wrote",
    )


def _adapter(spec: ModelSpec, path: Path) -> Source:
    """A LoRA adapter with its base model.

    Raises ModelError: it is of another kind, or its base model is not to be found, or an adapter itself.
    """
    given = place_of(spec)
    config = adapter_config(given, path)
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        what = f"of kind {kind}" if kind != "LORA" else f"for task {task}"
        raise ModelError(
            f"'{given}' is an adapter {what} (expected LoRA of a causal language model)",
            fix="merge it into its base model first, where peft can "
            "(model.merge_and_unload().save_pretrained(DIR))",
        )
    for key, why in _NOT_MERGED.items():
        if config.get(key):
            raise ModelError(
                f"'{given}' is an adapter {why} ({key} in its {ADAPTER_CONFIG})",
                fix="give an adapter that is added to the weights of a model of transformers",
            )
    name, by_user = base_name(spec)
    if name is None:
        named = config.get("base_model_name_or_path")
        raise ModelError(
            f"adapter '{given}' names "
            + (f"the base model '{named}', which is not there" if named else "no base model"),
            fix=f"give the model that it was trained on: --model BASE --adapter {given}",
        )
    if not by_user:
        refuse_download(name, spec.permissions, named_by=f"adapter '{given}'", beside=f" --adapter {given}")
    base = find_checkpoint(name)
    if base.base is not None:
        raise ModelError(
            f"adapter '{given}' is of another adapter, '{name}'",
            fix="merge that one into its base model first (peft: model.merge_and_unload())",
        )
    if spec.adapter is not None and spec.path is not None:
        remember_base(path, name)
    return Source(given, path, base=base)


def _refuse_code(given: str, file: Path) -> None:
    """ModelError where a model needs Python code that comes with it, or kernels that the hub has.

    Where transformers has the architecture itself, that is what is loaded, whatever else the model brings.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told when it is loaded
        return
    if not isinstance(config, dict):
        return
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if "/" in str(config.get(name) or ""):
            raise ModelError(
                f"'{given}' asks for compiled code of the hub ({name} '{config[name]}' in its config.json), "
                "which STRIDE does not run",
                fix=f"take that line out of {file}",
            )
    if not config.get("auto_map"):
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise code_refused(given, file, config["auto_map"])


def code_refused(given: str, file: Path, auto_map: Any) -> ModelError:
    """The error for a model or tokenizer that transformers can only load by running code that it brings."""
    named = sorted(str(value) for value in auto_map.values()) if isinstance(auto_map, dict) else []
    shown = f", {named[0]}" if named else ""
    return ModelError(
        f"'{given}' can only be loaded by running Python code that comes with it (auto_map in {file.name}"
        f"{shown}), which STRIDE does not do",
        fix="give a model whose architecture transformers has itself, such as a conversion of this one to "
        "Llama (its config.json needs no auto_map)",
    )


def _cached(name: str) -> Path | None:
    """A model's directory in the hub's cache; the network is not asked."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the cache: many exception classes say so
        return None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    if (cached := _cached(name)) is not None:
        return cached
    reason = "and the hub is switched off (HF_HUB_OFFLINE)"
    if not os.environ.get("HF_HUB_OFFLINE"):
        try:
            return Path(snapshot_download(name, allow_patterns=_FETCHED))
        except Exception as error:
            reason = f"and the hub did not give one ({first_line(error)})"
    raise ModelError(
        f"there is no directory '{name}' here, no model of that name in the hub's cache, {reason}",
        fix="check the path; or download the model once where the network is reachable: "
        f"huggingface-cli download {name}",
    )


def weight_files(model: GivenModel) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name; ModelError if there are none.

    Of an adapter: those of its base model, then its own.
    """
    source = find_checkpoint(model)
    if source.gguf is not None:
        return [source.directory / source.gguf]
    before = [] if source.base is None else weight_files(source.base.given)
    patterns = _WEIGHTS if source.base is None else _ADAPTER_WEIGHTS
    for pattern in patterns:
        if files := sorted(source.directory.glob(pattern)):
            return before + files
    what, library = ("", "") if source.base is None else ("adapter ", "peft's ")
    raise ModelError(
        f"{what}'{source.given}' has no weights ({', '.join(patterns)})",
        fix=f"give the directory that {library}save_pretrained wrote",
    )


def files_fingerprint(model: GivenModel) -> str:
    """SHA-256, in hex, of a checkpoint's weight files one after the other, as `weight_files` lists them.

    For a single file that is what `sha256sum` prints.
    """
    digest = hashlib.sha256()
    for file in weight_files(model):
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
