"""Read a checkpoint's configuration, and find the base model of a LoRA adapter; no weights are loaded.

A checkpoint that `stride model train` wrote is recognised, and read without transformers' modelling code:
importing that takes longer than most commands compute.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stride_cli.corpus.gate_budget import FEWEST_SUBSETS, most_subsets
from stride_cli.errors import ModelError
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.remembered import recall, remember

ADAPTER_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def names_hub(given: str) -> bool:
    """Tell whether a string can be a model of the hub, and no path."""
    looks_local = given.startswith((".", "/", "~")) or given.endswith(".gguf")
    return not looks_local and _HUB_ID.fullmatch(given) is not None


def is_adapter(path_or_id: str | Path) -> bool:
    """Tell whether a path is that of an adapter without its base model."""
    path = Path(path_or_id).expanduser()
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def remember_base(adapter: Path, base: str) -> None:
    """Keep which base a user put an adapter on, for where it names one that is not on this machine."""
    known = Path(base).expanduser()
    text = str(known.absolute()) if known.exists() else base
    remember("bases", hashlib.sha256(_place(adapter).encode()).hexdigest(), text)


def _place(adapter: Path) -> str:
    return str(adapter.expanduser().resolve())


def adapter_config(given: str, path: Path) -> dict[str, Any]:
    """Read the configuration of the adapter at `path`; ModelError, naming `given`, where it is damaged."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{ADAPTER_CONFIG} of adapter '{given}' cannot be read: {error}", fix="copy it again"
        ) from None
    return config


def base_name(model: GivenModel) -> tuple[str | None, bool]:
    """Find the path or hub id of an adapter's base model, or None; and whether the user has given it.

    The one that was given with it; the one that it names, there or beside the adapter; the one that it was
    last given with.
    """
    spec, adapter = ModelSpec.of(model), Path(place_of(model)).expanduser()
    if spec.adapter is not None and spec.path is not None:
        return str(spec.path), True
    place = _place(adapter)
    named = adapter_config(str(adapter), adapter).get("base_model_name_or_path")
    if isinstance(named, str) and named:
        path = Path(named).expanduser()
        for found in (path, adapter.parent / path, adapter.parent / path.name):
            if found.exists() and _place(found) != place:
                return str(found), False
    known = recall("bases", hashlib.sha256(place.encode()).hexdigest())
    if known is not None and (Path(known).exists() or names_hub(known)):
        return known, True
    return (named if isinstance(named, str) and names_hub(named) else None), False


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


# the names that model families give them
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_SHAPE = ("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "d_model"), ("vocab_size",)


def context_length(model: GivenModel) -> int | None:
    """Return the longest sequence, in tokens, that a checkpoint has positions for; None when unknown.

    Raises ModelError: the configuration cannot be read.
    """
    return first_positive(read_configuration(model), CONTEXT_NAMES)


def vocabulary_size(model: GivenModel) -> int | None:
    """Return how many tokens a checkpoint has rows for; None when unknown. An adapter may have more rows."""
    return None if is_adapter(place_of(model)) else first_positive(read_configuration(model), ("vocab_size",))


def subsets_bound(model: GivenModel, *, finetuned: bool) -> int:
    """Return the most subsets of an index for a checkpoint by default; raises as `context_length`."""
    # an adapter's layers have no more directions than its rank
    shape = None if is_adapter(place_of(model)) or not finetuned else shape_of(model)
    return FEWEST_SUBSETS if shape is None else most_subsets(*shape[:2])


def shape_of(model: GivenModel) -> tuple[int, int, int] | None:
    """Return layers, width and vocabulary of a checkpoint; None: unknown. Raises as `context_length`."""
    config = read_configuration(model)
    depth, width, size = (first_positive(config, each) for each in _SHAPE)
    return None if depth is None or width is None or size is None else (depth, width, size)


def first_positive(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these that a configuration has as a positive number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def read_configuration(model: GivenModel) -> Any:
    """Read the configuration of a checkpoint's language model; raises as `context_length`."""
    path_or_id = place_of(model)
    if is_adapter(path_or_id):
        path_or_id = base_name(model)[0] or path_or_id
    path = Path(path_or_id).expanduser()
    if (own := own_config(path)) is not None:
        return SimpleNamespace(**own)
    whole = path.is_dir() and (path / "config.json").is_file()
    files = [path] if path.is_file() else [] if whole else sorted(path.glob("*.gguf"))
    try:
        with quiet_transformers():
            if files:
                return _in_file(files[0], files[0].stat().st_mtime_ns).get_text_config()
            from transformers import AutoConfig

            given = path if path.is_dir() else path_or_id
            return AutoConfig.from_pretrained(given, trust_remote_code=False).get_text_config()
    except Exception as error:  # OSError, ValueError, KeyError, JSON and GGUF errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the configuration of '{path_or_id}' cannot be read: {reason}",
            fix="copy its config.json again (stride model info PATH tells what is there)",
        ) from error


@lru_cache(maxsize=4)
def _in_file(file: Path, changed: int) -> Any:
    """Read the configuration in a GGUF file; it takes seconds, as all of its vocabulary is read."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence reports, progress bars and warnings of transformers: what matters becomes a ModelError."""
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
