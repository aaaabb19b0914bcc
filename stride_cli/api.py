"""What the commands do, as functions: build an index, fit operators, answer queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.location import locate
from stride_cli.attribution.answer import Answer
from stride_cli.attribution.options import QueryOptions
from stride_cli.attribution.session import Session
from stride_cli.corpus.options import BuildOptions
from stride_cli.data.query_files import as_query
from stride_cli.data.workspace import WorkspacePath, open_model
from stride_cli.errors import UsageError
from stride_cli.evaluation.options import LdsOptions
from stride_cli.models.kinds import kind_of, kind_of_index
from stride_cli.operators.options import (
    ClosedOptions,
    FitRunOptions,
    SgdOptions,
    TrainOptions,
    like_own,
    resolve_settings,
)
from stride_cli.output import progress
from stride_cli.permissions import Permissions, permitted
from stride_cli.recorded_paths import find_recorded
from stride_cli.selection.options import SelectOptions
from stride_cli.startup import keep_imported, without_collection
from stride_cli.training.options import TruthOptions

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from index_format.reader import Index
    from stride_cli.attribution.needs import Needs
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.audit.judge import Finding
    from stride_cli.audit.options import AuditOptions
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.queries import Query
    from stride_cli.evaluation.options import HitOptions
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.projection_pass import Projecting
    from stride_cli.operators.projections import Projections
    from stride_cli.operators.shared_fit import Crew
    from stride_cli.schema.evaluation_records import LdsRecord
    from stride_cli.schema.train_records import CalibrationRecord, TrainRecord, TrainSeconds
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


@progress("building the index")
def build_index(
    sources: Sequence[str],
    *,
    model_path: str,
    out: str | Path,
    options: BuildOptions | None = None,
    reading: ReadOptions | None = None,
) -> Index:
    """Index a corpus for a model: chunks, design matrix, fingerprints. For a classifier, its training rows.

    Parameters
    ----------
    sources : files, globs or ``-``
    model_path : checkpoint directory, hub id or .gguf file; its tokenizer is loaded, its weights are hashed.
        Or a classifier's directory, with one file of examples as the source.
    options : BuildOptions
    reading : ReadOptions

    Raises
    ------
    CorpusError, ModelError, UsageError, IndexExists, IndexBusy, IndexIncomplete, StorageFull
    """
    from stride_cli.corpus import build
    from stride_cli.corpus.context import context_length
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.fingerprints import tokenizer_fingerprint
    from stride_cli.models.language.settings import settings_fingerprint
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.models.loading import model_fingerprint

    options = options or BuildOptions()
    if kind_of(model_path) == "classifier":
        from stride_cli.data.examples_index import build_classifier_index

        if len(sources) != 1:
            raise UsageError(
                f"a classifier's examples are in one file (found {len(sources)})", fix="join them into one"
            )
        _refuse_options_of_text(options, reading or ReadOptions())
        return build_classifier_index(sources[0], model_path=model_path, out=out, options=options)
    tokenizer, weights = load_tokenizer(model_path), model_fingerprint(model_path)
    local = Path(model_path).expanduser()
    model = build.IndexedModel(
        tokenizer,
        tokenizer_fingerprint(tokenizer),
        weights,
        # found again from another working directory
        path=str(local.absolute()) if local.exists() else model_path,
        context=context_length(model_path),
        settings_fingerprint=settings_fingerprint(model_path),
    )
    if not options.in_ranges:
        return build.build_index(sources, model, out, options, reading or ReadOptions())
    from stride_cli.corpus.apart import build_apart
    from stride_cli.training.engines import open_engine

    engine = open_engine(options.engine)
    return build_apart(sources, model, out, options, reading or ReadOptions(), engine=engine)


def build_index_of_run(
    run: str | Path,
    *,
    out: str | Path,
    options: BuildOptions | None = None,
    reading: ReadOptions | None = None,
) -> Index:
    """Index what a recorded training was trained on: of `StrideCallback`, or of `stride model train`.

    Parameters
    ----------
    run : the directory that it left; its model is the index's
    options, reading : as for `build_index`; chunks are as long as the training's by default

    Raises
    ------
    ModelError      nothing was recorded there, or the corpus is another one by now; and as `build_index`
    """
    from index_format.errors import IndexExists
    from index_format.reader import Index
    from stride_cli.models.language.language_recipe import read_recipe
    from stride_cli.models.loading import model_fingerprint
    from stride_cli.operators.layer_projections import GATHERED, GROUP, take_in
    from stride_cli.training.language_trainer import check_recipe
    from stride_cli.training.recorded_corpus import find_run

    found = find_run(run)
    options = options or BuildOptions()
    if options.block_size is None:
        options = replace(options, block_size=found.block_size)
    try:
        built = build_index(found.sources, model_path=found.model, out=out, options=options, reading=reading)
    except IndexExists:
        built = Index.open(out)
        # a kill may have fallen between the two
        same = built.attributes["fingerprints"]["model"] == model_fingerprint(found.model)
        if not same or built.has(GROUP) or not (Path(run) / GATHERED).is_file():
            raise
    recipe = read_recipe(found.model)
    assert recipe is not None
    check_recipe(replace(recipe, block_size=options.block_size or recipe.block_size), built)
    take_in(built, Path(run))
    return Index.open(out)


def _refuse_options_of_text(options: BuildOptions, reading: ReadOptions) -> None:
    """UsageError where a classifier's index is given what only a corpus of text has."""
    from stride_cli.corpus.readers import Fields, ReadOptions
    from stride_cli.options import entries, refuse_foreign

    given = {
        name: getattr(options, name) for name in ("block_size", "store_text", "range", "workers", "engine")
    }
    given |= {name: getattr(reading, name) for name in entries(ReadOptions)}
    given |= {name: getattr(reading.fields, name) for name in entries(Fields)}
    refuse_foreign(
        given,
        (),
        (BuildOptions, ReadOptions, Fields),
        because="of a corpus of text, and this model is a classifier",
        otherwise="give a language model with --model",
    )


@progress("fitting operators")
def train(
    index_path: str | Path | RemotePath,
    options: TrainOptions | None = None,
    *,
    model: AttributableModel | None = None,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    run: FitRunOptions | None = None,
) -> TrainRecord:
    """Fit the operators of an index and publish them in it; an interrupted fit continues.

    Where there are operators, and projections are asked for without `overwrite`, only these are added.

    Parameters
    ----------
    index_path : path of the index; `IndexReadOnly` for a URL or a zip file
    options : ClosedOptions or SgdOptions
    model : AttributableModel, optional        else loaded from ``model_path`` or from where the index says
    device, dtype : of the model to load
    overwrite : replace operators that are already there
    run : who fits, and how often an unfinished fit is saved; workers open the model where `model_path` or the
        index says

    Returns
    -------
    dict      what was fitted: fit, space, layer, K, gate size, coverage, seconds, …

    Raises
    ------
    IndexMismatch      the model or tokenizer is not the index's; a checkpoint has another tokenizer
    ModelError         a checkpoint cannot be loaded
    IndexExists        operators (and all projections that are asked for) are there, ``overwrite`` is False
    """
    import hashlib
    import json

    from index_format.errors import IndexExists
    from index_format.location import local_directory
    from index_format.reader import Index
    from index_format.writer import GroupWriter

    with without_collection():  # most of it is importing
        from stride_cli.data.batches import ChunkReader
        from stride_cli.operators.checkpoints import (
            find_checkpoints,
            fit_with_checkpoints,
            recorded_checkpoint,
        )
        from stride_cli.operators.fitting import FitRun

        started = time.perf_counter()
        index = Index.open(local_directory(index_path))
        keep_imported()
    options, run = options or ClosedOptions(), run or FitRunOptions()
    if run.in_ranges and isinstance(options, SgdOptions):
        raise UsageError(
            "--workers and --engine divide a pass over the corpus, and --fit sgd steps one after the other",
            fix="leave them out, or --fit sgd",
        )
    if index.has("operators") and not overwrite:
        if isinstance(options, ClosedOptions) and options.project:
            own_model = model or open_model(index, model_path, device=device, dtype=dtype)
            return _project(index_path, index, options, own_model, started, run, model_path)
        # a kill may have fallen between the fit and its calibration
        judged = index.has("calibration") or kind_of_index(index) == "classifier"
        raise IndexExists(
            f"index '{index_path}' has operators already" + ("" if judged else ", and no calibration"),
            fix=f"{'query them' if judged else 'stride calibrate'}, or fit anew with --overwrite",
        )
    checkpoints = find_checkpoints(index, options.checkpoints)
    models = [model or open_model(index, model_path, device=device, dtype=dtype)]
    options = like_own(options, models[0], index)
    settings = resolve_settings(options, models[0], index)
    chunks = ChunkReader(index)
    if chunks.scored_tokens() == 0:
        raise UsageError(
            f"no token of index '{index_path}' is scored, so there is nothing to fit",
            fix="build the index from documents longer than one token, with non-empty responses",
        )
    identity: dict[str, Any] = {"settings": asdict(settings), "fit": type(settings).__name__}
    identity |= {"dtype": str(models[0].dtype), "index": index.digest}  # chunks may have been appended
    if base := getattr(options, "base", None):
        identity["base"] = base
    if checkpoints:
        identity["checkpoints"] = [(found.fingerprint, found.settings) for found in checkpoints]
    build_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    crew = _crew(run, index, models[0], model_path) if run.in_ranges else None
    loaded = time.perf_counter() - started
    with GroupWriter(index_path, "operators", build_key, overwrite=overwrite) as writer:
        fitted = fit_with_checkpoints(
            writer,
            models,
            chunks,
            index,
            lambda model: resolve_settings(options, model, index),
            checkpoints,
            FitRun(save_seconds=run.save_seconds, crew=crew, base=base),
        )
        publishing = time.perf_counter()
        own, *others = (entry["attributes"] for entry in fitted)
        listed = [
            {**recorded_checkpoint(found, Path(str(index_path))), **entry}
            for found, entry in zip(checkpoints, others, strict=True)
        ]
        attributes = own | {"recipe": options.recipe} | ({"checkpoints": listed} if listed else {})
        writer.publish(attributes)
    reports = [entry["report"] for entry in fitted]
    seconds: TrainSeconds = {
        "load": sum(report["load"] for report in reports),
        "fit": sum(report["fit"] for report in reports),
        "write": sum(report["write"] for report in reports),
    }
    seconds["load"] += loaded
    seconds["write"] += time.perf_counter() - publishing
    return _train_record(index_path, index, own, listed, reports, seconds)


def _crew(run: FitRunOptions, index: Index, model: AttributableModel, model_path: str | None) -> Crew:
    """Who fits the operators of an index, where it is not this process alone.

    The workers of this machine share its cores; a task of Ray has one.
    """
    from stride_cli.operators.opener import Opener
    from stride_cli.operators.shared_fit import Crew, ModelPlace
    from stride_cli.training.engines import available_bytes, available_cores, open_engine

    engine, opener = open_engine(run.engine), Opener.like(model)
    threads = 1 if run.engine == "ray" else max(1, available_cores() // (run.workers or 1))
    local = Path(model_path).expanduser() if model_path else None
    found = str(local.absolute()) if local is not None and local.exists() else model_path
    # on several GPUs each worker sees its own
    kind = opener.device.partition(":")[0]
    place = ModelPlace(Path(str(index.path)).absolute(), index.digest, found, kind, opener.dtype)
    free = available_bytes() if run.engine == "local" and kind == "cpu" else None
    return Crew(engine, run.workers, threads, place, free)


def _project(
    index_path: str | Path | RemotePath,
    index: Index,
    options: ClosedOptions,
    model: AttributableModel,
    started: float,
    run: FitRunOptions,
    model_path: str | None,
) -> TrainRecord:
    """`train` where operators are there and projections are asked for: these alone are added."""
    import hashlib
    import json

    from index_format.writer import GroupWriter
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.projection_pass import check_projectable, project_index

    check_projectable(index, options, model)
    operators = index.group_attributes("operators")["build_key"]
    size = options.project or 0
    identity = [index.digest, operators, size, str(model.dtype)]
    build_key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    apart: Projecting | None = None
    if run.in_ranges:
        from stride_cli.operators.checkpoints import stored_checkpoints
        from stride_cli.operators.shared_projections import project_apart

        crew, further = _crew(run, index, model, model_path), stored_checkpoints(index)

        def by_crew(number: int, *rest: Any) -> Projections:
            of = further[number - 1] if number else None
            return project_apart(crew.at(of.path, of.design_seed) if of else crew, number, *rest)

        apart = by_crew

    loaded = time.perf_counter() - started
    with GroupWriter(index_path, "operators", build_key) as writer:
        own, reports = project_index(
            writer,
            index,
            model,
            ChunkReader(index),
            size,
            save_seconds=run.save_seconds,
            apart=apart,
        )
        publishing = time.perf_counter()
        writer.publish({name: value for name, value in own.items() if name not in ("arrays", "build_key")})
    seconds: TrainSeconds = {
        "load": loaded + sum(report["load"] for report in reports),
        "fit": sum(report["fit"] for report in reports),
        "write": time.perf_counter() - publishing + sum(report["write"] for report in reports),
    }
    return _train_record(index_path, index, own, own.get("checkpoints", []), reports, seconds)


def _train_record(
    index_path: str | Path | RemotePath,
    index: Index,
    own: dict[str, Any],
    listed: Sequence[dict[str, Any]],
    reports: Sequence[dict[str, Any]],
    seconds: TrainSeconds,
) -> TrainRecord:
    """What `train` returns.

    Parameters
    ----------
    own : attributes of the group of operators
    listed : of those of further checkpoints
    reports : of each model, its loss and seconds (load, fit, write)
    """
    return {
        "schema": "stride.train/1",
        "index": str(index_path),
        "fit": own["fit"],
        "space": own["space"],
        "layer": own["layer"],
        "subsets": index.n_subsets,
        "gate_size": own["gate_size"],
        "project": own["project"],
        "projected": own["projected"],
        "coverage": own["coverage"],
        "step": own["step"],
        "step_agreement": own["step_agreement"],
        "loss": reports[0]["loss"],
        "checkpoints": [
            {
                "path": find_recorded(entry["path"], index.path) or entry["path"],
                "fingerprint": entry["model_fingerprint"],
                "space": entry["space"],
                "layer": entry["layer"],
                "step_agreement": entry["step_agreement"],
                "loss": report["loss"],
                "seconds": report["load"] + report["fit"] + report["write"],
            }
            for entry, report in zip(listed, reports[1:], strict=True)
        ],
        "seconds": seconds,
    }


@progress("calibrating")
def calibrate(session: Session, options: CalibrationOptions | None = None) -> CalibrationRecord:
    """Ask an index prompts about which no corpus says anything; from then on its answers have verdicts.

    What was there is replaced, but for what influences are in nats, which is measured where options ask for
    it (`retrain`). The session's answers have verdicts too.

    Raises
    ------
    UsageError         the index is of a classifier
    IndexReadOnly      it is a URL or a zip file
    """
    from stride_cli.attribution.calibration import calibrate as ask
    from stride_cli.attribution.options import CalibrationOptions

    begun = time.perf_counter()
    options, attributor = options or CalibrationOptions(), session.attributor()
    scale = session.calibration.scale if session.calibration else None
    if options.retrain:
        from index_format.location import local_directory
        from stride_cli.attribution.scale import measure_scale
        from stride_cli.models.kinds import refuse_classifier

        refuse_classifier(session.index, "influences in nats", fix="leave out --retrain")
        local_directory(session.index.path)  # refused before hours of training
        if session.model.pretrained:
            raise UsageError(
                "influences in nats are for fine-tuned models: of what a model learnt from scratch by heart "
                "they forecast 2.6 times the rise that was measured",
                fix="leave out --retrain, and test single answers (stride verify-hit)",
            )
        scale = measure_scale(attributor, options.retrain)
    session.calibration = ask(attributor, options.nulls, scale)
    return {
        "schema": "stride.calibration/1",
        "index": str(session.index.path),
        "nulls": session.calibration.losses.shape[1],
        "median_loss": session.calibration.median_loss,
        "scale": None if scale is None else scale.to_record(),
        "sure": scale is not None and scale.sure,
        "seconds": time.perf_counter() - begun,
    }


def verify_hit(
    where: str | Path | RemotePath | WorkspacePath,
    prompt: str | Query,
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
    prompt, response, span : see `Session.query`
    options : QueryOptions       its `top` says how many documents
    check : HitOptions           how many models, retrained by what
    documents : ids, optional    these documents instead of the query's; no operators are needed then
    model : AttributableModel, optional    else loaded

    Returns
    -------
    dict      a ``stride.verify_hit/1``

    Raises
    ------
    UsageError      fewer documents than asked for, an unknown id
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
    where: str | Path | RemotePath | WorkspacePath, task: str | Path, options: SelectOptions | None = None
) -> Selection:
    """Documents to train on for a task, with equally many by BM25 and at random beside them.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names model, device and dtype too
    task : file of queries
    options : SelectOptions

    Returns
    -------
    Selection

    Raises
    ------
    UsageError      more documents than the corpus has, an index without text, something at ``out``
    StageMissing    the index has no operators, and the method needs them
    """
    from stride_cli.selection.select import run_selection

    return run_selection(_place(where), Path(task), options or SelectOptions())[2]


def evaluate(
    where: str | Path | RemotePath | WorkspacePath,
    queries: str | Path,
    *,
    methods: Sequence[str] = ("stride",),
    truth: TruthOptions | None = None,
    draws: int = LdsOptions.draws,
) -> list[LdsRecord]:
    """Linear datamodeling score of methods, on models retrained on random subsets; trains what is missing.

    Parameters
    ----------
    where : path of the index, or a `WorkspacePath` that names model, device and dtype too
    queries : file of queries
    methods : names, with options as for `stride baseline`
    truth : TruthOptions      retrained models; default: 64 subsets of half of the chunks, one seed
    draws : bootstrap resamples

    Returns
    -------
    list of ``stride.lds/1``, one for each method

    Raises
    ------
    UsageError, QueryError, ModelError
    """
    from stride_cli.evaluation.bench import Bench, build_truth_of, check_method
    from stride_cli.evaluation.compare import lds_record

    for method in methods:
        check_method(method)
    truth = truth or TruthOptions(n_subsets=64, alpha=0.5)
    place, path = _place(where), Path(queries)
    build_truth_of(place, path, truth)
    bench = Bench(place, queries=path, alpha=truth.alpha)
    return [lds_record(entry, ground) for entry, ground in bench.lds(methods, draws=draws)]


def prepare(
    sources: Sequence[str],
    where: WorkspacePath,
    *,
    reading: ReadOptions | None = None,
    training: TrainOptions | None = None,
    calibration: CalibrationOptions | None = None,
    say: Callable[[str], None] = lambda text: None,
    before: Callable[[Needs], None] | None = None,
) -> Session:
    """All that a query of a corpus needs: index, operators, calibration. What is there is used again.

    Stopped, the same call goes on where it was. A corpus that has grown since is appended to its index, and
    the operators are fitted anew.

    Parameters
    ----------
    sources : files and globs of one corpus, of text
    where : WorkspacePath      where its index is, or will be; the model, needed where there is no index
    reading : ReadOptions
    training, calibration : see `train` and `calibrate`
    say : called with a line of text before each stage
    before : called with what all of it will take, before an index is built; None: it is not measured

    Raises
    ------
    UsageError         there is no index and no model is given; the corpus has changed other than by growing;
                       it has grown, and its index was made in ways of its own; the model is a classifier
    IndexMismatch      the model is not the index's
    what `build_index`, `train` and `Session.open` raise
    """
    from index_format.location import local_directory
    from index_format.reader import Index
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.loading import load_model

    reading, index_path = reading or ReadOptions(), local_directory(where.index)
    model_path, device, dtype = where.model, where.device, where.dtype
    model: AttributableModel | None = None
    if not index_path.exists():
        if model_path is None:
            raise UsageError(
                f"there is no index '{index_path}' yet, and no model is given to make it for",
                fix="name the model that was trained on this corpus (--model), or train one on it",
            )
        if kind_of(model_path) == "classifier":
            raise UsageError(
                f"model '{model_path}' is a classifier (expected a language model)",
                fix=f"stride index build FILE --model {model_path}; then stride train, stride query --row",
            )
        if before is not None:
            from stride_cli.attribution.needs import measure_needs

            with progress("opening the model"):
                model = load_model(model_path, device=device, dtype=dtype)
            before(measure_needs(model, model_path, sources, reading))
        say("indexing the corpus")
        build_index(sources, model_path=model_path, out=index_path, reading=reading)
    else:
        _follow(index_path, sources, reading, model_path, say)
    index = Index.open(index_path)
    model = model or open_model(index, model_path, device=device, dtype=dtype)
    index.check_fingerprint("model", model.fingerprint)
    fitted = index.has("operators")
    if not fitted or index.shape("operators/seen")[0] < index.n_chunks:
        say("fitting one steering operator per subset")
        train(index_path, training, model=model, overwrite=fitted)
    session = Session.open(index_path, model=model)
    if session.calibration is None:
        say("asking unrelated prompts, which verdicts are held against")
        calibrate(session, calibration)
    return session


def _follow(
    index_path: Path,
    sources: Sequence[str],
    reading: ReadOptions,
    model_path: str | None,
    say: Callable[[str], None],
) -> None:
    """Bring an index up to its corpus, where that has grown; see `prepare` for what is refused."""
    import shlex

    from index_format.reader import Index
    from stride_cli.corpus.build import append_to_index, compare_corpus
    from stride_cli.models.fingerprints import tokenizer_fingerprint
    from stride_cli.models.kinds import refuse_classifier
    from stride_cli.models.language.language_recipe import read_recipe
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.models.loading import path_of_model
    from stride_cli.signing import signed_by

    index = Index.open(index_path)
    refuse_classifier(index, "stride ask asks of texts", fix="stride query --row 0")
    what, count = compare_corpus(index, sources, reading)
    if what == "same":
        return
    named, quoted = ", ".join(sources), shlex.quote(str(index_path))
    if what == "other":
        raise UsageError(
            f"index '{index_path}' is of another corpus than {named} is now: expected its "
            f"{index.n_documents:,} documents unchanged at the beginning, found {count:,} that differ",
            fix=f"keep both: --index OTHER.stride; or move {quoted} away, and it is built anew",
        )
    attributes = index.group_attributes("operators") if index.has("operators") else {"fit": "closed"}
    own_way = attributes["fit"] != "closed" or bool(attributes.get("checkpoints"))
    if own_way or signed_by(index_path) is not None:
        raise UsageError(
            f"{named} has {count - index.n_documents:,} documents more than index '{index_path}', which is "
            + ("fitted in a way of its own" if own_way else "signed")
            + ": it is not extended without being told",
            fix=f"stride index append NEW.jsonl --index {quoted}, then stride train --overwrite as before",
        )
    where = model_path or path_of_model(index)
    without = "; the model was trained without them" if read_recipe(where) is not None else ""
    say(f"adding {count - index.n_documents:,} new documents to the index{without}")
    tokenizer = load_tokenizer(where)
    del index
    append_to_index(
        index_path,
        sources,
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        reading=reading,
        grown=True,
    )


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
