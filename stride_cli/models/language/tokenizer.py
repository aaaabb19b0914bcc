"""Loading the tokenizer of a checkpoint; torch is not needed."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from stride_cli.errors import ModelError, first_line, require_extra
from stride_cli.models.language.files import Source, code_refused, find_checkpoint
from stride_cli.models.language.own_tokenizer import own_tokenizer
from stride_cli.startup import without_collection

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "tekken.json",
)


def load_tokenizer(path_or_id: str | Path) -> Any:
    """The checkpoint's own tokenizer (a fast one where there is one); ModelError if it has none."""
    return tokenizer_of(find_checkpoint(path_or_id))


def tokenizer_of(source: Source) -> Any:
    """`load_tokenizer` of a checkpoint that was found."""
    own = own_tokenizer(source, transformers_tokenizer)
    return transformers_tokenizer(source) if own is None else own


@without_collection()  # most of it is importing
def transformers_tokenizer(source: Source) -> Any:
    """transformers' own tokenizer of a checkpoint; refused as by `load_tokenizer`."""
    from transformers import AutoTokenizer

    if source.gguf is None and not any((source.directory / name).is_file() for name in _TOKENIZER_FILES):
        if source.base is not None:
            return tokenizer_of(source.base)
        raise ModelError(
            f"'{source.given}' has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})",
            fix=f"save the model's tokenizer beside its weights: tokenizer.save_pretrained('{source.given}')",
        )
    check_gguf(source)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(source.directory, **source.options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise code_refused(source.given, source.directory / "tokenizer_config.json", None) from error
        raise ModelError(
            f"the tokenizer of '{source.given}' cannot be loaded: {first_line(error)}",
            fix="its files are damaged, or need a package that is not installed: save the tokenizer again",
        ) from error


def check_gguf(source: Source) -> None:
    """MissingExtraError where a .gguf file cannot be read for want of a package."""
    if source.gguf is None:
        return
    for module in ("gguf", "accelerate"):  # transformers reads GGUF with both
        if importlib.util.find_spec(module) is None:
            raise require_extra(module, "gguf")


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
