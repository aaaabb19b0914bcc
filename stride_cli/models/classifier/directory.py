"""A classifier's directory: description, weights, rows it was trained on; and the examples of an index."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory, put_in_place, sync_tree, write_file
from index_format.errors import IndexMismatch
from stride_cli.errors import CorpusError, ModelError, QueryError, UsageError
from stride_cli.models.classifier.classifier_recipe import FILE_NAME as RECIPE_NAME
from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe
from stride_cli.models.classifier.examples import (
    PICTURE_SUFFIXES,
    Columns,
    Examples,
    class_numbers,
    read_examples,
    read_picture,
)
from stride_cli.models.classifier.networks import NetworkSpec, build_network
from stride_cli.models.kinds import FILE_NAME, kind_of
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.permissions import Permissions, may_run
from stride_cli.remembered import recall, recorded_places

if TYPE_CHECKING:
    import torch
    from torch import nn

    from index_format.reader import Index
    from stride_cli.models.classifier.classifier_model import ClassifierModel

_ADAPTER, _WEIGHTS, _ROWS = "network.py", "weights.safetensors", "rows.npz"
_VERSION = 1
_DTYPES = ("auto", "fp32", "fp64")


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """UsageError when something is at `out` and may not be replaced."""
    if not out.exists():
        return
    if not overwrite:
        raise UsageError(f"'{out}' exists", fix="choose another --out, or replace it with --overwrite")
    if kind_of(out) != "classifier" and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"'{out}' exists and is not a classifier's directory", fix="choose another --out")


def save_classifier(
    trained: ClassifierModel,
    out: Path,
    *,
    recipe: ClassifierRecipe,
    columns: Columns,
    training: np.ndarray,
    held_out: np.ndarray,
    checkpoints: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a classifier's directory, whole or not at all.

    Parameters
    ----------
    trained : ClassifierModel        on any device
    recipe : ClassifierRecipe        its `data` names the file and its fingerprint
    training, held_out : int64       rows of the file
    checkpoints : step → state dict  along the training; each a classifier's directory checkpoints/step-NNNNNN

    Raises UsageError: something is at `out` already.
    """
    from safetensors.torch import save

    refuse_existing(out, overwrite=overwrite)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = partial / "model"
    description = {
        "classifier_version": _VERSION,
        "network": {key: value for key, value in recipe.network.to_record().items() if key != "adapter"},
        "classes": trained.classes,
        "shape": list(trained.shape),
        "mean": trained.standardisation.mean.tolist(),
        "deviation": trained.standardisation.deviation.tolist(),
        "columns": asdict(columns),
        "data": recipe.data,
    }
    rows = io.BytesIO()
    np.savez(rows, training=np.asarray(training, np.int64), held_out=np.asarray(held_out, np.int64))
    files = {FILE_NAME: json.dumps(description, indent=1).encode(), _ROWS: rows.getvalue()}
    if recipe.network.adapter:
        files[_ADAPTER] = recipe.network.adapter.encode()
    states: dict[Path, Mapping[str, torch.Tensor]] = {model: trained.model.state_dict()}
    for step, state in (checkpoints or {}).items():
        states[model / "checkpoints" / f"step-{step:06d}"] = state
    for directory, state in states.items():
        make_directory(directory)
        for name, content in files.items():
            write_file(directory / name, content)
        # cloned: tied weights and views are refused by safetensors
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
        write_file(directory / _WEIGHTS, save(tensors))
    write_file(model / RECIPE_NAME, recipe.to_json().encode())
    sync_tree(model)
    put_in_place(model, out, partial)
    shutil.rmtree(partial, ignore_errors=True)


def load_classifier(given: GivenModel) -> ClassifierModel:
    """Load a classifier as `save_classifier` wrote it, without inputs: `open_classifier` brings an index's.

    Its adapter file, if it has one, is executed where it is trusted: the user named that file in a training
    on this machine, or has said so.

    Raises ModelError: the directory is damaged, or its adapter file does not load, or is not trusted.
    """
    import torch

    from stride_cli.models.classifier.classifier_model import ClassifierModel, Standardisation
    from stride_cli.models.devices import resolve_device

    spec = ModelSpec.of(given)
    if (dtype := spec.dtype) not in _DTYPES:
        raise ModelError(f"dtype '{dtype}' is unknown for classifiers", fix=f"one of {', '.join(_DTYPES)}")
    directory = Path(place_of(spec)).expanduser()
    description, code = _read_description(directory)
    shape, classes = tuple(description["shape"]), description["classes"]
    parts = NetworkSpec(**description["network"], adapter=code)
    if code:
        parts = parts.trusted_by(spec.permissions, directory / _ADAPTER)
    network = build_network(parts, shape, len(classes), seed=0)
    load_weights(network, directory / _WEIGHTS)
    mean, deviation = (np.asarray(description[name], np.float64) for name in ("mean", "deviation"))
    model = ClassifierModel(
        network.to(resolve_device(spec.device), torch.float64 if dtype == "fp64" else torch.float32),
        classes=classes,
        shape=shape,
        standardisation=Standardisation(mean, deviation),
        spec=spec,
        fingerprint=classifier_fingerprint(directory),
    )
    columns = _columns(description)

    def read_file(source: str) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
        if Path(source).suffix.lower() in PICTURE_SUFFIXES:
            return read_picture(source, shape)[None], None, [Path(source).stem]
        examples = read_examples(source, columns, need_labels=False)
        if examples.labels is not None:
            return examples.inputs, class_numbers(examples, classes), examples.ids
        if examples.inputs.shape == shape:  # one input alone
            return examples.inputs[None], None, [Path(source).stem]
        return examples.inputs, None, examples.ids

    model.read_file = read_file
    return model


def load_weights(network: nn.Module, file: Path) -> None:
    """Put weights from a .safetensors or torch file into a network.

    Raises ModelError: no such file, damaged, or of another network.
    """
    import torch

    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load

            weights = load(file.read_bytes())
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        network.load_state_dict(weights)
    except FileNotFoundError:
        raise ModelError(f"there are no weights at '{file}'", fix="check the path") from None
    except Exception as error:  # safetensors, pickle and torch have many error classes
        first = str(error).strip().splitlines()
        raise ModelError(
            f"the weights '{file}' cannot be loaded: {' '.join(first[:2])[:300] or type(error).__name__}",
            fix="give the state dict of this network (torch.save(network.state_dict(), FILE))",
        ) from error


def classifier_fingerprint(path: str | Path) -> str:
    """SHA-256 in hex of weights, network, classes and standardisation."""
    directory = Path(path).expanduser()
    description, code = _read_description(directory)
    names = ("network", "classes", "shape", "mean", "deviation")
    text = json.dumps({name: description[name] for name in names}, sort_keys=True)
    digest = hashlib.sha256(text.encode() + code.encode())
    try:
        digest.update((directory / _WEIGHTS).read_bytes())
    except OSError as error:
        raise ModelError(f"'{path}' has no weights ({_WEIGHTS})", fix="train the model again") from error
    return digest.hexdigest()


def classes_fingerprint(path: str | Path) -> str:
    """SHA-256 in hex of the classes: what stands for a tokenizer."""
    classes = _read_description(Path(path).expanduser())[0]["classes"]
    return hashlib.sha256(json.dumps(classes).encode()).hexdigest()


@dataclass(frozen=True)
class Outline:
    """A classifier as its files describe it; nothing of it is run."""

    name, n_layers, d_model, context_length = "network.py (not run)", None, None, 2
    classes: list[str]
    shape: tuple[int, ...]  # of one input
    n_parameters: int  # numbers in its file of weights
    vocab_size: int
    fingerprint: str
    tokenizer_fingerprint: str
    code: str  # the Python code that is its network; empty for one of ours
    trusted: bool  # it runs no code, or code that the user trusts


def outline(path: str | Path, permissions: Permissions = Permissions()) -> Outline:
    """Read a classifier's directory without running its network.

    Raises ModelError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    directory = Path(path).expanduser()
    description, code = _read_description(directory)
    try:
        with safe_open(directory / _WEIGHTS, framework="numpy") as weights:
            sizes = [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(directory / _WEIGHTS, error) from error
    return Outline(
        classes=list(description["classes"]),
        shape=tuple(description["shape"]),
        n_parameters=sum(sizes),
        vocab_size=len(description["classes"]),
        fingerprint=classifier_fingerprint(path),
        tokenizer_fingerprint=classes_fingerprint(path),
        code=code,
        trusted=not code or may_run(code, permissions),
    )


def training_columns(path: str | Path) -> Columns:
    """Columns of its file that a classifier was trained on."""
    return _columns(_read_description(Path(path).expanduser())[0])


def training_rows(path: str | Path, examples: Examples) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows that a classifier was trained on, and those held out, both int64; None for another file."""
    directory = Path(path).expanduser()
    if (_read_description(directory)[0].get("data") or {}).get("fingerprint") != examples.fingerprint():
        return None
    try:
        with np.load(directory / _ROWS) as rows:
            return rows["training"], rows["held_out"]
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(directory / _ROWS, error) from error


def open_classifier(index: Index, given: GivenModel) -> ClassifierModel:
    """A classifier with the examples of an index: chunk i is input number i.

    Raises ModelError where there is no classifier at `path`, CorpusError where the data file is gone, and
    IndexMismatch where model, classes or data are not those that the index was built from.
    """
    path = place_of(given)
    if kind_of(path) != "classifier":
        raise ModelError(
            f"'{path}' is no classifier (it has no {FILE_NAME}), and index '{index.path}' is of one",
            fix="give the classifier's directory with --model",
        )
    index.check_fingerprint("tokenizer", classes_fingerprint(path))
    index.check_fingerprint("model", classifier_fingerprint(path))
    model = load_classifier(given)
    config = index.attributes["config"]
    examples = read_examples(_find_data(index, Path(path)), _columns(config))
    known = training_rows(path, examples)
    rows, held_out = known or (np.zeros(0, np.int64), None)
    if config["rows"] == "all":
        rows = np.arange(len(examples))
    expected, found = index.attributes["fingerprints"]["corpus"], examples.fingerprint(rows)
    if len(rows) != index.n_chunks or found != expected:
        raise IndexMismatch(
            f"the data file {examples.path} is not what index {index.path} was built from "
            f"(expected {expected[:12]}, found {found[:12]})",
            fix="put the original file back, or build a new index",
        )
    model.attach(examples.inputs, rows, class_numbers(examples, model.classes), examples.ids)
    if held_out is not None:
        model.held_out = held_out
    return model


def find_row(model: ClassifierModel, wanted: str | int) -> int:
    """The row of the index's file with this id or, where ids are numbers or none fits, this number.

    Raises QueryError: neither.
    """
    text = str(wanted)
    if text in model.row_ids:
        return model.row_ids.index(text)
    if text.isdigit() and int(text) < len(model.row_ids):
        return int(text)
    raise QueryError(
        f"there is no row '{text}' (the file has {len(model.row_ids):,}, "
        f"from '{model.row_ids[0]}' to '{model.row_ids[-1]}')",
        fix="give the number, from 0, or the id of a row",
    )


def _read_description(directory: Path) -> tuple[dict[str, Any], str]:
    """Read classifier.json, and the code of the network: empty for one of ours."""
    file = directory / FILE_NAME
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        if description["classifier_version"] != _VERSION:
            raise ValueError(f"version {description['classifier_version']}, this release reads {_VERSION}")
        missing = {"network", "classes", "shape", "mean", "deviation", "columns"} - set(description)
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if description["network"]["name"] != "adapter":
            return description, ""
        file = directory / _ADAPTER
        return description, file.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} cannot be read: {error}", fix="train the model again")


def _columns(record: dict[str, Any]) -> Columns:
    stored = record["columns"]
    return Columns(stored["label"], stored["id"], tuple(stored["drop"]), tuple(stored["features"]))


def _find_data(index: Index, model: Path) -> Path:
    """The index's data file: where it was, or of the same name beside the index or the model."""
    recorded = str(index.attributes["config"]["sources"][0])
    name = Path(recorded).name
    beside = Path(os.path.abspath(model)).parent  # noqa: PTH100 (resolve() would follow links)
    places = [Path(place) for place in recorded_places(recorded, index.path)]
    if isinstance(index.path, Path):  # a URL has nothing beside it
        places.append(index.path.parent / name)
    # a copy of the index alone, on the machine where it was built
    known = recall("places", index.attributes["fingerprints"]["corpus"])
    for place in [*places, beside / name, *([Path(known)] if known else [])]:
        if place.is_file():
            return place
    raise CorpusError(
        f"the data file of index '{index.path}' is gone: {places[0] if places else recorded}",
        fix=f"put {name} back, or beside the index",
    )
