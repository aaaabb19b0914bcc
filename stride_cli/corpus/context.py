"""Read the sizes of a checkpoint from its configuration; no weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stride_cli.corpus.adapter_base import base_name, is_adapter
from stride_cli.corpus.gate_budget import MOST_WITH_PROJECTIONS, most_subsets
from stride_cli.corpus.own_config import own_config
from stride_cli.errors import ModelError

# the names that model families give it; as in models/language/structure.py
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DEPTHS, _WIDTHS = ("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "d_model")


def context_length(path_or_id: str | Path) -> int | None:
    """Return the longest sequence, in tokens, that a checkpoint has positions for; None when unknown.

    Args:
        path_or_id: A directory with config.json, a .gguf file or a directory with one, or a hub id.

    Raises:
        ModelError: The configuration cannot be read.
    """
    return _first(read_configuration(path_or_id), _NAMES)


def subsets_bound(path_or_id: str | Path, *, finetuned: bool) -> int:
    """Return the most subsets of an index for a checkpoint, where none are asked for.

    A large fine-tuned one has fewer. Raises as `context_length`.
    """
    # an adapter's layers have no more directions than its rank
    if is_adapter(path_or_id) or not finetuned:
        return MOST_WITH_PROJECTIONS
    config = read_configuration(path_or_id)
    depth, width = _first(config, _DEPTHS), _first(config, _WIDTHS)
    if depth is None or width is None:
        return MOST_WITH_PROJECTIONS
    return min(MOST_WITH_PROJECTIONS, most_subsets(depth, width))


def _first(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these that a configuration has as a positive number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def read_configuration(path_or_id: str | Path) -> Any:
    """Read the configuration of a checkpoint's language model; raises as `context_length`."""
    if is_adapter(path_or_id):
        path_or_id = base_name(Path(path_or_id).expanduser())[0] or path_or_id
    path = Path(path_or_id).expanduser()
    if (own := own_config(path)) is not None:
        return SimpleNamespace(**own)
    from transformers import AutoConfig
    from transformers.utils import logging

    options: dict[str, object] = {"trust_remote_code": False}
    where: str | Path = str(path_or_id)
    if path.is_file():
        where, options["gguf_file"] = path.parent, path.name
    elif path.is_dir():
        where = path
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").is_file():
            options["gguf_file"] = ggufs[0].name
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoConfig.from_pretrained(where, **options).get_text_config()
    except Exception as error:  # OSError, ValueError, KeyError, JSON and GGUF errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the configuration of '{path_or_id}' cannot be read: {reason}",
            fix="copy its config.json again (stride model info PATH tells what is there)",
        ) from error
    finally:
        logging.set_verbosity(verbosity)
