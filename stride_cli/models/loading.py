"""Loading a model of either kind by its path, and saying exactly which it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexMismatch
from stride_cli.errors import ModelError
from stride_cli.models.kinds import kind_of, kind_of_index
from stride_cli.models.language.files import files_fingerprint, refuse_download
from stride_cli.models.language.fingerprints import settings_fingerprint, state_fingerprint
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.parallel import keep_freed_memory
from stride_cli.permissions import Permissions
from stride_cli.remembered import find_recorded, recall, recorded_places

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.schema.model_records import ModelInfoRecord

_SMALL = 1 << 25  # parameters: of such a model freed memory is kept


def load_model(given: GivenModel) -> AttributableModel:
    """Load a causal language model with its tokenizer, or a classifier: frozen, in eval mode.

    `given`: a directory written by `save_pretrained`, a .gguf file, a hub id, or a classifier's directory. A
    local path never touches the network.

    Raises ModelError: nothing there, no config, no tokenizer, weights that are truncated, missing or of
    another shape, a tokenizer with more tokens than the model, or a structure that is not understood. Raises
    MissingExtraError: a .gguf file without the `gguf` package.
    """
    if kind_of(place_of(given)) == "classifier":
        from stride_cli.models.classifier.directory import load_classifier

        return load_classifier(given)
    from stride_cli.models.language.checkpoint import load_language_model

    return load_language_model(given)


@dataclass(frozen=True)
class Opener:
    """Loads further checkpoints as the model at hand was loaded: on its device, in its precision.

    Attributes
    ----------
    spec : ModelSpec      without a path
    table : inputs of a classifier's rows, by number
    """

    spec: ModelSpec
    table: Any = None

    @classmethod
    def like(cls, own: AttributableModel) -> Opener:
        """With device, precision and (classifiers) inputs of a model."""
        import torch

        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        device, dtype = str(own.device), names[own.dtype]
        spec = replace(own.spec, path=None, adapter=None, device=device, dtype=dtype)
        return cls(spec, getattr(own, "table", None))

    def load(self, path: str) -> AttributableModel:
        """Load the model at a path; ModelError where that is not possible."""
        model: Any = load_model(self.spec.at(path))
        if self.table is not None:
            model.table = self.table
        loaded: AttributableModel = model
        return loaded


def load_model_of(index: Index, spec: ModelSpec) -> AttributableModel:
    """Load a model and compare it with an index; a classifier gets the index's rows as inputs.

    Raises ModelError, CorpusError; IndexMismatch for another model, tokenizer or settings than the index's.
    """
    if kind_of_index(index) == "classifier":
        from stride_cli.models.classifier.directory import open_classifier

        return open_classifier(index, spec)
    model = load_model(spec)
    try:
        index.check_fingerprint("tokenizer", model.tokenizer_fingerprint)
        index.check_fingerprint("model", model.fingerprint)
    except IndexMismatch as error:
        own = index.attributes.get("model_path") or "another model"
        both = f"'{spec.place}' is another model than '{own}', which {index.path} is of: {error.message}"
        raise IndexMismatch(both, fix=f"leave the model out to ask '{own}', or {error.fix}") from None
    expected = index.attributes["fingerprints"].get("settings")  # earlier indexes do not record them
    found = settings_fingerprint(spec) if expected else None
    if found != expected:
        raise IndexMismatch(
            f"index {index.path} was built for a model with settings {expected}, those of '{spec.place}' are "
            f"{found}: it may answer otherwise",
            fix="put its config.json, generation_config.json and tokenizer_config.json back as they were, or "
            "build a new index",
        )
    if model.device.type == "cpu" and model.n_parameters < _SMALL:
        keep_freed_memory()
    return model


def path_of_model(index: Index, permissions: Permissions = Permissions()) -> str:
    """Find the model that an index was built for: its path, or its hub id.

    From the index's own directory, as it records it; else (a copy of the index alone) where it was when it
    was indexed, if that was on this machine. No model is downloaded that the user has not named himself.

    Raises ModelError: the index does not say, nothing is there any more, or it would have to be downloaded.
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
    refuse_download(found or recorded, permissions, named_by=f"index '{index.path}'")
    return found or str(recorded)


def model_settings(model: GivenModel) -> str | None:
    """The fingerprint of a model's settings; None of a classifier, whose `model_fingerprint` has them."""
    return None if kind_of(place_of(model)) == "classifier" else settings_fingerprint(model)


def model_fingerprint(model_or_path: Any) -> str:
    """SHA-256, in hex, of a model's weights: of its files (`files_fingerprint`, `classifier_fingerprint`), or
    of one in memory (`state_fingerprint`)."""
    if not isinstance(model_or_path, str | Path | ModelSpec):
        return state_fingerprint(model_or_path)
    if kind_of(place_of(model_or_path)) == "classifier":
        from stride_cli.models.classifier.directory import classifier_fingerprint

        return classifier_fingerprint(place_of(model_or_path))
    return files_fingerprint(model_or_path)


def describe_model(given: GivenModel) -> ModelInfoRecord:
    """Load a checkpoint, which checks it whole, and describe it: a ``stride.model_info/1``.

    Code that a classifier brings is never run. Raises ModelError as `load_model`, or for a damaged recipe.
    """
    path_or_id, recipe, found = place_of(given), None, None
    if kind_of(path_or_id) == "classifier":
        from stride_cli.models.classifier import directory

        found = directory.outline(path_or_id)
    else:
        recipe = read_recipe(path_or_id)
    # code that is not to be run is known by its other files
    spec = replace(ModelSpec.of(given), device="cpu", dtype="fp32")
    model: Any = found if found and found.code else load_model(spec)
    return {
        "schema": "stride.model_info/1",
        "path": path_or_id,
        "architecture": model.name,
        "parameters": model.n_parameters,
        "layers": model.n_layers,
        "width": model.d_model,
        "vocabulary": model.vocab_size,
        "context": model.context_length,
        "fingerprint": model.fingerprint,
        "tokenizer_fingerprint": model.tokenizer_fingerprint,
        "settings_fingerprint": model_settings(given),
        "checkpoints": sorted(str(step) for step in Path(path_or_id).glob("checkpoints/step-*")),
        "recipe": None if recipe is None else json.loads(recipe.to_json()),
    }
