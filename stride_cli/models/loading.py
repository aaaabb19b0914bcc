"""Loading a model of either kind by its path, and saying exactly which it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexMismatch
from stride_cli.errors import ModelError
from stride_cli.models.fingerprints import state_fingerprint
from stride_cli.models.kinds import Kind, kind_of, kind_of_index
from stride_cli.models.language.files import files_fingerprint, refuse_download
from stride_cli.models.language.settings import settings_fingerprint
from stride_cli.recorded_paths import find_recorded, recorded_places
from stride_cli.remembered import recall

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel


def load_model(
    path_or_id: str | Path, *, device: str = "auto", dtype: str = "auto", stream: bool | None = None
) -> AttributableModel:
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
    stream : bool, optional
        Whether the weights of a language model's blocks stay on disk, each there while its block runs
        (`stride_cli.models.language.streaming`). Default: as the environment says (STRIDE_GENERAL_STREAM),
        else where they are larger than the memory that is free.

    Returns
    -------
    AttributableModel

    Raises
    ------
    ModelError
        Nothing there, no config, no tokenizer, weights that are truncated, missing or of another shape, a
        tokenizer with more tokens than the model, or a structure that is not understood.
    MissingExtraError
        A .gguf file without the `gguf` package.
    """
    kind = kind_of(path_or_id)
    streamed = {} if kind == "classifier" else {"stream": stream}  # classifiers are small
    return _LOADERS[kind](path_or_id, device=device, dtype=dtype, **streamed)


def _language(path_or_id: str | Path, **options: Any) -> AttributableModel:
    from stride_cli.models.language.checkpoint import load_language_model

    return load_language_model(path_or_id, **options)


def _classifier(path: str | Path, **options: Any) -> AttributableModel:
    from stride_cli.models.classifier.directory import load_classifier

    return load_classifier(path, **options)


_LOADERS: dict[Kind, Callable[..., AttributableModel]] = {"language": _language, "classifier": _classifier}


@dataclass(frozen=True)
class Opener:
    """Loads further checkpoints as the model at hand was loaded: on its device, in its precision.

    Attributes
    ----------
    device, dtype : as `load_model` takes them
    table : inputs of a classifier's rows, by number
    """

    device: str
    dtype: str
    table: Any = None

    @classmethod
    def like(cls, own: AttributableModel) -> Opener:
        """With device, precision and (classifiers) inputs of a model."""
        import torch

        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        return cls(str(own.device), names[own.dtype], getattr(own, "table", None))

    def load(self, path: str) -> AttributableModel:
        """Load the model at a path; ModelError where that is not possible."""
        model: Any = load_model(path, device=self.device, dtype=self.dtype)
        if self.table is not None:
            model.table = self.table
        loaded: AttributableModel = model
        return loaded


def load_model_of(index: Index, path: str, *, device: str, dtype: str) -> AttributableModel:
    """The model at `path`, compared with an index; a classifier with the index's rows as its inputs.

    Raises
    ------
    ModelError, CorpusError
    IndexMismatch      another model, tokenizer or settings than the index's
    """
    if kind_of_index(index) == "classifier":
        from stride_cli.models.classifier.directory import open_classifier

        return open_classifier(index, path, device=device, dtype=dtype)
    model = load_model(path, device=device, dtype=dtype)
    index.check_fingerprint("tokenizer", model.tokenizer_fingerprint)
    index.check_fingerprint("model", model.fingerprint)
    _check_settings(index, path)
    return model


def path_of_model(index: Index) -> str:
    """Find the model that an index was built for: its path, or its hub id.

    From the index's own directory, as it records it; else (a copy of the index alone) where it was when it
    was indexed, if that was on this machine. No model is downloaded that the user has not named himself.

    Raises
    ------
    ModelError      the index does not say, nothing is there any more, or it would have to be downloaded
    """
    recorded = index.attributes.get("model_path")
    if not recorded:
        raise ModelError(
            f"index '{index.path}' does not record where its model is", fix="give it with --model PATH"
        )
    found = find_recorded(recorded, index.path)
    if found is None:
        known = recall("places", index.attributes["fingerprints"]["model"])
        found = known if known is not None and Path(known).exists() else None
    if found is None and recorded.startswith((".", "/", "~")):
        (place, *_) = recorded_places(recorded, index.path) or [recorded]
        raise ModelError(
            f"there is no model at '{place}', where index '{index.path}' has it",
            fix="give its path with --model",
        )
    refuse_download(found or recorded, named_by=f"index '{index.path}'")
    return found or str(recorded)


def model_settings(path_or_id: str | Path) -> str | None:
    """The fingerprint of a model's settings; None of a classifier, whose `model_fingerprint` has them."""
    return None if kind_of(path_or_id) == "classifier" else settings_fingerprint(path_or_id)


def _check_settings(index: Index, path: str) -> None:
    """IndexMismatch where settings of a language model have changed; earlier indexes do not record them."""
    expected = index.attributes["fingerprints"].get("settings")
    found = settings_fingerprint(path) if expected else None
    if found != expected:
        raise IndexMismatch(
            f"index {index.path} was built for a model with settings {expected}, those of '{path}' are "
            f"{found}: it may answer otherwise",
            fix="put its config.json, generation_config.json and tokenizer_config.json back as they were, or "
            "build a new index",
        )


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
    if not isinstance(model_or_path, str | Path):
        return state_fingerprint(model_or_path)
    if kind_of(model_or_path) == "classifier":
        from stride_cli.models.classifier.directory import classifier_fingerprint

        return classifier_fingerprint(model_or_path)
    return files_fingerprint(model_or_path)
