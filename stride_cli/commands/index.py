"""`stride index`: plan, build, look at, verify, extend and export an index."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index_format.location import Location, RemotePath, local_directory, locate
from stride_cli import errors, output
from stride_cli.characters import one_line
from stride_cli.commands.completion import complete_index
from stride_cli.commands.next_steps import next_step
from stride_cli.commands.options import (
    AdapterPath,
    Flags,
    IndexPath,
    Json,
    ModelPath,
    Reading,
    find_index,
    flag_of,
    with_flags,
    writable_index,
)
from stride_cli.commands.panels import CommandLine

# light: the standard library only; everything else is imported by the command that needs it
from stride_cli.corpus.options import BuildOptions, PlanOptions
from stride_cli.corpus.readers import ReadOptions
from stride_cli.options import entries
from stride_cli.permissions import Permissions, permitted

if TYPE_CHECKING:
    from index_format.verify import Problem
    from stride_cli.corpus.plan import Plan
    from stride_cli.schema.index_records import (
        IndexInfoRecord,
        IndexRecord,
        IndexSummary,
        IndexVerifyRecord,
    )

app = CommandLine(help="Build an index of a corpus, and look after it.")


def _example(*commands: str) -> str:
    # \b keeps the lines as they are
    return "\b\nExample:\n" + "\n".join(f"  {command}" for command in commands)


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
    list[str],
    typer.Argument(
        metavar="CORPUS...",
        help=_CORPUS_HELP,
        show_default=False,
    ),
]
IndexArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[INDEX]",
        help="The index, a directory, .zip or URL; default: the only *.stride here.",
        show_default=False,
        autocompletion=complete_index,
    ),
]


@app.command(
    short_help="Chunk a corpus, draw its subsets.",
    epilog=_example(
        "stride index build corpus.jsonl --model model --out run.stride",
        "stride index build 'hf://datasets/OWNER/NAME?split=train' --model model --number-ids",
        "zcat more.jsonl.gz | stride index build - --model model --out more.stride",
        "stride index build --from-run run",
    ),
)
@with_flags
def build(
    corpus: Annotated[
        list[str] | None, typer.Argument(metavar="[CORPUS...]", help=_CORPUS_HELP, show_default=False)
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Checkpoint directory, .gguf file or hub id."),
    ] = None,
    adapter: AdapterPath = None,  # `with_flags` makes it the model
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            metavar="DIR",
            help="Corpus and model of a recorded training, of StrideCallback or stride model train.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the index goes.", parser=_new_index)
    ] = Path("run.stride"),
    given: Annotated[dict[str, Any], Flags(BuildOptions)],
    trust_code: Annotated[bool, flag_of(entries(Permissions)["trust_code"], _TRUST)] = False,
    json: Json = False,
    reading: Reading,
) -> None:
    """Build an index: chunk a corpus with the model's tokenizer and draw its subsets.

    Interrupted, the same command goes on where it was. For a classifier: the rows that it was trained on.
    """
    from stride_cli import api

    begin = time.monotonic()
    if from_run is not None:
        if corpus or model:
            raise errors.UsageError(
                "--from-run says which corpus and model, and others were given too", fix="leave them out"
            )
        built = api.build_index_of_run(
            from_run, out=out, options=BuildOptions(**given), reading=ReadOptions.of(reading)
        )
    elif not corpus or model is None:
        lacking = "a model" if corpus else "a corpus"
        raise errors.UsageError(
            f"{lacking} is missing (expected a corpus and --model, or --from-run)",
            fix="stride index build corpus.jsonl --model model",
        )
    else:
        with permitted(Permissions(trust_code=trust_code)):
            built = api.build_index(
                corpus,
                model_path=model,
                out=out,
                options=BuildOptions(**given),
                reading=ReadOptions.of(reading),
            )
    _report(built, out, time.monotonic() - begin, json)
    steps = sorted(map(str, from_run.glob("checkpoints/step-*"))) if from_run is not None else []
    next_step("stride", "train", "--index", str(out), *(["--checkpoints", *steps] if steps else []))


@app.command(
    short_help="Add documents to an index.",
    epilog=_example("stride index append more.jsonl --index run.stride"),
)
@with_flags
def append(
    corpus: CorpusArgument,
    *,
    index: IndexPath = None,
    model: ModelPath = None,
    json: Json = False,
    reading: Reading,
) -> None:
    """Add documents to an index; what is in it stays as it is, and so do its subsets' members.

    Operators stay too, but have not seen the new chunks until `stride train` is run again.
    """
    from index_format.reader import Index

    path = writable_index(index)
    begin = time.monotonic()
    with output.progress("opening the index and its tokenizer"):
        from stride_cli.corpus.build import append_to_index
        from stride_cli.models.fingerprints import tokenizer_fingerprint
        from stride_cli.models.language.tokenizer import load_tokenizer
        from stride_cli.models.loading import path_of_model

        tokenizer = load_tokenizer(model or path_of_model(Index.open(path)))
    extended = append_to_index(
        path,
        corpus,
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        reading=ReadOptions.of(reading),
    )
    _report(extended, path, time.monotonic() - begin, json)
    again = ("--overwrite",) if extended.has("operators") else ()
    why = "the operators have not seen the new chunks; next" if again else "next"
    next_step("stride", "train", "--index", str(path), *again, why=why)


@app.command(
    short_help="Join indexes that were built apart.",
    epilog=_example(
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
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the index goes.", parser=_new_index)
    ] = Path("run.stride"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the index, or an unfinished build, at DIR.")
    ] = False,
    json: Json = False,
) -> None:
    """Join indexes that were built apart: the same as an index built of their corpora, one after the other.

    The ranges of one corpus (stride index build --range) are put in order. Subsets are drawn for all chunks
    as one build would draw them, so operators of the parts are of other subsets, and stay behind.
    """
    from stride_cli.corpus.merge import merge_indexes

    begin = time.monotonic()
    merged = merge_indexes([locate(index) for index in indexes], out, overwrite=overwrite)
    _report(merged, out, time.monotonic() - begin, json)
    next_step("stride", "train", "--index", str(out))


@app.command(
    short_help="What an index will be.",
    epilog=_example(
        "stride index plan corpus.jsonl --model model",
        "stride index plan --chunks 11400000",
    ),
)
@with_flags
def plan(
    corpus: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CORPUS...]", help="As for build; with --model.", show_default=False),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Checkpoint directory, .gguf file or hub id."),
    ] = None,
    given: Annotated[dict[str, Any], Flags(PlanOptions, first=("chunks",))],
    json: Json = False,
    reading: Reading,
) -> None:
    """Plan an index before building it: K, d, bytes, memory, coverage, chunks that cannot be told apart.

    How long fitting its operators takes: stride train --dry-run, once it is built.
    """
    from dataclasses import asdict

    options = PlanOptions(**given)
    if corpus and options.chunks is not None:
        raise errors.UsageError(
            "--chunks plans without a corpus, and a corpus was given too", fix="give one of the two"
        )
    if not ((corpus and model) or options.chunks is not None):
        raise errors.UsageError(
            "nothing to plan for: expected a corpus with --model, or --chunks",
            fix="stride index plan corpus.jsonl --model model, or stride index plan --chunks 100000",
        )
    made = _planned_sizes(corpus or (), model, options, ReadOptions.of(reading))
    _show({"schema": "stride.index_plan/1", **asdict(made)}, json, title="plan")


def _planned_sizes(
    corpus: Sequence[str], model: str | None, options: PlanOptions, reading: ReadOptions
) -> Plan:
    """Return K, d and bytes of a corpus, or of `options.chunks`."""
    from stride_cli.corpus.build import survey_corpus
    from stride_cli.corpus.context import context_length, subsets_bound
    from stride_cli.corpus.gate_budget import MOST_WITH_PROJECTIONS
    from stride_cli.corpus.plan import CorpusCounts, choose_block_size, plan_index
    from stride_cli.models.language.language_recipe import was_finetuned

    if not corpus:
        assert options.chunks is not None
        counts = CorpusCounts(documents=0, chunks=options.chunks, tokens=0)
        return plan_index(counts, options, most_subsets=MOST_WITH_PROJECTIONS)
    from stride_cli.models.language.tokenizer import load_tokenizer

    assert model is not None
    tokenizer = load_tokenizer(model)
    size = choose_block_size(options.block_size, context_length(model))
    counts = survey_corpus(corpus, tokenizer=tokenizer, block_size=size, reading=reading)
    finetuned = was_finetuned(model)
    return plan_index(
        counts,
        options,
        finetuned=finetuned,
        vocabulary=len(tokenizer),
        most_subsets=subsets_bound(model, finetuned=finetuned),
    )


@app.command(
    short_help="What an index holds, and what it was built from.",
    epilog=_example("stride index info run.stride"),
)
def info(index: IndexArgument = None, index_option: IndexPath = None, json: Json = False) -> None:
    """What an index holds, and what it was built from."""
    from stride_cli.corpus.plan import expected_neighbours, expected_overlapping
    from stride_cli.opening import open_index

    path = _named_index(index, index_option)
    opened = open_index(path)
    stated = opened.attributes.get
    record: IndexInfoRecord = {
        "schema": "stride.index_info/1",
        **_summary(opened, path),
        "seed": opened.seed,
        "chunks_per_subset": opened.n_chunks * opened.degree / opened.n_subsets,
        "expected_neighbours": expected_neighbours(opened.n_chunks, opened.n_subsets, opened.degree),
        "expected_overlapping": expected_overlapping(opened.n_chunks, opened.n_subsets, opened.degree),
        "texts": opened.has("corpus/text_bytes"),
        "operators": _operators_summary(opened) if opened.has("operators") else None,
        "truth": _truth_summary(opened) if opened.has("truth") else None,
        "fingerprints": opened.attributes["fingerprints"],
        "model_path": stated("model_path"),
        "created_by": stated("created_by"),
        "format_version": opened.attributes["format_version"],
        "config": stated("config"),
    }
    _show(record, json, title=str(path))


@app.command(
    short_help="Compare every byte of an index with its manifest.",
    epilog=_example("stride index verify run.stride"),
)
def verify(index: IndexArgument = None, index_option: IndexPath = None, json: Json = False) -> None:
    """Read every byte of an index and compare it with its manifest; exit code 1 when something is wrong.

    Manifests find damage, not forgery: to show who made an index, sign its manifests.
    """
    path = _named_index(index, index_option)
    problems = _verified(path)
    record: IndexVerifyRecord = {
        "schema": "stride.index_verify/1",
        "index": str(path),
        "whole": not problems,
    }
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
        if as_json:
            found: IndexVerifyRecord = {
                **record,
                "path": problem.path,
                "kind": problem.kind,
                "message": problem.message,
            }
            output.emit(found)
        else:
            print(one_line(f"{problem.path}: {problem.kind}: {problem.message}"))
    output.note(f"{path} is damaged ({len(problems)} found): restore it from a copy, or build it again")
    raise typer.Exit(errors.EXIT_FOUND)


def _verified(path: Location) -> list[Problem]:
    """Find all that is wrong with an index's bytes, with a progress bar."""
    from index_format.verify import verify as find_problems

    on_disk = _disk_bytes(path)
    with output.progress("verifying", None if on_disk is None else on_disk / 1e6, unit="MB") as ticker:
        done = 0

        def tell(read: int, _total: int) -> None:
            nonlocal done
            ticker.advance((read - done) / 1e6)
            done = read

        return find_problems(path, progress=tell)


class Exported(StrEnum):
    """What `stride index export` writes."""

    documents = "documents"
    chunks = "chunks"
    subsets = "subsets"


@app.command(
    short_help="Write documents, chunks or subsets as JSON Lines.",
    epilog=_example(
        "stride index export documents --index run.stride > documents.jsonl",
        "stride index export chunks --index run.stride | jq .subsets",
    ),
)
def export(
    what: Annotated[
        Exported, typer.Argument(metavar="WHAT", help="documents, chunks or subsets.", show_default=False)
    ],
    index_option: IndexPath = None,
) -> None:
    """Write what an index holds as JSON Lines, for other programs: documents with their texts, chunks with
    tokens and subsets, or subsets with their chunks (the rows of the design matrix).

    Its arrays, operators and retrained losses too, are a Zarr v3 group that any Zarr reader opens.
    """
    from stride_cli.corpus.export import EXPORTS
    from stride_cli.opening import open_index

    opened = open_index(find_index(index_option))
    records, count = EXPORTS[what.value]
    with output.progress(f"writing {what.value}", count(opened), unit=what.value) as ticker:
        for record in records(opened):
            output.emit(record)
            ticker.advance()


def _operators_summary(index: Any) -> dict[str, Any]:
    """What the group says of itself, with its share of the chunks that there are now."""
    found = dict(index.group_attributes("operators"))
    if index.has("operators/seen") and found.get("coverage") is not None:
        found["coverage"] *= index.fitted_share
    return found


def _truth_summary(index: Any) -> dict[str, Any]:
    """How much was retrained; queries and losses are in the group's arrays."""
    subsets, seeds, queries = index.shape("truth/losses")
    alphas = sorted({round(float(alpha), 3) for alpha in index.array("truth/alpha")[:]})
    return {"subsets": subsets, "seeds": seeds, "queries": queries, "alpha": alphas}


def _named_index(argument: str | None, option: str | None) -> Location:
    """The index named by the argument or by --index, else the only one here."""
    if argument is not None and option is not None and locate(argument) != locate(option):
        raise errors.UsageError(
            f"two indexes are named: '{argument}' and, by --index, '{option}'", fix="name it once"
        )
    return find_index(argument or option)


def _summary(index: Any, path: Location) -> IndexSummary:
    on_disk = _disk_bytes(path)
    counts = index.attributes.get("counts") or {}
    return {
        "index": str(path),
        "documents": index.n_documents,
        "chunks": index.n_chunks,
        "tokens": index.n_tokens,
        "scored_tokens": counts.get("scored_tokens"),
        "unscored_documents": counts.get("unscored_documents"),
        "conversations": counts.get("conversations"),
        "skipped_records": counts.get("skipped_records"),
        "subsets": index.n_subsets,
        "degree": index.degree,
        "block_size": index.attributes["block_size"],
        "bytes": index.n_bytes if on_disk is None else on_disk,
    }


def _report(index: Any, path: Location, seconds: float, json: bool) -> None:
    record: IndexRecord = {
        "schema": "stride.index/1",
        **_summary(index, path),
        "seconds": round(seconds, 3),
    }
    unscored = record["unscored_documents"]
    if unscored:
        output.note(
            f"warning: {unscored:,} of {index.n_documents:,} documents have no scored token (one token long, "
            "or a conversation without an answer); they are kept, but nothing can be attributed to them"
        )
    _show(record, json, title=f"index {path}")


def _disk_bytes(path: Location) -> int | None:
    """What a directory takes, unfinished stages too; None for a zip file or a URL."""
    if isinstance(path, RemotePath) or path.is_file():
        return None
    return sum(
        (Path(directory) / name).stat().st_size for directory, _, names in os.walk(path) for name in names
    )


def _show(record: Mapping[str, Any], json: bool, *, title: str) -> None:
    if output.wants_json(json):
        output.emit(record)
        return
    from rich.table import Table

    from stride_cli.commands.tables import text

    table = Table(title=text(title), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(record):
        table.add_row(text(name), text(value))
    output.console().print(table)


def _rows(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in record.items():
        if name == "schema":
            continue
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            rows += _rows(value, f"{label}: ")
        elif name == "checkpoints":
            for number, entry in enumerate(value, 1):
                where = f"{entry['path']} (layer {entry['layer']}, {entry['model_fingerprint']})"
                rows.append((f"{label}: {number}", where))
        elif value is None:
            rows.append((label, "–"))
        elif isinstance(value, bool):
            rows.append((label, "yes" if value else "no"))
        elif isinstance(value, int):
            unit = f"{value:,}"
            is_size = "bytes" in name or prefix == "bytes: "
            rows.append((label, f"{unit} ({_human(value)})" if is_size and value >= 10_000 else unit))
        elif isinstance(value, float):
            rows.append((label, f"{value:,.4g}"))
        else:
            rows.append((label, str(value)))
    return rows


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
