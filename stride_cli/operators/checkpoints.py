"""Several models of one index: its own, and further checkpoints, each with operators and subsets of its own.

Everything else is written for one model; here is where the others are found, listed and opened. The arrays of
checkpoint i ≥ 1 are ``operators/checkpoint_<i>.<name>``, each like ``operators/<name>`` of the index's own
model; the group's attribute ``checkpoints`` lists what else `Operators.from_arrays` needs, with path and
weights' fingerprint.

Every checkpoint has subsets of its own, as many and as large as the index's: C checkpoints make C·K different
measurements of a query instead of C times the same K, and the recovery is that much better determined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.design import row_sizes
from index_format.errors import IndexMismatch
from stride_cli.errors import ModelError
from stride_cli.models.loading import Opener, model_fingerprint, model_settings
from stride_cli.operators.designs import Designs, design_seed
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import note
from stride_cli.remembered import find_recorded, recall, recorded_path, remember

if TYPE_CHECKING:
    from index_format.reader import Index
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

    def record(self, index: str | Path) -> dict[str, Any]:
        """Make the entry that the index at `index` keeps beside its operators."""
        path = self.path
        if Path(path).exists():  # else a hub id
            remember("places", self.fingerprint, path)  # for copies of the index alone
            path = recorded_path(path, index)
        return {"path": path, "settings_fingerprint": self.settings}

    @classmethod
    def read(cls, entry: Mapping[str, Any], index: Index) -> Checkpoint:
        """Read an entry, and find where the model is by now; KeyError or TypeError where it is none."""
        path, fingerprint, settings = (
            entry["path"],
            entry["model_fingerprint"],
            entry.get("settings_fingerprint"),
        )
        if not all(isinstance(text, str) for text in (path, fingerprint, settings or "")):
            raise TypeError("a checkpoint's path or fingerprint is no text")
        if type(entry["design_seed"]) is not int:
            raise TypeError("a design's seed is no number")
        found = find_recorded(path, index.path) or recall("places", fingerprint) or path
        return cls(found, fingerprint, entry["design_seed"], settings)


def find_checkpoints(index: Index, paths: Sequence[str | Path]) -> list[Checkpoint]:
    """Find the checkpoints at some paths, and check them without loading a language model's weights.

    Left out, with a note: the index's own model, and what has the weights of an earlier one.

    Raises
    ------
    ModelError         there is no model, it has no tokenizer, or it reads less than a chunk
    IndexMismatch      its tokenizer (of a classifier: its classes) is not the index's
    """
    own = index.attributes["fingerprints"]["model"]
    found: list[Checkpoint] = []
    for given in paths:
        local = Path(given).expanduser()
        path = str(local.resolve()) if local.exists() else str(given)
        fingerprint = model_fingerprint(path)
        if fingerprint == own:
            note(f"{given} is the index's own model, which takes part in any case")
        elif any(fingerprint == checkpoint.fingerprint for checkpoint in found):
            note(f"{given} has the weights of an earlier checkpoint: left out")
        else:
            _check_readable(index, path)
            seed = design_seed(index.seed, len(found) + 1)
            found.append(Checkpoint(path, fingerprint, seed, model_settings(path)))
    return found


def _check_readable(index: Index, path: str) -> None:
    """Refuse a checkpoint that does not read the index's chunks: other tokens or classes, a short context."""
    from stride_cli.models.configuration import context_length
    from stride_cli.models.kinds import kind_of, kind_of_index
    from stride_cli.models.language.fingerprints import tokenizer_fingerprint
    from stride_cli.models.language.tokenizer import load_tokenizer

    classifier = kind_of_index(index) == "classifier"
    if kind_of(path) != kind_of_index(index):
        raise ModelError(
            f"checkpoint '{path}' is not {'a classifier' if classifier else 'a language model'}, and index "
            f"'{index.path}' is of one",
            fix="give checkpoints of the same training",
        )
    if classifier:
        from stride_cli.models.classifier.directory import classes_fingerprint

        found, context = classes_fingerprint(path), None
    else:
        found, context = tokenizer_fingerprint(load_tokenizer(path)), context_length(path)
    expected, longest = index.attributes["fingerprints"]["tokenizer"], index.attributes["block_size"]
    if found != expected:
        raise IndexMismatch(
            f"checkpoint '{path}' has another {'classes' if classifier else 'tokenizer'} than index "
            f"'{index.path}' (expected {expected}, found {found})",
            fix="give checkpoints of the same training, or of models that share the tokenizer",
        )
    if context is not None and context < longest:
        raise ModelError(
            f"checkpoint '{path}' reads {context} tokens (expected {longest}, the block size of index "
            f"'{index.path}')",
            fix="leave it out, or build the index with a smaller --block-size",
        )


def stored_checkpoints(index: Index) -> list[Checkpoint]:
    """List the checkpoints that an index has operators of beside its own model's; StageMissing without
    operators."""
    with index.understanding("operators"):
        listed = index.group_attributes("operators").get("checkpoints", [])
        if all("design_seed" in entry for entry in listed):
            return [Checkpoint.read(entry, index) for entry in listed]
    raise IndexMismatch(
        f"the checkpoints' operators in index '{index.path}' were fitted by an earlier version "
        "(expected subsets of their own)",
        fix=f"fit them again: stride train --index {index.path} --checkpoints … --overwrite",
    )


def stored_designs(index: Index) -> Designs:
    """Read the subsets that operators answer for, of all models; sizes leave out chunks that
    were appended since the fit."""
    seeds = [checkpoint.design_seed for checkpoint in stored_checkpoints(index)]
    designs, fitted = [Designs.of(index, seed) for seed in (None, *seeds)], len(index.array("operators/seen"))
    if fitted < index.n_chunks:
        sizes = [each.row_sizes - row_sizes(each.columns[fitted:], each.n_subsets) for each in designs]
        designs = [replace(each, row_sizes=own) for each, own in zip(designs, sizes, strict=True)]
    return Designs.stacked(designs)


def open_checkpoints(index: Index, own: AttributableModel) -> list[SteeredModel]:
    """Load the further checkpoints of an index, as its own model was loaded, with their operators.

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
    """Load a stored checkpoint (1, 2, …) and compare its weights; raises as `open_checkpoints`."""
    from stride_cli.models.language.files import refuse_download

    wanted = stored_checkpoints(index)[number - 1]
    called = f"checkpoint {number} of index '{index.path}'"
    fix = f"put it back, or fit without it: stride train --index {index.path} --overwrite"
    refuse_download(wanted.path, own.spec.permissions, named_by=f"index '{index.path}'")
    try:
        pairs = [("weights", wanted.fingerprint, model_fingerprint(wanted.path))]
    except ModelError as error:
        raise ModelError(
            f"{called} cannot be read at '{wanted.path}' (expected weights {wanted.fingerprint}): "
            f"{error.message}",
            fix=fix,
        ) from error
    if wanted.settings is not None:
        pairs.append(("settings", wanted.settings, model_settings(wanted.path) or "none"))
    for what, expected, found in pairs:
        if found != expected:
            raise IndexMismatch(
                f"{called}, '{wanted.path}', has changed (expected {what} {expected}, found {found})", fix=fix
            )
    return Opener.like(own).load(wanted.path)
