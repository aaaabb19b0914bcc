"""Load a causal language model from a directory, the hub or a GGUF file, and say exactly what was loaded."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stride_cli.errors import ModelError, require_extra
from stride_cli.models.kinds import is_classifier
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.structure import first_line
from stride_cli.startup import keep_imported, without_collection

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # the first kind found is what is loaded
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "tekken.json",
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 1 << 22


@dataclass(frozen=True)
class _Source:
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


def load_model(path_or_id: str | Path, *, device: str = "auto", dtype: str = "auto") -> CausalLM:
    """A causal language model with its tokenizer, frozen, in eval mode.

    Parameters
    ----------
    path_or_id : str or Path
        A directory written by `save_pretrained`, a .gguf file, or a hub id. A local path never touches the
        network. The directory of a classifier gives a `ClassifierModel`, which has the same interface.
    device : str
        "auto": CUDA where there is one, else CPU; or a torch device name.
    dtype : str
        "auto": bf16 on CUDA, fp32 on CPU; or "fp32", "bf16", "fp16".

    Returns
    -------
    CausalLM

    Raises
    ------
    ModelError
        Nothing there, no config, no tokenizer, weights that are truncated, missing or of another shape, a
        tokenizer with more tokens than the model, or a structure that is not understood.
    MissingExtraError
        A .gguf file without the `gguf` package.
    """
    if is_classifier(path_or_id):
        from stride_cli.models.classifier.directory import load_classifier

        classifier: Any = load_classifier(path_or_id, device=device, dtype=dtype)
        return classifier
    source = _find(path_or_id)
    where = resolve_device(device)
    kind = _dtype(dtype, where)
    tokenizer = _load_tokenizer(source)
    model = _load_weights(source, kind)
    return CausalLM(model.to(where), tokenizer, path=str(path_or_id))


def load_tokenizer(path_or_id: str | Path) -> Any:
    """The checkpoint's own tokenizer (a fast one where there is one); ModelError if it has none."""
    return _load_tokenizer(_find(path_or_id))


def model_fingerprint(model_or_path: Any) -> str:
    """SHA-256, in hex, of a model's weights.

    Parameters
    ----------
    model_or_path : str, Path or nn.Module
        For a path or hub id: of the bytes of its weight files one after the other, sorted by name (so for a
        single file what `sha256sum` prints); of a classifier's directory, see `classifier_fingerprint`. For a
        model in memory: of name, dtype, shape and bytes of each
        tensor of its state dict, sorted by name.
    """
    digest = hashlib.sha256()
    if isinstance(model_or_path, str | Path):
        if is_classifier(model_or_path):
            from stride_cli.models.classifier.directory import classifier_fingerprint

            return classifier_fingerprint(model_or_path)
        for file in weight_files(model_or_path):
            with file.open("rb") as stream:
                while block := stream.read(_BLOCK):
                    digest.update(block)
        return digest.hexdigest()
    for name, tensor in sorted(model_or_path.state_dict().items()):
        values = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer_or_path: Any) -> str:
    """SHA-256, in hex, of everything that decides how text becomes ids: the tokenizer's JSON with sorted
    keys, special tokens and chat template."""
    tokenizer = tokenizer_or_path
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
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


def weight_files(path_or_id: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted by name; ModelError if there are none."""
    source = _find(path_or_id)
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


def load_weights(path_or_id: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model itself, on the CPU; refused as by `load_model`."""
    return _load_weights(_find(path_or_id), dtype)


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU; ModelError for a device that cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device '{name}' cannot be used: {first_line(error)}", fix="try --device cpu"
        ) from error
    return device


# Finding it


def _find(path_or_id: str | Path) -> _Source:
    given = str(path_or_id)
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"'{given}' is a file; expected a directory with config.json, a .gguf file or a hub id",
                fix=f"try its directory: {path.parent}",
            )
        return _Source(given, path.parent, path.name)
    if path.is_dir():
        return _in_directory(given, path)
    looks_local = given.startswith((".", "/", "~")) or given.endswith(".gguf") or not _HUB_ID.fullmatch(given)
    if looks_local:
        raise ModelError(f"there is no model at '{given}'", fix="check the path (stride model info PATH)")
    return _in_directory(given, _from_hub(given))


def _in_directory(given: str, path: Path) -> _Source:
    if (path / "config.json").is_file():
        return _Source(given, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _Source(given, path, ggufs[0].name)
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


# Loading it


@without_collection()  # most of it is importing
def _load_tokenizer(source: _Source) -> Any:
    from transformers import AutoTokenizer

    if source.gguf is None and not any((source.directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"'{source.given}' has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})",
            fix=f"save the model's tokenizer beside its weights: tokenizer.save_pretrained('{source.given}')",
        )
    _check_gguf(source)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(source.directory, **source.options)
    except Exception as error:
        raise ModelError(
            f"the tokenizer of '{source.given}' cannot be loaded: {first_line(error)}",
            fix="its files are damaged, or need a package that is not installed: save the tokenizer again",
        ) from error


@without_collection()
def _load_weights(source: _Source, dtype: torch.dtype) -> Any:
    if "transformers.modeling_utils" not in sys.modules:  # nearly all that a model's class imports
        importlib.import_module("transformers.modeling_utils")
        keep_imported()
    from transformers import AutoModelForCausalLM

    weight_files(source.directory / source.gguf if source.gguf else source.directory)
    _check_gguf(source)
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                source.directory, dtype=dtype, output_loading_info=True, **source.options, **_unpacked(source)
            )
    except Exception as error:
        raise ModelError(
            f"the model '{source.given}' cannot be loaded: {first_line(error)}",
            fix="its weights are truncated or damaged, or belong to another config.json: copy them again",
        ) from error
    _refuse_partial(source, model, report)
    quantizer = getattr(model, "hf_quantizer", None)
    if source.gguf is not None and quantizer is not None:
        quantizer.remove_quantization_config(model)  # its weights are plain tensors, to train and to save
    return model


def _unpacked(source: _Source) -> dict[str, Any]:
    """Plain weights also where transformers can compute on GGUF's blocks: they are differentiated."""
    if source.gguf is None:
        return {}
    try:
        from transformers import GgufConfig
    except ImportError:  # an older one always dequantises
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _refuse_partial(source: _Source, model: Any, report: dict[str, Any]) -> None:
    """A tensor that the file does not have would be random, and a layer that the config does not have
    dropped."""
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(
        str(item[0] if isinstance(item, tuple) else item) for item in report.get("mismatched_keys") or ()
    )
    surplus = [key for key in sorted(report.get("unexpected_keys") or ()) if _is_block_weight(key)]
    for what, keys in (
        ("lack", missing),
        ("have another shape for", mismatched),
        ("hold, but its config does not,", surplus),
    ):
        if keys:
            shown = ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
            raise ModelError(
                f"the weights in '{source.given}' {what} {len(keys)} tensors of its {type(model).__name__}: "
                f"{shown}",
                fix="weights and config.json do not belong together: copy both from one checkpoint",
            )


def _is_block_weight(key: str) -> bool:
    # old GPT-2 and GPT-NeoX checkpoints carry attention-mask buffers that nobody reads
    return bool(re.search(r"\.\d+\..*\.weight$", key))


def _check_gguf(source: _Source) -> None:
    if source.gguf is None:
        return
    for module in ("gguf", "accelerate"):  # transformers reads GGUF with both
        if importlib.util.find_spec(module) is None:
            raise require_extra(module, "gguf")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ModelError(f"dtype '{name}' is unknown", fix=f"one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading reports, progress bars and warnings of transformers are silenced: what matters becomes a
    ModelError."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # the progress bar of GGUF dequantisation obeys no setting
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
