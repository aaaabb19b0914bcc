"""Python interface: six verbs in the order of use, `build`, `train`, `open`, `query`, `audit`, `verify_hit`.

Each takes the path of an index, or what is open: a `Session`, an `Index`. `prepare` does the first three at
once, and `demo_corpus` has a corpus to try them on. Notes go to the logger "stride"; `quiet` hides these and
progress. Errors are `StrideError` and `IndexFormatError`, and say what to do (``fix``).

The code behind them, in the order in which a document and a prompt pass through it: ``corpus/build`` →
``corpus/chunking`` → ``index_format/design`` → ``index_format/writer`` → ``models/protocol`` →
``operators/operator_space`` → ``operators/gradients`` → ``operators/bases`` → ``operators/closed`` →
``operators/projections`` → ``attribution/pipeline`` → ``recovery/lasso`` → ``recovery/problem`` →
``attribution/estimates`` → ``attribution/verdict`` → ``attribution/answer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexFormatError, IndexMismatch, IndexNotFound
from index_format.location import RemotePath, locate
from index_format.reader import Index
from stride_cli.attribution.answer import Answer
from stride_cli.attribution.options import CalibrationOptions, QueryOptions, SharingOptions
from stride_cli.attribution.prepare import prepare
from stride_cli.attribution.session import Session
from stride_cli.audit.options import AuditOptions
from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.readers import ReadOptions
from stride_cli.data.query_files import as_query
from stride_cli.data.workspace import WorkspacePath, open_model
from stride_cli.demo.demo_model import demo_corpus, prepare_demo
from stride_cli.errors import CorpusError, ModelError, QueryError, StrideError, UsageError
from stride_cli.models.spec import GivenModel, ModelSpec
from stride_cli.operators.options import ClosedOptions, FitRunOptions, SgdOptions, TrainOptions
from stride_cli.options import at_border
from stride_cli.output import quiet
from stride_cli.permissions import Permissions
from stride_cli.prove.options import HitOptions, HitQuestion
from stride_cli.recovery.ranking import Hit
from stride_cli.training.index_build import build_index, build_index_of_run
from stride_cli.training.index_fit import fit_index

if TYPE_CHECKING:
    from stride_cli.audit.judge import Finding
    from stride_cli.data.queries import Query
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.schema.train_records import TrainRecord
    from stride_cli.schema.verify_records import VerifyHitRecord

Where = str | Path | RemotePath | WorkspacePath | Index | Session
# fmt: off
__all__ = [
    "Answer", "AuditOptions", "BuildOptions", "CalibrationOptions", "ClosedOptions", "CorpusError",
    "FitRunOptions", "Hit", "HitOptions", "IndexFormatError", "IndexMismatch", "IndexNotFound", "ModelError",
    "ModelSpec", "Permissions", "QueryError", "QueryOptions", "ReadOptions", "Session", "SgdOptions",
    "SharingOptions", "StrideError", "TrainOptions", "UsageError", "WorkspacePath", "as_query", "audit",
    "build", "build_index", "build_index_of_run", "demo_corpus", "fit_index", "open",
    "open_model", "prepare", "prepare_demo", "query", "quiet", "train", "verify_hit",
]
# fmt: on

build = at_border('build("corpus.jsonl", model="model", out="run.stride")')(build_index)


@at_border('train("run.stride")')
def train(
    where: Where,
    options: TrainOptions | None = None,
    *,
    model: AttributableModel | GivenModel | None = None,
    overwrite: bool = False,
    run: FitRunOptions | None = None,
    calibration: CalibrationOptions | None = CalibrationOptions(),
) -> TrainRecord:
    """Fit the operators of an index, then calibrate its verdicts; interrupted, the same call goes on.

    Parameters
    ----------
    options, model, overwrite, run, and what is raised : see `fit_index`
    calibration : of language models fitted in closed form; None: answers have no verdict
    """
    place = as_place(where)
    named = model or (where.model if isinstance(where, Session) else place.model)
    judged = calibration is not None
    fitted = fit_index(place.index, options, model=named, overwrite=overwrite, run=run, resumes=judged)
    if calibration is not None and fitted["fit"] == "closed":
        session = Session.open(place.index, model=named, recalibrate=True)
        if not session.model.classes:
            session.calibrate(calibration)
    return fitted


@at_border('open("run.stride")')
def open(where: Where, *, recalibrate: bool = False) -> Session:
    """Open an index, with its model and operators, for queries.

    Parameters
    ----------
    where : path or URL of the index, or a `WorkspacePath` that names the model too
    recalibrate, and what is raised : see `Session.open`
    """
    if isinstance(where, Session):
        return where
    place = as_place(where)
    return Session.open(place.index, model=place.model, recalibrate=recalibrate)


@at_border('query("run.stride", "The French Revolution began in")')
def query(
    where: Where, prompt: str | Query, options: QueryOptions | None = None, **given: str | None
) -> Answer:
    """Rank the training documents behind one response; of several prompts, `open` the index once.

    `prompt`, `options`, what is `given`, and what is raised: see `Session.query`.
    """
    return open(where).query(prompt, options, **given)


@at_border('audit("run.stride", "benchmark.jsonl")')
def audit(
    where: Where,
    benchmark: str | Path,
    *,
    controls: str | Path | None = None,
    options: AuditOptions | None = None,
) -> list[Finding]:
    """Judge which items of a benchmark are in the corpus, and which of them the model has learnt from it.

    `benchmark` and `controls` are files of items, as corpora are; without controls it is as the options say.
    Returns a Finding for each item, in order, whose ``to_record()`` is a ``stride.audit/2``.
    """
    from stride_cli.audit.judge import audit_files

    against = None if controls is None else str(controls)
    return audit_files(
        lambda: open(where), str(benchmark), against, AuditOptions.given(options), ReadOptions()
    )[1]


@at_border('verify_hit("run.stride", "The French Revolution began in", documents=["doc-1"])')
def verify_hit(
    where: Where,
    prompt: str | Query | Sequence[Mapping[str, Any]],
    options: QueryOptions | None = None,
    check: HitOptions | None = None,
    *,
    response: str | None = None,
    span: str | None = None,
    documents: Sequence[str] | None = None,
    retrain: Callable[..., Any] | None = None,
) -> VerifyHitRecord:
    """Retrain without a query's top documents, and without as many random ones, to see if its loss rises.

    What is trained is kept beside the index, and an interrupted call goes on.

    Parameters
    ----------
    prompt, response, span : see `Session.query`; or the `Answer.query` of an answer; or prompts with what
        belongs to them, ``{"prompt", "response", "instead"}``, of several as of `Session.query_pooled`: the
        mean of their losses. With ``instead``, it is the log-odds of the token in which the two part
    options : QueryOptions       its `top` says how many documents
    check : HitOptions           how many models, retrained by what
    documents : ids, optional    these documents instead of the query's; no operators are needed then
    retrain : callable, optional      takes (D,) bool, which documents stay, and a seed; trains; returns a
        model or its path. Results are kept by its source and the settings (numbers, data classes) it uses

    Returns
    -------
    dict      a ``stride.verify_hit/1``

    Raises
    ------
    UsageError      fewer documents than asked for, an unknown id; a response beside several prompts
    QueryError      a prompt that cannot be asked, or none
    ModelError      the model has no recipe, and no command is given
    """
    from stride_cli.prove.hit_record import verify_hit as verify

    asked, place = HitQuestion(prompt, response, span, documents), as_place(where)
    model = where.model if isinstance(where, Session) else None
    wanted = QueryOptions.given(options), HitOptions.given(check)
    return verify(place, asked, *wanted, model=model, retrain=retrain)


def as_place(where: Where) -> WorkspacePath:
    """Name the workspace of an index."""
    if isinstance(where, WorkspacePath):
        return where
    opened = where.index if isinstance(where, Session) else where
    return WorkspacePath(locate(opened.path if isinstance(opened, Index) else opened))
