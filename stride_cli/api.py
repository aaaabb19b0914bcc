"""What the commands do, as functions: build an index, fit operators, answer queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.location import locate
from stride_cli.attribution.answer import Answer
from stride_cli.attribution.calibrating import calibrate
from stride_cli.attribution.options import QueryOptions, SharingOptions
from stride_cli.attribution.prepare import prepare
from stride_cli.attribution.session import Session
from stride_cli.corpus.options import BuildOptions
from stride_cli.data.query_files import as_query
from stride_cli.data.workspace import WorkspacePath, open_model
from stride_cli.evaluation.options import LdsOptions
from stride_cli.operators.options import (
    ClosedOptions,
    FitRunOptions,
    SgdOptions,
    TrainOptions,
)
from stride_cli.permissions import Permissions, permitted
from stride_cli.selection.options import SelectOptions
from stride_cli.training.index_build import build_index, build_index_of_run
from stride_cli.training.index_fit import fit_index as train
from stride_cli.training.options import TruthOptions

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from stride_cli.audit.judge import Finding
    from stride_cli.audit.options import AuditOptions
    from stride_cli.data.queries import Query
    from stride_cli.evaluation.options import HitOptions
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.schema.evaluation_records import LdsRecord
    from stride_cli.schema.tuning_records import TrialRecord
    from stride_cli.schema.verify_records import VerifyHitRecord
    from stride_cli.selection.select import Selection
    from stride_cli.serve.options import ServeOptions
    from stride_cli.serve.running import Server
    from stride_cli.tuning.options import TuneOptions

__all__ = [
    "Answer",
    "BuildOptions",
    "ClosedOptions",
    "FitRunOptions",
    "Permissions",
    "QueryOptions",
    "SelectOptions",
    "Session",
    "SgdOptions",
    "SharingOptions",
    "TrainOptions",
    "TruthOptions",
    "WorkspacePath",
    "as_query",
    "audit",
    "build_index",
    "build_index_of_run",
    "calibrate",
    "demo_corpus",
    "evaluate",
    "open_model",
    "open_server",
    "permitted",
    "prepare",
    "prepare_demo",
    "select",
    "train",
    "tune",
    "verify_hit",
]


def verify_hit(
    where: str | Path | RemotePath | WorkspacePath,
    prompt: str | Query | Sequence[Mapping[str, Any]],
    options: QueryOptions | None = None,
    check: HitOptions | None = None,
    *,
    response: str | None = None,
    span: str | None = None,
    documents: Sequence[str] | None = None,
    model: AttributableModel | None = None,
) -> VerifyHitRecord:
    """Retrain without a query's top documents, and without as many random ones: did its loss depend on them?

    What is trained is kept beside the index, and an interrupted call goes on.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names model, device and dtype too
    prompt, response, span : see `Session.query`; or the `Answer.query` of an answer; or prompts with what
        belongs to them, ``{"prompt", "response", "instead"}``, of several as of `Session.query_pooled`: the
        mean of their losses. With ``instead``, it is the log-odds of the token in which the two part
    options : QueryOptions       its `top` says how many documents
    check : HitOptions           how many models, retrained by what
    documents : ids, optional    these documents instead of the query's; no operators are needed then
    model : AttributableModel, optional    else loaded

    Returns
    -------
    dict      a ``stride.verify_hit/1``

    Raises
    ------
    UsageError      fewer documents than asked for, an unknown id; a response beside several prompts
    QueryError      a prompt that cannot be asked, or none
    ModelError      the model has no recipe, and no command is given
    """
    from stride_cli.evaluation.hit_record import verify_hit as verify
    from stride_cli.evaluation.options import HitOptions, HitQuestion

    question = HitQuestion(prompt, response, span, documents)
    return verify(_place(where), question, options or QueryOptions(), check or HitOptions(), model=model)


def open_server(
    places: Sequence[WorkspacePath], options: ServeOptions | None = None, defaults: QueryOptions | None = None
) -> Server:
    """A server that is bound, whose indexes are open; its `run` answers until it is ended.

    Parameters
    ----------
    places : of one or more indexes, with their models
    options : ServeOptions
    defaults : QueryOptions      of options that requests do not give

    Raises
    ------
    MissingExtraError      Starlette or uvicorn is not installed
    UsageError             the address cannot be listened at; the index is of a classifier
    and what `Session.open` raises
    """
    from stride_cli.serve.running import Server

    return Server(places, options, defaults)


def tune(
    index_path: str | Path | RemotePath,
    options: TuneOptions | None = None,
    *,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    on_trial: Callable[[TrialRecord], None] = lambda record: None,
) -> dict[str, Any]:
    """Sweep settings of the operators; see `stride_cli.tuning.tune.tune` for the criterion. Writes no file.

    Parameters
    ----------
    options : TuneOptions
    on_trial : called with a ``stride.trial/1`` after each trial

    Returns
    -------
    dict      a ``stride.tune/1``, and ``settings``: what `stride_cli.config.write_settings` takes

    Raises
    ------
    UsageError, StageMissing, NumericalError
    """
    from stride_cli.tuning.options import TuneOptions
    from stride_cli.tuning.tune import tune_index

    where = WorkspacePath(locate(index_path), model_path, device, dtype)
    return tune_index(where, options or TuneOptions(), on_trial)


def audit(
    session: Session,
    benchmark: str | Path,
    *,
    controls: str | Path | None = None,
    options: AuditOptions | None = None,
) -> list[Finding]:
    """Is a benchmark in the corpus, and has the model learnt it from there? What `stride audit` judges.

    Parameters
    ----------
    benchmark, controls : files of items, as corpora are; None: controls as the options say
    options : AuditOptions

    Returns
    -------
    list of Finding, in the order of the items; ``to_record()`` gives a ``stride.audit/1``

    Raises
    ------
    CorpusError, UsageError
    """
    from stride_cli.audit.judge import audit_files
    from stride_cli.audit.options import AuditOptions
    from stride_cli.corpus.readers import ReadOptions

    against = None if controls is None else str(controls)
    return audit_files(lambda: session, str(benchmark), against, options or AuditOptions(), ReadOptions())[1]


def select(
    where: str | Path | RemotePath | WorkspacePath,
    task: str | Path,
    options: SelectOptions | None = None,
    *,
    sharing: SharingOptions | None = None,
) -> Selection:
    """Documents to train on for a task, with equally many by BM25 and at random beside them.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names model, device and dtype too
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
    from stride_cli.selection.select import run_selection

    return run_selection(_place(where), Path(task), options or SelectOptions(), sharing)[2]


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
    where : path of the index, or a `WorkspacePath` that names model, device and dtype too
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
    from stride_cli.evaluation.bench import Bench, build_truth_of, check_method
    from stride_cli.evaluation.compare import lds_record
    from stride_cli.evaluation.shared_scores import SharedRuns

    for method in methods:
        check_method(method)
    truth = truth or TruthOptions(n_subsets=64, alpha=0.5)
    place, path = _place(where), Path(queries)
    build_truth_of(place, path, truth)
    bench = Bench(place, queries=path, alpha=truth.alpha)
    run = SharedRuns(bench, methods, sharing) if sharing is not None and sharing.shared else None
    return [lds_record(entry, ground) for entry, ground in bench.lds(methods, draws=draws, run=run)]


def demo_corpus() -> tuple[Path, list[dict[str, Any]]]:
    """The embedded corpus file, and its prompts: ``{prompt, answer, documents, listed}``."""
    import json

    from stride_cli.demo.demo_model import CORPUS, PROMPTS

    return CORPUS, json.loads(PROMPTS.read_text(encoding="utf-8"))


def prepare_demo(
    out: str | Path, *, train_anew: bool = False, say: Callable[[str], None] = lambda text: None
) -> tuple[Session, list[dict[str, Any]]]:
    """Model, index and operators of the embedded corpus, under ``out``; what is there already is used again.

    Parameters
    ----------
    out : directory      gets ``corpus.jsonl``, ``model/`` and ``demo.stride/``
    train_anew : train the model, instead of taking the one that comes with STRIDE
    say : called with a line of text before each stage

    Returns
    -------
    session : Session, prompts : list of dict, as from `demo_corpus`
    """
    from index_format.durable import replace_file
    from stride_cli.demo.demo_model import copy_demo_model, train_demo_model

    corpus, prompts = demo_corpus()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    copy, model_path, index_path = out / "corpus.jsonl", out / "model", out / "demo.stride"
    if not copy.exists():
        replace_file(copy, corpus.read_bytes())
    if not model_path.exists() and train_anew:
        say("training a small model on 408 short documents")
        train_demo_model(copy, model_path)
    elif not model_path.exists():
        say("taking a small model that was trained on 408 short documents (--train: train it here)")
        copy_demo_model(model_path)
    session = prepare([str(copy)], WorkspacePath(index_path, str(model_path)), say=say)
    return session, prompts


def _place(where: str | Path | RemotePath | WorkspacePath) -> WorkspacePath:
    return where if isinstance(where, WorkspacePath) else WorkspacePath(locate(where))
