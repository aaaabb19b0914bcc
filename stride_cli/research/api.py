"""Compare methods, tune operators, select documents: research commands as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.api import as_place
from stride_cli.attribution.options import SharingOptions
from stride_cli.data.workspace import WorkspacePath
from stride_cli.research.evaluation.options import LdsOptions
from stride_cli.research.selection.options import SelectOptions
from stride_cli.research.training.options import TruthOptions
from stride_cli.research.tuning.options import TuneOptions

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from stride_cli.research.evaluation.records import LdsRecord
    from stride_cli.research.selection.select import Selection
    from stride_cli.research.tuning.records import TrialRecord

__all__ = ["SelectOptions", "TruthOptions", "TuneOptions", "evaluate", "select", "tune"]


def evaluate(
    where: str | Path | RemotePath | WorkspacePath,
    queries: str | Path,
    *,
    methods: Sequence[str] = ("stride",),
    truth: TruthOptions | None = None,
    draws: int = LdsOptions.draws,
    sharing: SharingOptions | None = None,
) -> list[LdsRecord]:
    """Linear datamodeling score of methods, on models retrained on random subsets; trains what is missing.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names its model too
    queries : file of queries
    methods : names, with options as for `stride baseline`
    truth : TruthOptions      retrained models; default: 64 subsets of half of the chunks, one seed
    draws : bootstrap resamples
    sharing : SharingOptions      who runs the methods; default: this process

    Returns
    -------
    list of ``stride.lds/1``, one for each method

    Raises
    ------
    UsageError, QueryError, ModelError
    """
    from stride_cli.research.evaluation.bench import Bench, build_truth_of, check_method
    from stride_cli.research.evaluation.compare import lds_record
    from stride_cli.research.evaluation.workers import Runs

    for method in methods:
        check_method(method)
    truth = truth or TruthOptions(n_subsets=64, alpha=0.5)
    place, path = as_place(where), Path(queries)
    build_truth_of(place, path, truth)
    bench = Bench(place, queries=path, alpha=truth.alpha)
    run = Runs(bench, methods, sharing) if sharing is not None and sharing.shared else None
    return [lds_record(entry, ground) for entry, ground in bench.lds(methods, draws=draws, run=run)]


def select(
    where: str | Path | RemotePath | WorkspacePath,
    task: str | Path,
    options: SelectOptions | None = None,
    *,
    sharing: SharingOptions | None = None,
) -> Selection:
    """Select documents to train on for a task, with equally many by BM25 and at random.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names its model too
    task : file of queries
    options : SelectOptions
    sharing : SharingOptions      who scores; default: this process

    Returns
    -------
    Selection

    Raises
    ------
    UsageError      more documents than the corpus has, an index without text, something at ``out``
    StageMissing    the index has no operators, and the method needs them
    """
    from stride_cli.research.selection.select import run_selection

    return run_selection(as_place(where), Path(task), options or SelectOptions(), sharing)[2]


def tune(
    where: str | Path | RemotePath | WorkspacePath,
    options: TuneOptions | None = None,
    *,
    on_trial: Callable[[TrialRecord], None] = lambda record: None,
) -> dict[str, Any]:
    """Sweep settings of the operators; see `research.tuning.tune.tune` for the criterion. Writes no file.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names its model too
    options : TuneOptions
    on_trial : called with a ``stride.trial/1`` after each trial

    Returns
    -------
    dict      a ``stride.tune/1``, and ``settings``: what `write_settings` takes

    Raises
    ------
    UsageError, StageMissing, NumericalError
    """
    from stride_cli.research.tuning.tune import tune_index

    return tune_index(as_place(where), options or TuneOptions(), on_trial)
