"""`stride evaluate truth`: retrain on random subsets, and keep what becomes of the queries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.commands.options import Asked, Flags, Json, flag, with_flags
from stride_cli.errors import UsageError
from stride_cli.research.evaluation.options import BenchOptions, ImportOptions
from stride_cli.research.training.options import TruthOptions, per_mille

if TYPE_CHECKING:
    from stride_cli.schema.train_records import TruthRecord

EXAMPLE = """\b
Examples:
  stride evaluate truth --index run.stride --queries queries.jsonl --subsets 64 --alpha 0.5
  stride evaluate truth --queries queries.jsonl --subsets 32 --own-seed
  stride evaluate truth --queries queries.jsonl --command 'python train.py --mask {mask} --out {out}'
  stride evaluate truth --index run.stride --queries test.jsonl --import lds.jsonl
"""


@with_flags
def truth(
    queries: Annotated[
        Path, typer.Option("--queries", help='JSON Lines of {"id", "text"} or {"id", "prompt", "response"}.')
    ],
    *,
    where: Asked,
    given: Annotated[
        dict[str, Any],
        Flags(
            TruthOptions,
            leave_out=("overwrite",),
            first=("n_subsets", "alpha", "n_seeds", "own_seed", "keep"),
            command={
                "help": "Retrain by this program instead: {mask} is a .npy of one bool a chunk, {out} where "
                "it leaves the checkpoint, {seed} a seed."
            },
        ),
    ],
    imported: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE|DIR",
            help='Retrain nothing, read the losses: JSON Lines of {"train_subset", "train_subset_global", '
            '"test_loss"}, as the published truths of STRIDE (stride-lds) are; or measure the models of a '
            "bank that bergson validate made.",
        ),
    ] = None,
    reading: Annotated[dict[str, Any], Flags(ImportOptions)],
    chat: Annotated[bool | None, flag(BenchOptions, "chat")] = None,
    overwrite: Annotated[bool, flag(TruthOptions, "overwrite")] = False,
    json: Json = None,
) -> None:
    """Retrain the model on random subsets of its training chunks: the ground truth that LDS compares with.

    Interrupted, the same command goes on where it was. With more --subsets or --seeds, or another --alpha, it
    adds to what is there.
    """
    from stride_cli.output import emit, note, wants_json
    from stride_cli.research.evaluation.bench import build_truth_of
    from stride_cli.research.evaluation.truth_import import import_truth
    from stride_cli.research.training.truth import seeds_in_words

    begin = time.monotonic()
    options, rows = TruthOptions(**given, overwrite=overwrite), ImportOptions(**reading).rows
    if imported is None:
        share = per_mille(options.alpha)
        workspace, wanted, found = build_truth_of(where, queries, options, chat=chat)
        chosen = found.take([row for row, value in enumerate(found.alpha) if round(value * 1000) == share])
    else:
        if options != TruthOptions(overwrite=overwrite):
            raise UsageError(
                "--import reads subsets and losses from a file, and the other options say how to retrain",
                fix="give --import with --queries, --rows and --overwrite only",
            )
        workspace, wanted, found = import_truth(
            where, imported, queries, rows=rows, overwrite=overwrite, chat=chat
        )
        chosen, share = found, round(float(found.alpha[0]) * 1000)
    models = chosen.n_subsets * chosen.n_seeds
    reused = 0 if imported is not None else max(0, models - found.trained)  # of this α: others may be there
    record: TruthRecord = {
        "schema": "stride.truth/1",
        "index": str(workspace.index.path),
        "subsets": chosen.n_subsets,
        "seeds": chosen.n_seeds,
        "own_seed": chosen.own_seed,
        "alpha": share / 1000,
        "queries": len(wanted),
        "trained": found.trained,
        "reused": reused,
        "imported": 0 if imported is None else models,
        "mean_loss": float(chosen.losses.mean()),
        "base_loss": float(chosen.base_losses.mean()),
        "seconds": time.monotonic() - begin,
    }
    if wants_json(json):
        emit(record)
        return
    trained_from = seeds_in_words(chosen.n_seeds, chosen.own_seed)
    done = f"{found.trained:,} models trained, {reused:,} already there"
    if imported is not None:
        done = f"{models:,} models read from {imported}"
    note(
        f"{record['subsets']:,} subsets × {trained_from} of α = {record['alpha']:g}: {done}, "
        f"in {record['seconds']:.0f} s"
    )
    note(
        f"mean loss of {len(wanted):,} queries: {record['mean_loss']:.3f} nats after retraining, "
        f"{record['base_loss']:.3f} before"
    )
    note(f"next: stride evaluate lds --index {workspace.index.path}")
