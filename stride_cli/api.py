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
from stride_cli.operators.options import (
    ClosedOptions,
    FitRunOptions,
    SgdOptions,
    TrainOptions,
)
from stride_cli.permissions import Permissions, permitted
from stride_cli.training.index_build import build_index, build_index_of_run
from stride_cli.training.index_fit import fit_index as train

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from stride_cli.audit.judge import Finding
    from stride_cli.audit.options import AuditOptions
    from stride_cli.data.queries import Query
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.prove.options import HitOptions
    from stride_cli.schema.verify_records import VerifyHitRecord
    from stride_cli.serve.options import ServeOptions
    from stride_cli.serve.running import Server

__all__ = [
    "Answer",
    "BuildOptions",
    "ClosedOptions",
    "FitRunOptions",
    "Permissions",
    "QueryOptions",
    "Session",
    "SgdOptions",
    "SharingOptions",
    "TrainOptions",
    "WorkspacePath",
    "as_query",
    "audit",
    "build_index",
    "build_index_of_run",
    "calibrate",
    "demo_corpus",
    "open_model",
    "open_server",
    "permitted",
    "prepare",
    "prepare_demo",
    "train",
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
    from stride_cli.prove.hit_record import verify_hit as verify
    from stride_cli.prove.options import HitOptions, HitQuestion

    question = HitQuestion(prompt, response, span, documents)
    return verify(as_place(where), question, options or QueryOptions(), check or HitOptions(), model=model)


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


def as_place(where: str | Path | RemotePath | WorkspacePath) -> WorkspacePath:
    """The workspace that a path of an index, or a `WorkspacePath`, names."""
    return where if isinstance(where, WorkspacePath) else WorkspacePath(locate(where))
