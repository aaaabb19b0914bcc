"""Operators of further checkpoints in an index: found, fitted one after the other, opened for queries.

The arrays of checkpoint i ≥ 1 are ``operators/checkpoint_<i>.<name>``, each like ``operators/<name>`` of the
index's own model; the group's attribute ``checkpoints`` lists what else `Operators.from_arrays` needs, with
path and weights' fingerprint.

Every checkpoint has subsets of its own, as many and as large as the index's: C checkpoints make C·K different
measurements of a query instead of C times the same K, and the recovery is that much better determined.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.errors import IndexMismatch
from stride_cli.data.residual_codes import BEFORE
from stride_cli.errors import ModelError
from stride_cli.operators.beginnings import know_beginnings
from stride_cli.operators.designs import Designs, design_seed
from stride_cli.operators.fitting import FitRun, fit_operators, set_step
from stride_cli.operators.opener import Opener
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators, array_name
from stride_cli.output import note
from stride_cli.recorded_paths import find_recorded, recorded_path
from stride_cli.remembered import recall, remember

if TYPE_CHECKING:
    from index_format.reader import Index
    from index_format.writer import GroupWriter
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel


@dataclass(frozen=True)
class Checkpoint:
    """A model beside the index's own.

    Attributes
    ----------
    path : str             absolute where it is local, else as given
    fingerprint : str      of its weights
    design_seed : int      of its design matrix
    settings : str         their fingerprint; None for classifiers, and where an earlier version stored it
    """

    path: str
    fingerprint: str
    design_seed: int
    settings: str | None = None


def find_checkpoints(index: Index, paths: Sequence[str | Path]) -> list[Checkpoint]:
    """The checkpoints at some paths, checked without loading a language model's weights.

    Left out, with a note: the index's own model, and what has the weights of an earlier one.

    Raises
    ------
    ModelError         there is no model, it has no tokenizer, or it reads less than a chunk
    IndexMismatch      its tokenizer (of a classifier: its classes) is not the index's
    """
    from stride_cli.models.loading import model_fingerprint, model_settings

    own = index.attributes["fingerprints"]["model"]
    found: list[Checkpoint] = []
    for given in paths:
        local = Path(given).expanduser()
        path = str(local.resolve()) if local.exists() else str(given)
        fingerprint = model_fingerprint(path)
        if fingerprint == own:
            note(f"{given} is the index's own model, which takes part in any case")
            continue
        if any(fingerprint == checkpoint.fingerprint for checkpoint in found):
            note(f"{given} has the weights of an earlier checkpoint: left out")
            continue
        _check_readable(index, path)
        seed = design_seed(index.seed, len(found) + 1)
        found.append(Checkpoint(path, fingerprint, seed, model_settings(path)))
    return found


def _check_readable(index: Index, path: str) -> None:
    """Whether a checkpoint reads the index's chunks: the same tokens (or classes), a context long enough."""
    from stride_cli.corpus.context import context_length
    from stride_cli.models.fingerprints import tokenizer_fingerprint
    from stride_cli.models.kinds import kind_of, kind_of_index
    from stride_cli.models.language.tokenizer import load_tokenizer

    kind = kind_of_index(index) == "classifier"
    if kind_of(path) != kind_of_index(index):
        wanted = "a classifier" if kind else "a language model"
        raise ModelError(
            f"checkpoint '{path}' is not {wanted}, and index '{index.path}' is of one",
            fix="give checkpoints of the same training",
        )
    if kind:
        from stride_cli.models.classifier.directory import classes_fingerprint

        tokenizer = classes_fingerprint(path)
    else:
        tokenizer = tokenizer_fingerprint(load_tokenizer(path))
    expected = index.attributes["fingerprints"]["tokenizer"]
    if tokenizer != expected:
        what = "classes" if kind else "tokenizer"
        raise IndexMismatch(
            f"checkpoint '{path}' has another {what} than index '{index.path}' "
            f"(expected {expected}, found {tokenizer})",
            fix="give checkpoints of the same training, or of models that share the tokenizer",
        )
    longest = index.attributes["block_size"]
    context = None if kind else context_length(path)
    if context is not None and context < longest:
        raise ModelError(
            f"checkpoint '{path}' reads {context} tokens (expected {longest}, the block size of index "
            f"'{index.path}')",
            fix="leave it out, or build the index with a smaller --block-size",
        )


def fit_with_checkpoints(
    writer: GroupWriter,
    models: list[AttributableModel],
    chunks: ChunkReader,
    index: Index,
    settings_for: Callable[[AttributableModel], Any],
    checkpoints: Sequence[Checkpoint],
    run: FitRun,
) -> list[dict[str, Any]]:
    """Fit the index's own model, then each checkpoint; one model with its operators in memory at a time.

    With checkpoints, what is fitted is committed, and not fitted again by a build that resumes.

    Parameters
    ----------
    models : [the index's own model]; emptied, so that the caller need not keep it from being freed
    settings_for : ClosedSettings or SgdSettings of a model
    run : FitRun      whose scratch directory is the writer's

    Returns
    -------
    list of dict, one a model: ``attributes`` (what the group says of it) and ``report`` (its loss in nats or
    None, and seconds: load, fit, write)

    Raises
    ------
    NumericalError, ModelError, UsageError
    """
    scratch = writer.scratch_path("pass").parent
    done: list[dict[str, Any]] = list((writer.state or {}).get("fitted", ()))
    opener = Opener.like(models[0])
    know_beginnings(
        models[0],
        chunks,
        settings_for(models[0]),
        base=run.base,
        scratch=scratch,
        save_seconds=run.save_seconds,
    )
    for number in range(len(done), 1 + len(checkpoints)):
        begun = time.perf_counter()
        if number:
            models.clear()  # freed before the next one is loaded
            note(f"checkpoint {number} of {len(checkpoints)}: {checkpoints[number - 1].path}")
            models.append(opener.load(checkpoints[number - 1].path))
        loaded = time.perf_counter() - begun
        # without checkpoints there is one fit only
        place = scratch / f"checkpoint-{number}" if checkpoints else scratch
        place.mkdir(exist_ok=True)
        design = Designs.of(index, checkpoints[number - 1].design_seed if number else None)
        workers = run.workers
        if workers is not None and number:
            workers = workers.at(checkpoints[number - 1].path, checkpoints[number - 1].design_seed)
        own = replace(run, scratch=place, workers=workers)
        entry = _fit_into(writer, number, models[0], chunks, design, settings_for(models[0]), own)
        if number:
            entry["attributes"]["design_seed"] = checkpoints[number - 1].design_seed
        entry["report"]["load"] = loaded
        done.append(entry)
        if checkpoints:
            writer.commit({"fitted": done})
            shutil.rmtree(place)
    models.clear()
    return done


def _fit_into(
    writer: GroupWriter,
    number: int,
    model: AttributableModel,
    chunks: ChunkReader,
    design: Designs,
    settings: Any,
    run: FitRun,
) -> dict[str, Any]:
    """Fit the operators of one model, and append them to the index's group."""
    begun = time.perf_counter()
    operators = fit_operators(
        model,
        chunks,
        np.asarray(design.columns),
        design.n_subsets,
        settings,
        run=run,
    )
    agreement = set_step(SteeredModel.of(model, operators), chunks, settings.seed)
    fitted = time.perf_counter()
    arrays, attributes = operators.to_arrays()
    attributes["settings"] = asdict(settings)
    attributes["step_agreement"] = agreement
    attributes["model_fingerprint"] = model.fingerprint
    for name, values in arrays.items():
        writer.append(array_name(name, number), values)
    if number == 0 and operators.averaged and chunks.before is not None:
        writer.append(BEFORE, np.asarray(chunks.before))
    curve = operators.log.get("loss", np.zeros(0))
    report = {
        "loss": float(curve[-1]) if len(curve) else None,
        "fit": fitted - begun,
        "write": time.perf_counter() - fitted,
    }
    return {"attributes": attributes, "report": report}


def recorded_checkpoint(checkpoint: Checkpoint, index: str | Path) -> dict[str, Any]:
    """What the index at `index` records of a checkpoint beside its operators: path, settings."""
    path = checkpoint.path
    if Path(path).exists():  # else a hub id
        remember("places", checkpoint.fingerprint, path)  # for copies of the index alone
        path = recorded_path(path, index)
    return {"path": path, "settings_fingerprint": checkpoint.settings}


def stored_checkpoints(index: Index) -> list[Checkpoint]:
    """The checkpoints beside its own model that an index has operators of, where they are by now;
    StageMissing without operators."""
    with index.understanding("operators"):
        listed = index.group_attributes("operators").get("checkpoints", [])
        for entry in listed:
            texts = [entry["path"], entry["model_fingerprint"], entry.get("settings_fingerprint") or ""]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a checkpoint's path or fingerprint is no text")
            if type(entry.get("design_seed", 0)) is not int:
                raise TypeError("a design's seed is no number")
    if any("design_seed" not in entry for entry in listed):
        raise IndexMismatch(
            f"the checkpoints' operators in index '{index.path}' were fitted by an earlier version "
            "(expected subsets of their own)",
            fix=f"fit them again: stride train --index {index.path} --checkpoints … --overwrite",
        )
    found = [
        find_recorded(entry["path"], index.path)
        or recall("places", entry["model_fingerprint"])  # a copy of the index alone
        or entry["path"]
        for entry in listed
    ]
    return [
        Checkpoint(path, entry["model_fingerprint"], entry["design_seed"], entry.get("settings_fingerprint"))
        for path, entry in zip(found, listed, strict=True)
    ]


def stored_designs(index: Index) -> Designs:
    """The subsets that the index's operators answer for, of all its checkpoints."""
    seeds = [checkpoint.design_seed for checkpoint in stored_checkpoints(index)]
    return Designs.stacked([Designs.of(index, seed) for seed in (None, *seeds)])


def open_checkpoints(index: Index, own: AttributableModel) -> list[SteeredModel]:
    """The further checkpoints of an index, loaded like its own model, with their operators.

    Raises
    ------
    ModelError         a checkpoint is gone
    IndexMismatch      its weights are not those that the operators were fitted on
    """
    return [
        SteeredModel.of(open_stored(index, own, number), Operators.from_index(index, number))
        for number in range(1, 1 + len(stored_checkpoints(index)))
    ]


def open_stored(index: Index, own: AttributableModel, number: int) -> AttributableModel:
    """The model of a stored checkpoint (1, 2, …), its weights compared; raises as `open_checkpoints`."""
    from stride_cli.models.language.files import refuse_download
    from stride_cli.models.loading import model_fingerprint, model_settings

    wanted = stored_checkpoints(index)[number - 1]
    fix = f"put it back, or fit without it: stride train --index {index.path} --overwrite"
    refuse_download(wanted.path, named_by=f"index '{index.path}'")
    try:
        fingerprint = model_fingerprint(wanted.path)
    except ModelError as error:
        raise ModelError(
            f"checkpoint {number} of index '{index.path}' cannot be read at '{wanted.path}' "
            f"(expected weights {wanted.fingerprint}): {error.message}",
            fix=fix,
        ) from error
    if fingerprint != wanted.fingerprint:
        raise IndexMismatch(
            f"checkpoint {number} of index '{index.path}', '{wanted.path}', has changed "
            f"(expected weights {wanted.fingerprint}, found {fingerprint})",
            fix=fix,
        )
    if wanted.settings is not None and (settings := model_settings(wanted.path)) != wanted.settings:
        raise IndexMismatch(
            f"checkpoint {number} of index '{index.path}', '{wanted.path}', has changed "
            f"(expected settings {wanted.settings}, found {settings})",
            fix=fix,
        )
    return Opener.like(own).load(wanted.path)
