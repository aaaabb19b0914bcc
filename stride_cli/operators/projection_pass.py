"""Projections for an index whose operators are there: a pass over the chunks that have none."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexExists, IndexMismatch
from stride_cli.errors import UsageError
from stride_cli.operators.checkpoints import find_checkpoints, open_stored, stored_checkpoints
from stride_cli.operators.corpus_pass import go_over_corpus
from stride_cli.operators.gradient_sums import PassSettings
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.projections import FORM, understood
from stride_cli.operators.redundancy import FORM as COMMON_FORM
from stride_cli.operators.redundancy import Redundancy
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators, array_name

if TYPE_CHECKING:
    from index_format.reader import Index
    from index_format.writer import GroupWriter
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.corpus_pass import PassWorkers

_REPLACED = re.compile(r"[/.](projection|sketch)_\w+$")  # arrays; sketches are stride 0.1's
_SETTINGS = {
    "space": "spaces",
    "layer": "layer",
    "rank": "ranks",
    "buckets": "n_buckets",
    "stability": "stability",
    "damping": "damping",
    "curvature": "curvature",
    "residuals": "residuals",
    "normalize": "normalize",
    "seed": "seed",
}  # option → what of the operators' settings it decides


def project_index(
    writer: GroupWriter,
    index: Index,
    model: AttributableModel,
    chunks: ChunkReader,
    size: int,
    *,
    save_seconds: float,
    workers: PassWorkers | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write an index's operators anew, as they are, with projections of every chunk by every model.

    What has been projected already, to as many bytes, is kept. A process that dies is gone on from.

    Parameters
    ----------
    model : the index's own
    workers : who projects, where it is not this process

    Returns
    -------
    attributes : what the group is to be published with
    reports : of each model, its loss in nats when it was fitted, and seconds: load, fit, write

    Raises
    ------
    ModelError, IndexMismatch      a checkpoint is gone, or has changed
    NumericalError                 a loss is not finite
    """
    stored, further = index.group_attributes("operators"), stored_checkpoints(index)
    entries = [stored, *stored.get("checkpoints", [])]
    scratch = writer.scratch_path("pass").parent
    reports: list[dict[str, Any]] = list((writer.state or {}).get("reports", ()))
    for number in range(len(reports), len(entries)):
        # 1. Each model with its operators, and a pass over the chunks that it has not projected yet
        begun = time.perf_counter()
        own = open_stored(index, model, number) if number else model
        loaded = time.perf_counter() - begun
        operators, fit = Operators.from_index(index, number), entries[number]["settings"]
        known = operators.projections
        place = scratch / f"model-{number}"
        place.mkdir(exist_ok=True)
        known = known if known is not None and known.size == size else None
        steered = SteeredModel.of(own, operators)
        of = further[number - 1] if number else None
        _, made = go_over_corpus(
            steered,
            chunks,
            PassSettings(fit["batch_tokens"], size, fit["seed"]),
            known=known,
            scratch=place,
            save_seconds=save_seconds,
            workers=workers if workers is None or of is None else workers.at(of.path, of.design_seed),
        )
        assert made is not None
        fitted = time.perf_counter()
        for name, values in (made.arrays() | Redundancy.of(made).arrays()).items():
            writer.append(array_name(name, number), values)
        report = {"load": loaded, "fit": fitted - begun - loaded, "write": time.perf_counter() - fitted}
        reports.append({"loss": float(operators.log["loss"][-1]), **report})
        writer.commit({"reports": reports})
        shutil.rmtree(place)
    # 2. The other arrays as they are
    for name in index.names("operators"):
        if not _REPLACED.search(name):
            for piece in index.shards(name):
                writer.append(name, piece)
    # 3. Attributes that say what is projected now
    for entry in entries:
        entry |= {"project": size, "projected": chunks.n_chunks, "project_seed": entry["settings"]["seed"]}
        entry["project_form"], entry["common_form"] = FORM, COMMON_FORM
        entry["settings"]["project"] = size
        for about in (entry, entry["settings"]):  # of stride 0.1
            about.pop("sketch", None)
            about.pop("sketch_seed", None)
    return stored, reports


def check_projectable(index: Index, options: ClosedOptions, model: AttributableModel) -> None:
    """Refuse what `project_index` cannot do of what these options ask for.

    Raises
    ------
    UsageError         the operators' gates are not sums over chunks' gradients, or an option asks for others
    IndexMismatch      they are of another model
    IndexExists        every chunk is projected
    """
    stored = index.group_attributes("operators")
    again = "fit operators anew with --overwrite"
    if stored["direct_scale"] is None:
        raise UsageError(
            f"projections need gates that are sums over chunks' gradients, which the operators of index "
            f"'{index.path}' do not have (fit {stored['fit']}, {stored['space']})",
            fix=f"leave out --project, or {again} and the default fit",
        )
    if stored["model_fingerprint"] != model.fingerprint:
        raise IndexMismatch(
            f"the operators of index '{index.path}' are of another model (expected "
            f"{stored['model_fingerprint']}, found {model.fingerprint})",
            fix=again,
        )
    # without projections: what else would be fitted may not allow them, but is there already
    wanted = asdict(resolve_settings(replace(options, project=0), model, index))
    # the first operators did not say
    settings = {"residuals": "final", "normalize": 0.0, **stored["settings"]}
    for name, field in _SETTINGS.items():
        found, asked = settings[field], wanted[field]
        asked = list(asked) if isinstance(asked, tuple) else asked
        if getattr(options, name) is not None and asked != found:
            raise UsageError(
                f"the operators of index '{index.path}' have {field} {found} (expected {asked})",
                fix=f"leave out {name}, for projections by the operators that are there, or {again}",
            )
    checkpoints = stored.get("checkpoints", [])
    if options.checkpoints:
        asked = [checkpoint.fingerprint for checkpoint in find_checkpoints(index, options.checkpoints)]
        if asked != [entry["model_fingerprint"] for entry in checkpoints]:
            raise UsageError(
                f"the operators of index '{index.path}' are of other checkpoints",
                fix=f"leave out checkpoints, for projections by those that are there, or {again}",
            )
    if all(
        (entry.get("project"), entry.get("projected")) == (options.project, index.n_chunks)
        and understood(entry)
        and entry.get("common_form") == COMMON_FORM
        for entry in (stored, *checkpoints)
    ):
        raise IndexExists(
            f"index '{index.path}' has projections of every chunk already",
            fix="query it, or give another size",
        )
