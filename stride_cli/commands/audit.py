"""`stride audit`: is a benchmark in the corpus, and has the model learnt it from there?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from stride_cli.attribution.options import InputOptions, SharingOptions
from stride_cli.audit.options import CONTROLS, AuditOptions, FindingsOptions
from stride_cli.commands.options import READING, Asked, Flags, Json, with_flags
from stride_cli.commands.panels import example
from stride_cli.commands.prompts import BadInput
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import EXIT_FOUND, UsageError

_NAMED = 5  # items by which a job fails
_MORE = {  # how to come by more controls than were used
    "made": "a larger --controls-per-item, or --controls FILE",
    "file": "a longer --controls file",
    "absent": "--controls FILE of {:,} items that cannot be in the corpus, or, roughly, --controls made",
}
_CAVEATS = {
    "made": "controls made from the items are exchangeable with them only roughly: see stride audit --help",
    "absent": "items that are not in the corpus are the controls: an effect on them can be found with "
    "--controls FILE only",
}
EXAMPLE = example(
    "stride audit benchmark.jsonl --index run.stride | jq -c '{item, verdict, q}'",
    "stride audit gsm8k.jsonl --field prompt=question --field response=answer --number-ids",
    "stride audit benchmark.jsonl --controls fresh.jsonl --format sarif --fail-on-leak 0.05 > audit.sarif",
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
    json: Json = False,
    reading: Annotated[ReadOptions, Flags(*READING, leave_out=("on_bad",))],
    bad_input: Annotated[InputOptions, Flags(InputOptions)],
    sharing: Annotated[SharingOptions, Flags(SharingOptions)],
) -> None:
    """Look for leaked benchmark items: copies in the corpus, and their effect on the model, apart.

    Lexical evidence: shared n-grams and the best BM25 document, which finds items in other words too. Effect
    on the model: loss (of a fine-tuned model: what fine-tuning took off it) and influence, compared with
    controls, and both have to be unusual; p-values by rank, q-values by Benjamini and Hochberg.

    Best controls: --controls FILE, items of the same kind, written after the corpus. As good where there are
    many: the benchmark's own items that are absent from the corpus, so give the whole benchmark; with them
    only items that have a copy, or are there in other words, can be judged. Controls
    made from the items (other numbers, words exchanged) stand for untrained items only roughly: not where the
    model can work out the right number, nor for texts of a few words, nor where nearly all items are in the
    corpus.
    """
    from stride_cli import api
    from stride_cli.audit.judge import audit_files
    from stride_cli.config import resolve
    from stride_cli.output import note, wants_json

    if bad_input.on_bad == "record" and wanted.format not in (None, "jsonl"):
        raise UsageError(
            f"--on-bad record writes JSON lines, and --format is {wanted.format}",
            fix="give --on-bad skip, or --format jsonl",
        )
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
    _write(findings, wanted.format, json, benchmark, session.index.path.name, options.level)
    _summarise(findings, options.level)
    bad.leave()  # what it found of the others is no verdict on the whole
    if (limit := wanted.fail_on_leak) is None:
        return
    failing = [f"{e.document.id} ({e.verdict}, q = {e.q:.3g})" for e in findings if e.q <= limit]
    if failing:
        named = ", ".join(failing[:_NAMED])
        more = f" and {len(failing) - _NAMED:,} more" if len(failing) > _NAMED else ""
        note(f"exit code 1 by --fail-on-leak {limit:g}, for their q-values: {named}{more}")
        raise typer.Exit(EXIT_FOUND)


def _write(findings: list, format: str | None, json: bool, benchmark: str, index: str, level: float) -> None:
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
        name = Path(benchmark).name
        sys.stdout.write(render_page(findings, benchmark=name, index_name=index, level=level))
    else:
        sys.stdout.write(to_csv(findings) if format == "csv" else to_sarif(findings))


def _print(findings: list) -> None:
    from stride_cli.commands.tables import print_table

    columns = ["item", "verdict", "q", "n-grams", "longest"]
    columns += ["loss", "below controls", "influence", "document"]
    rows = []
    for found in findings:
        words, effect = found.lexical, found.effect
        copied = [f"{words['ngram_share']:.0%}", str(words["longest_run"])]
        moved = [f"{effect['loss']:.3f}", f"{effect['loss_gap']:+.3f}", f"{effect['candidate_share']:.0%}"]
        document = words["document"] or words["bm25_document"]
        rows.append([found.document.id, found.verdict, f"{found.q:.3g}", *copied, *moved, document])
    print_table("audit", columns, rows)


def _summarise(findings: list, level: float) -> None:
    """Counts, and whether there were controls enough, on stderr."""
    from stride_cli.audit.calibration import fewest_controls, fewest_together
    from stride_cli.audit.judge import CONTROLS_IN_WORDS, VERDICTS
    from stride_cli.output import note

    counts = Counter(finding.verdict for finding in findings)
    kind, count = findings[0].controls["kind"], max(finding.controls["count"] for finding in findings)
    note(
        f"{len(findings):,} items: "
        + ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICTS if counts[verdict])
        + f"; {count:,} controls, {CONTROLS_IN_WORDS[kind]}"
    )
    there = sum(finding.lexical["present"] or finding.lexical["near"] for finding in findings)
    tested = there or len(findings)
    wanted = fewest_controls(tested, level)
    if count < wanted:
        together = fewest_together(tested, count, level)
        alone = f"; {together:,} leaked ones together can" if together <= tested else ""
        note(
            f"warning: with {count:,} controls (for {tested:,} items) a single leaked item cannot reach "
            f"q < {level:g}{alone}. {wanted:,} controls would do: {_MORE[kind].format(wanted)}"
        )
    if kind in _CAVEATS:
        note(_CAVEATS[kind])
