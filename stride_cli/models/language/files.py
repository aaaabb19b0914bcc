"""Finding a language model's checkpoint (a directory, the hub's cache, a GGUF file) and its weight files."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stride_cli.errors import ModelError, first_line

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # the first kind found is what is loaded
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A checkpoint found on this machine: its directory and, for GGUF, the file in it."""

    given: str
    directory: Path
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"local_files_only": True}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        return options


def find_checkpoint(path_or_id: str | Path) -> Source:
    given = str(path_or_id)
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"'{given}' is a file; expected a directory with config.json, a .gguf file or a hub id",
                fix=f"try its directory: {path.parent}",
            )
        return Source(given, path.parent, path.name)
    if path.is_dir():
        return _in_directory(given, path)
    looks_local = given.startswith((".", "/", "~")) or given.endswith(".gguf") or not _HUB_ID.fullmatch(given)
    if looks_local:
        raise ModelError(f"there is no model at '{given}'", fix="check the path (stride model info PATH)")
    return _in_directory(given, _from_hub(given))


def _in_directory(given: str, path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(given, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Source(given, path, ggufs[0].name)
    if ggufs:
        raise ModelError(f"'{given}' holds {len(ggufs)} .gguf files", fix=f"name one of them: {ggufs[0]}")
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"'{given}' is a LoRA adapter, not a whole model",
            fix="merge it into its base model first (peft: model.merge_and_unload().save_pretrained(DIR))",
        )
    partial = path.name.endswith(".partial") or (path / "training.json").is_file()
    raise ModelError(
        f"'{given}' has no config.json",
        fix="its training has not finished: run the same `stride model train` again to resume it"
        if partial
        else "give the directory that save_pretrained wrote",
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the cache: many exception classes say so
        pass
    reason = "and the hub is switched off (HF_HUB_OFFLINE)"
    if not os.environ.get("HF_HUB_OFFLINE"):
        try:
            return Path(snapshot_download(name, allow_patterns=patterns))
        except Exception as error:
            reason = f"and the hub did not give one ({first_line(error)})"
    raise ModelError(
        f"there is no directory '{name}' here, no model of that name in the hub's cache, {reason}",
        fix="check the path; or download the model once where the network is reachable: "
        f"huggingface-cli download {name}",
    )


def weight_files(path_or_id: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name; ModelError if there are none."""
    source = find_checkpoint(path_or_id)
    if source.gguf is not None:
        return [source.directory / source.gguf]
    for pattern in _WEIGHTS:
        files = sorted(source.directory.glob(pattern))
        if files:
            return files
    raise ModelError(
        f"'{path_or_id}' has no weights ({', '.join(_WEIGHTS)})",
        fix="give the directory that save_pretrained wrote",
    )


def files_fingerprint(path_or_id: str | Path) -> str:
    """SHA-256, in hex, of a checkpoint's weight files one after the other, sorted by name.

    For a single file that is what `sha256sum` prints.
    """
    digest = hashlib.sha256()
    for file in weight_files(path_or_id):
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
