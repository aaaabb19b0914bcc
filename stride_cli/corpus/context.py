"""How many tokens a checkpoint reads at once, and knows, from its configuration; no weights are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stride_cli.corpus.adapter_base import base_name, is_adapter
from stride_cli.corpus.own_config import own_config
from stride_cli.errors import ModelError

# the names that model families give it; as in models/language/structure.py
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def context_length(path_or_id: str | Path) -> int | None:
    """The longest sequence, in tokens, that a checkpoint has positions for; None when it does not say.

    Parameters
    ----------
    path_or_id : str or Path
        A directory with config.json, a .gguf file or a directory with one, or a hub id.

    Raises
    ------
    ModelError
        The configuration cannot be read.
    """
    config = read_configuration(path_or_id)
    for name in _NAMES:
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def vocabulary_size(path_or_id: str | Path) -> int | None:
    """How many tokens a checkpoint's logits are of; None when it does not say. Raises as `context_length`."""
    size = getattr(read_configuration(path_or_id), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def read_configuration(path_or_id: str | Path) -> Any:
    """What a checkpoint's language model is configured as; raises as `context_length`."""
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
