"""`stride tune`: which settings of the operators predict best on this corpus and model?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.commands.options import Fitted, Flags, Json, with_flags
from stride_cli.research.commands.evaluate_options import listed
from stride_cli.research.tuning.options import TuneOptions

if TYPE_CHECKING:
    from stride_cli.research.tuning.records import TrialRecord

EXAMPLE = """\b
Examples:
  stride tune --index run.stride --dry-run
  stride tune --index run.stride --damping 0.03,0.1,0.3 --layer 8,16
  stride tune --index run.stride --queries held_out.jsonl --rank 32,96
  stride tune --index classifier.stride --criterion retrained --damping 0.1,1,10,30,100
  stride tune --index run.stride --criterion truth --space logit --rank 32,96
"""


@with_flags
def tune(
    space: Annotated[
        str | None, typer.Option("--space", help="Operator spaces to try, separated by commas.")
    ] = None,
    layer: Annotated[str | None, typer.Option("--layer", help="Layers to try: 4,8.")] = None,
    damping: Annotated[str | None, typer.Option("--damping", help="Dampings to try: 0.03,0.1,0.3.")] = None,
    rank: Annotated[str | None, typer.Option("--rank", help="Ranks to try: 32,96.")] = None,
    *,
    where: Fitted,
    given: Annotated[dict[str, Any], Flags(TuneOptions)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not write stride.yaml.")] = False,
    json: Json = None,
) -> None:
    """Try settings of the operators on this index, and write the best to a new stride.yaml.

    The criterion: the model is trained a little further, from its own weights, on random halves of the
    corpus, and the losses of queries that are in none of them are measured. A trial fits operators, finds the
    influence of every chunk as `stride query` does by default, and is scored by how well the sums over each
    half predict those losses (Spearman's ρ over halves, mean over queries). That needs the index and the
    model only, no recipe.

    It is not retraining: what was learnt before is partly kept, the optimizer is AdamW whatever the model's
    was, and queries from the corpus have been trained on. It ranks settings; its values are no LDS, and small
    differences are not to be trusted. Where the model can be retrained, give --criterion retrained: it is
    trained anew, by its recipe, on as many random halves. Neither they nor the held-out chunks are those of
    stride evaluate truth, so that what is chosen can be reported there; rows held out of a classifier may be
    the same, and --queries FILE gives others.

    A setting changes only where the score gains more than two standard errors of the difference (over
    queries) on what you start with, stride.yaml or the defaults. Responses and trials are kept beside the
    index: interrupted, the same command goes on, and with more values it adds to what is there. Trials go to
    stdout as JSON Lines, then the choice; the table goes to stderr.
    """
    from stride_cli.config import resolve
    from stride_cli.output import emit, note
    from stride_cli.research import api
    from stride_cli.research.commands.evaluate_options import outlast_reader
    from stride_cli.research.tuning.written_settings import write_settings

    if not dry_run:
        outlast_reader()
    chosen = resolve("train", {})
    swept = (
        ("space", space, str),
        ("layer", layer, int),
        ("damping", damping, float),
        ("rank", rank, int),
    )
    grid = {name: listed(f"--{name}", text, kind) for name, text, kind in swept if text is not None}
    options = TuneOptions(
        grid=grid or None,
        start={name: getattr(chosen, name) for name in ("space", "layer", "rank", "damping")},
        **given,
    )
    records: list[TrialRecord] = []

    def show(record: TrialRecord) -> None:
        records.append(record)
        emit(record)

    result = api.tune(where, options, on_trial=show)
    settings = result.pop("settings")
    place = write_settings(settings) if settings and not dry_run else None
    result["path"] = "" if place is None else str(place)
    emit(result)
    _table(records)
    gain = result["gain"]
    note(
        f"chosen: score {result['score']['mean']:.3f} ± {result['score']['se']:.3f}, "
        f"{gain['mean']:+.3f} ± {gain['se']:.3f} on the settings before"
    )
    written = ", ".join(result["written"].splitlines())
    if settings:
        note(f"{'wrote to' if place else 'set in'} stride.yaml: {written}")
    else:
        note("nothing is gained by other settings: stride.yaml stays as it is")
    if result["next"]:
        note(f"next: {result['next']}")


def _table(records: list[TrialRecord]) -> None:
    """Print the trials on stderr, the best of each moment marked."""
    from stride_cli.commands.tables import print_table
    from stride_cli.research.commands.evaluate_options import seconds

    rows = []
    for record in records:
        score = "–" if record["score"] is None else f"{record['score']:+.3f} ± {record['se']:.3f}"
        rank = "default" if record["rank"] is None else str(record["rank"])
        damping = "default" if record["damping"] is None else f"{record['damping']:g}"
        cells = [record["space"], str(record["layer"]), rank, damping]
        cells += [str(record["subsets"]), str(record["degree"]), score]
        rows.append([*cells, seconds(record["seconds"]), "*" if record["best"] else record.get("error", "")])
    columns = ["space", "layer", "rank", "damping", "K", "d", "score", "took", "best"]
    print_table("Trials", columns, rows, stderr=True)
