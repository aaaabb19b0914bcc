"""`stride audit`: is a benchmark in the corpus, and has the model learnt it from there?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stride_cli.attribution.options import SharingOptions
from stride_cli.audit.options import CONTROLS, AuditOptions, FindingsOptions
from stride_cli.commands.options import READING, Asked, Flags, InputOptions, Json, with_flags
from stride_cli.commands.panels import example
from stride_cli.commands.prompts import BadInput
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import EXIT_FOUND, UsageError

if TYPE_CHECKING:
    from index_format.reader import Index

_NAMED = 5  # items by which a job fails
EXAMPLE = example(
    "stride audit benchmark.jsonl --index run.stride | jq -c '{item, verdict, reason}'",
    "stride audit gsm8k.jsonl --field prompt=question --field response=answer --number-ids",
    "stride audit benchmark.jsonl --controls fresh.jsonl --format sarif --fail-on-leak > audit.sarif",
)


@with_flags
def audit(
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK",
            help='JSON Lines (or Parquet) of {"id", "prompt", "response"} or {"id", "text"}; - for stdin.',
            show_default=False,
        ),
    ],
    *,
    controls: Annotated[
        str,
        typer.Option(
            "--controls",
            metavar="FILE|absent|made",
            help="What items are compared with: a file of others that cannot be in the corpus, items without "
            "a copy in it, or versions made of the items; auto: absent ones if they are enough.",
        ),
    ] = "auto",
    wanted: Annotated[FindingsOptions, Flags(FindingsOptions)],
    options: Annotated[AuditOptions, Flags(AuditOptions)],
    where: Asked,
    json: Json = None,
    reading: Annotated[ReadOptions, Flags(*READING, leave_out=("on_bad",))],
    bad_input: Annotated[InputOptions, Flags(InputOptions)],
    sharing: Annotated[SharingOptions, Flags(SharingOptions)],
) -> None:
    """Look for leaked benchmark items: is an item in the corpus, and did the model learn it there?

    Four verdicts. Leaked and learnt: a document holds the item, or says it in other words, and the model's
    loss shows it. Present, no effect: a document holds it, and a test that would have found an effect found
    none. No evidence: no document holds it. Undecided: no test could have told; `reason` says why.

    Presence is of words: case, white space, punctuation, markup and character forms do not matter; what many
    documents or items have in common, such as an instruction, is no evidence. Effect: changing a few words of
    a copy that was learnt costs the model more than changing those of controls does. p-values by rank,
    q-values by Benjamini and Hochberg.

    Best controls: --controls FILE, 20 items or more of the same kind, written after the corpus. As good: the
    benchmark's own items that are not in the corpus, so give the whole benchmark. Where nearly all items are
    in the corpus, versions of them (other numbers, words exchanged) are controls. They can show that an item
    was learnt, and not that it was not.
    """
    from stride_cli import api
    from stride_cli.audit.judge import LEAKED, UNDECIDED, audit_files
    from stride_cli.config import resolve
    from stride_cli.output import note, wants_json

    if bad_input.on_bad == "record" and wanted.format not in (None, "jsonl"):
        raise UsageError(
            f"--on-bad record writes JSON lines, and --format is {wanted.format}",
            fix="give --on-bad skip, or --format jsonl",
        )
    if wanted.format and json is not None and not (json and wanted.format == "jsonl"):
        said = f"--format {wanted.format} and --{'json' if json else 'text'} are two forms of one output"
        raise UsageError(said, fix="drop one of them")
    bad = BadInput(bad_input.on_bad, as_json=wanted.format == "jsonl" or wants_json(json), what="item")
    made = controls in CONTROLS
    options = replace(
        options,
        controls=controls if made else "auto",
        lambda_ratio=resolve("query", {"lambda_ratio": options.lambda_ratio}).lambda_ratio,
    )
    session, findings = audit_files(
        lambda: api.open(where),
        benchmark,
        None if made else controls,
        options,
        reading,
        None if bad.stops else bad.take,
        (where, sharing) if sharing.shared else None,
    )
    _write(findings, wanted.format, json, benchmark, session.index)
    _summarise(findings)
    bad.leave()  # what it found of the others is no verdict on the whole
    failing = [LEAKED] * wanted.fail_on_leak + [UNDECIDED] * wanted.fail_on_undecided
    named = [f"{found.document.id} ({found.verdict})" for found in findings if found.verdict in failing]
    if named:
        more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
        note(f"exit code 1, for {', '.join(named[:_NAMED])}{more}")
        raise typer.Exit(EXIT_FOUND)


def _write(findings: list, format: str | None, json: bool | None, benchmark: str, index: Index) -> None:
    import sys

    from stride_cli.audit.formats import to_csv, to_sarif
    from stride_cli.output import emit, wants_json
    from stride_cli.report.audit_page import render_page

    if format is None and not wants_json(json):
        _print(findings)
    elif format in (None, "jsonl"):
        for finding in findings:
            emit(finding.to_record())
    elif format == "html":
        sys.stdout.write(render_page(findings, benchmark=Path(benchmark).name, index=index))
    else:
        sys.stdout.write(to_csv(findings) if format == "csv" else to_sarif(findings))


def _print(findings: list) -> None:
    from stride_cli.commands.tables import print_table

    rows = []
    for found in findings:
        held, effect = found.presence, found.effect
        q = "" if found.q is None else f"{found.q:.3g}"
        loss = [f"{effect['loss']:.3f}", f"{effect['control_loss'] or float('nan'):.3f}"]
        copied = [held["found"], f"{held['share']:.0%}"]
        rows.append([found.document.id, found.verdict, q, *copied, *loss, held["document"]])
    columns = ["item", "verdict", "q", "found", "share", "loss", "controls", "document"]
    print_table("audit", columns, rows)


def _summarise(findings: list) -> None:
    """Write on stderr what was found, and what the test could find."""
    from stride_cli.audit.formats import summary
    from stride_cli.output import note

    for line in summary(findings):
        note(line)
