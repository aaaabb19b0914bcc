"""Python interface: six verbs in the order of use, `build`, `train`, `open`, `query`, `audit`, `verify_hit`.

`prepare` does the first three at once, and `demo_corpus` has a corpus to try them on.

The code behind them, in the order in which a document and a prompt pass through it: ``corpus/build`` →
``corpus/chunking`` → ``index_format/design`` → ``index_format/writer`` → ``models/protocol`` →
``operators/operator_space`` → ``operators/gradients`` → ``operators/bases`` → ``operators/closed`` →
``operators/projections`` → ``attribution/pipeline`` → ``recovery/lasso`` → ``recovery/problem`` →
``attribution/estimates`` → ``attribution/verdict`` → ``attribution/answer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.location import locate
from stride_cli.attribution.answer import Answer
from stride_cli.attribution.options import QueryOptions, SharingOptions
from stride_cli.attribution.prepare import prepare
from stride_cli.attribution.session import Session
from stride_cli.corpus.options import BuildOptions
from stride_cli.data.query_files import as_query
from stride_cli.data.workspace import WorkspacePath, open_model
from stride_cli.demo.demo_model import demo_corpus, prepare_demo
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.options import ClosedOptions, FitRunOptions, SgdOptions, TrainOptions
from stride_cli.permissions import Permissions
from stride_cli.training.index_build import build_index, build_index_of_run
from stride_cli.training.index_fit import fit_index as train

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from stride_cli.attribution.nats import CalibrationRecord
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.audit.judge import Finding
    from stride_cli.audit.options import AuditOptions
    from stride_cli.data.queries import Query
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.prove.options import HitOptions
    from stride_cli.schema.verify_records import VerifyHitRecord

__all__ = [
    "Answer",
    "BuildOptions",
    "ClosedOptions",
    "FitRunOptions",
    "ModelSpec",
    "Permissions",
    "QueryOptions",
    "Session",
    "SgdOptions",
    "SharingOptions",
    "TrainOptions",
    "WorkspacePath",
    "as_query",
    "audit",
    "build",
    "build_index",
    "build_index_of_run",
    "calibrate",
    "demo_corpus",
    "open",
    "open_model",
    "prepare",
    "prepare_demo",
    "query",
    "train",
    "verify_hit",
]

build = build_index


def open(where: str | Path | RemotePath | WorkspacePath, *, recalibrate: bool = False) -> Session:
    """Open an index, with its model and operators, for queries.

    Parameters
    ----------
    where : path or URL of the index, or a `WorkspacePath` that names the model too
    recalibrate, and what is raised : see `Session.open`
    """
    place = as_place(where)
    return Session.open(place.index, model=place.model, recalibrate=recalibrate)


def query(
    where: str | Path | RemotePath | WorkspacePath,
    prompt: str | Query,
    options: QueryOptions | None = None,
    **given: Any,
) -> Answer:
    """Rank the training documents behind one response; of several prompts, `open` the index once.

    Parameters
    ----------
    where : as of `open`
    prompt, options, given, and what is raised : see `Session.query`
    """
    return open(where).query(prompt, options, **given)


def calibrate(session: Session, options: CalibrationOptions | None = None) -> CalibrationRecord:
    """Ask prompts about which no corpus says anything: see `Session.calibrate`."""
    return session.calibrate(options)


def audit(
    session: Session,
    benchmark: str | Path,
    *,
    controls: str | Path | None = None,
    options: AuditOptions | None = None,
) -> list[Finding]:
    """Judge which items of a benchmark are in the corpus, and which of them the model has learnt from it.

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
    """Retrain without a query's top documents, and without as many random ones, to see if its loss rises.

    What is trained is kept beside the index, and an interrupted call goes on.

    Parameters
    ----------
    where : as of `open`
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
    from stride_cli.prove.hit_record import verify_hit as verify
    from stride_cli.prove.options import HitOptions, HitQuestion

    question = HitQuestion(prompt, response, span, documents)
    return verify(as_place(where), question, options or QueryOptions(), check or HitOptions(), model=model)


def as_place(where: str | Path | RemotePath | WorkspacePath) -> WorkspacePath:
    """Name the workspace of an index by its path; a `WorkspacePath` stays as it is."""
    return where if isinstance(where, WorkspacePath) else WorkspacePath(locate(where))
