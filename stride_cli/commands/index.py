"""`stride index`: plan, build, look at, verify, extend and export an index."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index_format.location import Location, local_directory, locate
from stride_cli import errors, output
from stride_cli.characters import one_line, printable
from stride_cli.commands.completion import complete_index
from stride_cli.commands.options import (
    AdapterPath,
    Flags,
    IndexPath,
    Json,
    ModelPath,
    NewModel,
    Reading,
    find_index,
    flag_of,
    named_model,
    with_flags,
)
from stride_cli.commands.panels import CommandLine, example
from stride_cli.commands.tables import next_step, print_tokens, show_record
from stride_cli.corpus.options import BuildOptions, PlanOptions
from stride_cli.options import entries
from stride_cli.permissions import Permissions

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.index_records import IndexVerifyRecord

app = CommandLine(help="Build an index of a corpus, and look after it.")


def _new_index(given: str | Path) -> Path:
    """``--out`` of a build; IndexReadOnly where it is a URL."""
    if not local_directory(given).name:
        raise errors.StorageError(f"'{given}' is no place for an index", fix="try --out run.stride")
    return Path(given)


_TRUST = "Run the Python file (network.py) of a classifier that was not trained here, now and from now on."
_CORPUS_HELP = (
    "JSON Lines (.jsonl, .gz, .zst), Parquet, Arrow or plain text files, globs, folders that "
    "datasets saved, hf://datasets/OWNER/NAME, or - for stdin."
)
CorpusArgument = Annotated[
    list[str], typer.Argument(metavar="CORPUS...", help=_CORPUS_HELP, show_default=False)
]
_NoCorpus = Annotated[
    list[str] | None, typer.Argument(metavar="[CORPUS...]", help=_CORPUS_HELP, show_default=False)
]
_Index = Annotated[
    str | None,
    typer.Argument(
        metavar="[INDEX]",
        help="The index, a directory, .zip or URL; default: the only *.stride here.",
        show_default=False,
        autocompletion=complete_index,
    ),
]
_Whole = Annotated[bool, typer.Option("--verbose", help="Show all that is recorded.")]
_Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the index goes.", parser=_new_index)]


@app.command(
    short_help="Chunk a corpus, draw its subsets.",
    epilog=example(
        "stride index build corpus.jsonl --model model --out run.stride",
        "stride index build 'hf://datasets/OWNER/NAME?split=train' --model model --number-ids",
        "zcat more.jsonl.gz | stride index build - --model model --out more.stride",
        "stride index build --from-run run",
    ),
)
@with_flags
def build(
    corpus: _NoCorpus = None,
    *,
    model: Annotated[str | None, NewModel] = None,
    adapter: AdapterPath = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            metavar="DIR",
            help="Corpus and model of a recorded training, of StrideCallback or stride model train.",
        ),
    ] = None,
    out: _Out = Path("run.stride"),
    options: Annotated[BuildOptions, Flags(BuildOptions)],
    trust_code: Annotated[bool, flag_of(entries(Permissions)["trust_code"], _TRUST)] = False,
    json: Json = None,
    reading: Reading,
) -> None:
    """Build an index: chunk a corpus with the model's tokenizer and draw its subsets.

    Interrupted, the same command goes on where it was. For a classifier: the rows that it was trained on.
    """
    from stride_cli import api

    begin = time.monotonic()
    steps: list[str] = []
    if from_run is not None:
        if corpus or model:
            raise errors.UsageError(
                "--from-run says which corpus and model, and others were given too", fix="leave them out"
            )
        built = api.build_index_of_run(from_run, out=out, options=options, reading=reading)
        steps = sorted(map(str, from_run.glob("checkpoints/step-*")))
    elif not corpus or (model is None and adapter is None):
        lacking = "a model" if corpus else "a corpus"
        raise errors.UsageError(
            f"{lacking} is missing (expected a corpus and --model, or --from-run)",
            fix="stride index build corpus.jsonl --model model",
        )
    else:
        named = named_model(model, adapter, **{"trust_code": True} if trust_code else {})
        built = api.build_index(corpus, model=named, out=out, options=options, reading=reading)
    _report(built, out, begin, json)
    next_step("stride", "train", "--index", str(out), *(["--checkpoints", *steps] if steps else []))


@app.command(
    short_help="Add documents to an index.",
    epilog=example("stride index append more.jsonl --index run.stride"),
)
@with_flags
def append(
    corpus: CorpusArgument,
    *,
    index: IndexPath = None,
    model: ModelPath = None,
    json: Json = None,
    reading: Reading,
) -> None:
    """Add documents to an index; what is in it stays as it is, and so do its subsets' members.

    Operators stay too, but have not seen the new chunks until `stride train` is run again.
    """
    from stride_cli.training.index_changes import append_documents

    path = local_directory(find_index(index))
    begin = time.monotonic()
    extended = append_documents(path, corpus, named_model(model), reading)
    _report(extended, path, begin, json)
    again = ("--overwrite",) if extended.has("operators") else ()
    why = "the operators have not seen the new chunks; next" if again else "next"
    next_step("stride", "train", "--index", str(path), *again, why=why)


@app.command(
    short_help="Join indexes that were built apart.",
    epilog=example(
        "stride index merge part-1.stride part-2.stride --out run.stride",
        "stride index merge parts/*.stride --out run.stride",
    ),
)
def merge(
    indexes: Annotated[
        list[str],
        typer.Argument(
            metavar="INDEX...",
            help="Indexes of one model, and built with the same options.",
            show_default=False,
            autocompletion=complete_index,
        ),
    ],
    *,
    out: _Out = Path("run.stride"),
    overwrite: Annotated[bool, flag_of(entries(BuildOptions)["overwrite"])] = False,
    json: Json = None,
) -> None:
    """Join indexes that were built apart: the same as an index built of their corpora, one after the other.

    The ranges of one corpus (stride index build --range) are put in order. Subsets are drawn for all chunks
    as one build would draw them, so operators of the parts are of other subsets, and stay behind.
    """
    from stride_cli.corpus.merge import merge_indexes

    begin = time.monotonic()
    merged = merge_indexes([locate(index) for index in indexes], out, overwrite=overwrite)
    _report(merged, out, begin, json)
    next_step("stride", "train", "--index", str(out))


@app.command(
    short_help="What an index will be.",
    epilog=example(
        "stride index plan corpus.jsonl --model model",
        "stride index plan --chunks 100000 --model model",
        "stride index plan --chunks 11400000",
    ),
)
@with_flags
def plan(
    corpus: _NoCorpus = None,
    *,
    model: Annotated[str | None, NewModel] = None,
    options: Annotated[PlanOptions, Flags(PlanOptions, first=("chunks",))],
    json: Json = None,
    reading: Reading,
) -> None:
    """Plan an index before building it: K, d, bytes, memory, coverage, chunks that cannot be told apart.

    How long fitting its operators takes: stride train --dry-run, once it is built.
    """
    from stride_cli.training.index_changes import plan_index

    show_record(plan_index(corpus or (), model, options, reading), json, title="plan")


@app.command(
    short_help="What an index holds, and what it was built from.",
    epilog=example("stride index info run.stride", "stride index info run.stride --verbose"),
)
def info(index: _Index = None, verbose: _Whole = False, json: Json = None) -> None:
    """Show what an index holds, what it was built from, and what can be asked of it."""
    from stride_cli.corpus.summary import describe
    from stride_cli.data.workspace import open_index

    path = find_index(index)
    opened = open_index(path)
    found: Any = describe(opened, path)
    if not verbose and not output.wants_json(json):
        built, fit, made = found["config"] or {}, found["operators"], Path(str(opened.path))
        names = "model_path documents chunks tokens subsets bytes texts created_by"
        found = {
            "corpus": ", ".join(map(str, built.get("sources", []))),
            **{name: found[name] for name in names.split()},
            "built": time.strftime("%Y-%m-%d", time.gmtime(made.stat().st_mtime)) if made.exists() else None,
            "form": (found["form"] or {}).get("name"),
            "operators": f"{fit['fit']}, {fit['space']}" if fit else "none: stride train",
            "verdicts": opened.has("calibration") or "none: stride calibrate",
            "retrained": found["truth"] and f"{found['truth']['subsets']} subsets",
        }
    show_record(found, json, title=str(path))


@app.command(
    short_help="Compare every byte of an index with its manifest.",
    epilog=example("stride index verify run.stride"),
)
def verify(index: _Index = None, json: Json = None) -> None:
    """Read every byte of an index and compare it with its manifest; exit code 1 when something is wrong.

    Manifests find damage, not forgery: to show who made an index, sign its manifests.
    """
    from index_format.verify import verify as find_problems
    from stride_cli.corpus.summary import disk_bytes

    path = find_index(index)
    on_disk = disk_bytes(path)
    with output.progress("verifying", None if on_disk is None else on_disk / 1e6, unit="MB") as ticker:
        problems = find_problems(path, progress=lambda read, total: ticker.reach(read / 1e6))
    record: IndexVerifyRecord = {"schema": "stride.index_verify/1", "index": str(path), "whole": not problems}
    as_json = output.wants_json(json)
    if not problems:
        from index_format.layout import STAGE_GROUPS
        from index_format.reader import Index

        opened = Index.open(path)
        record["stages"] = [group for group in STAGE_GROUPS if opened.has(group)]
        has = f", with {', '.join(record['stages'])}" if record["stages"] else ""
        output.emit(record) if as_json else print(one_line(f"{path} is whole{has}"))
        return
    for problem in problems:
        told = {"path": problem.path, "kind": problem.kind, "message": problem.message}
        output.emit({**record, **told}) if as_json else print(one_line(": ".join(told.values())))
    output.note(f"{path} is damaged ({len(problems)} found): restore it from a copy, or build it again")
    raise typer.Exit(errors.EXIT_FOUND)


@app.command(
    short_help="Show documents, and the tokens that training saw.",
    epilog=example(
        "stride index show doc-17 --tokens",
        "stride index show --index run.stride > documents.jsonl",
        "stride index show --tokens --json | jq -c '.tokens[].scored'",
    ),
)
def show(
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOC...]", help="Ids of documents; default: all.", show_default=False),
    ] = None,
    *,
    index: IndexPath = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show tokens, which of them are scored, form, clock and subsets.")
    ] = False,
    model: ModelPath = None,
    json: Json = None,
) -> None:
    """Show documents as the index has them: their texts, or their tokens, and which of these are scored."""
    from stride_cli.corpus.summary import document_records
    from stride_cli.data.workspace import open_index
    from stride_cli.models.kinds import kind_of_index
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.models.loading import path_of_model
    from stride_cli.prove.verify_hit import find_documents

    opened = open_index(find_index(index))
    known: Any = 0  # a classifier's tokens are rows and labels
    if tokens and kind_of_index(opened) != "classifier":
        known = load_tokenizer(model or path_of_model(opened))
    numbers = find_documents(opened, documents).tolist() if documents else range(opened.n_documents)
    as_json = output.wants_json(json)
    for record in document_records(opened, numbers, tokenizer=known if tokens else None):
        if as_json:
            output.emit(record)
            continue
        print(one_line(f"{record['document']}: chunks {record['chunks'][0]} to {record['chunks'][1] - 1}"))
        for chunk in record.get("tokens", ()):
            print_tokens(chunk, record["form"])
        if not tokens and record["text"] is not None:
            print(printable(record["text"]))


def _report(index: Index, path: Location, begin: float, json: bool | None) -> None:
    """Show an index that was made or changed since `begin`."""
    from stride_cli.corpus.summary import made

    record: Any = made(index, path, time.monotonic() - begin)
    if unscored := record["unscored_documents"]:
        output.note(
            f"warning: {unscored:,} of {index.n_documents:,} documents have no scored token (one token long, "
            "or a conversation without an answer); they are kept, but nothing can be attributed to them"
        )
    show_record(record, json, title=f"index {path}")
