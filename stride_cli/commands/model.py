"""`stride model`: train and fine-tune models whose training set is known, and look at a checkpoint."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli import output
from stride_cli.commands import classifier
from stride_cli.commands.index import CorpusArgument, _example, _with_reading
from stride_cli.commands.options import Json
from stride_cli.commands.tables import show_record
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.training.recorded_run import Trained

app = typer.Typer(
    help="Train a language model on a corpus, fine-tune one, or look at one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Schedule(StrEnum):
    """How the learning rate falls."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class Optimizer(StrEnum):
    """Muon for the blocks' matrices with AdamW for the rest, or AdamW for all; sgd: classifiers only."""

    muon_adamw = "muon+adamw"
    adamw = "adamw"
    sgd = "sgd"


class Dtype(StrEnum):
    """Of matrix products; weights stay fp32."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the model goes.")]
EpochsOption = Annotated[
    float | None, typer.Option("--epochs", help="Passes over the corpus; default fits it.")
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Optimizer steps, instead of --epochs.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-tokens", help="Most tokens of a batch; default fits the corpus.")
]
ScheduleOption = Annotated[Schedule, typer.Option("--schedule", help="How the learning rate falls.")]
CheckpointsOption = Annotated[
    int, typer.Option("--checkpoints", metavar="N", help="Models kept along the way, evenly spaced.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of initial weights and order.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, …")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Of matrix products; auto: bf16 where it is faster.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model, or discard an unfinished training, at DIR.")
]


@app.command(
    epilog=_example(
        "stride model train corpus.jsonl --out model",
        "stride model train corpus.jsonl --out model --layers 6 --width 256 --epochs 10 --checkpoints 4",
        "stride model train mnist.npz --out model --network mlp --rows 2000 --holdout 100",
        "stride model train table.csv --out model --network mlp --label status --id-column name",
    )
)
@_with_reading
def train(
    corpus: CorpusArgument,
    *,
    out: OutOption = Path("model"),
    layers: Annotated[
        int | None, typer.Option("--layers", help="Blocks; default fits the corpus: 4 to 6.")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="Of the residual stream; default 128 to 256.")
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Attention heads; default width / 64.")] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", help="Tokens of the BPE; default 512 to 8192.")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", help="Longest sequence; default 512.")] = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    batch_tokens: BatchOption = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Peak learning rate: Muon's, default 0.02; AdamW's alone, 0.006."),
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option("--schedule", help="How the learning rate falls; default linear, classifiers: cosine."),
    ] = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option("--optimizer", help="Default muon+adamw; of a classifier, what suits its network."),
    ] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option(
            "--checkpoints",
            metavar="N",
            min=0,
            help="Models kept along the way, evenly spaced. Default 0; of a small classifier 9, which "
            "stride train uses.",
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    overwrite: OverwriteOption = False,
    network: classifier.Network = None,
    label: classifier.Label = None,
    id_column: classifier.IdColumn = None,
    drop: classifier.Drop = None,
    rows: classifier.Rows = None,
    rows_from: classifier.RowsFrom = None,
    holdout: classifier.Holdout = 0,
    shuffle: classifier.Shuffle = False,
    weights: classifier.Weights = None,
    batch_size: classifier.BatchSize = None,
    weight_decay: classifier.WeightDecay = None,
    json: Json = False,
    reading: ReadOptions,
) -> None:
    """Train a NanoChat model, with a tokenizer of its own, on a corpus; or a classifier on examples.

    Size and length of the training fit the corpus: about a hundred documents take well under a minute. The
    recipe is stored with the model. Interrupted, the same command goes on where it was.

    A .npz of inputs and labels, or a table with --label or --network, gives a classifier.
    """
    only = {"network": network, "label": label, "rows": rows, "rows_from": rows_from, "holdout": holdout}
    if classifier.wants_classifier(corpus, only):
        classifier.train_classifier(
            corpus,
            out,
            overwrite=overwrite,
            json=json,
            columns={"label": label, "id": id_column, "drop": tuple(drop or ())},
            network=network or "mlp",
            width=width,
            layers=layers,
            rows=rows,
            rows_file=None if rows_from is None else str(rows_from),
            holdout=holdout,
            shuffle=shuffle,
            weights=None if weights is None else str(weights),
            checkpoints=checkpoints,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=None if optimizer is None else optimizer.value,
            lr=lr,
            weight_decay=weight_decay,
            schedule=None if schedule is None else schedule.value,
            seed=seed,
            device=device,
        )
        return
    from stride_cli.training.pretraining import TrainOptions, train_model

    begin = time.monotonic()
    options = TrainOptions(
        layers=layers,
        width=width,
        heads=heads,
        vocab=vocab,
        context=context,
        epochs=epochs,
        steps=steps,
        batch_tokens=batch_tokens,
        lr=lr,
        schedule=(schedule or Schedule.linear).value,
        optimizer=(optimizer or Optimizer.muon_adamw).value,
        checkpoints=checkpoints or 0,
        seed=seed,
        device=device,
        dtype=dtype.value,
    )
    trained = train_model(corpus, out, options, reading=reading, overwrite=overwrite)
    _report(trained, time.monotonic() - begin, json)
    output.note(f"next: stride index build {' '.join(corpus)} --model {out}")


@app.command(
    epilog=_example(
        "stride model finetune answers.jsonl --model model --out tuned",
        "stride model finetune answers.jsonl --model model --out tuned --lora 16 --epochs 2",
    )
)
@_with_reading
def finetune(
    corpus: CorpusArgument,
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Checkpoint directory, .gguf file or hub id.")
    ],
    out: OutOption,
    lora: Annotated[
        int | None, typer.Option("--lora", metavar="RANK", help="Train low-rank changes of the blocks only.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights (the default).")] = False,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Passes over the corpus; default 3.")
    ] = None,
    steps: StepsOption = None,
    batch_tokens: Annotated[
        int | None, typer.Option("--batch-tokens", help="Most tokens of a batch; default 2048.")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Peak learning rate; default 3e-5, more with --lora or a small model."),
    ] = None,
    schedule: ScheduleOption = Schedule.linear,
    checkpoints: CheckpointsOption = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    overwrite: OverwriteOption = False,
    json: Json = False,
    reading: ReadOptions,
) -> None:
    """Fine-tune a model: on the answers only, where documents are prompts with responses or conversations.

    Low-rank changes are merged: DIR is a whole model. Interrupted, the same command goes on where it was.
    """
    from stride_cli.training.finetuning import FinetuneOptions, finetune_model

    if lora is not None and full:
        raise UsageError("--lora and --full exclude each other", fix="give one of the two")
    if lora is not None and lora < 1:
        raise UsageError(f"--lora is {lora}, expected a rank of at least 1", fix="--full trains all weights")
    begin = time.monotonic()
    options = FinetuneOptions(
        lora_rank=lora or 0,
        epochs=epochs,
        steps=steps,
        batch_tokens=batch_tokens,
        lr=lr,
        schedule=schedule.value,
        checkpoints=checkpoints,
        seed=seed,
        device=device,
        dtype=dtype.value,
    )
    trained = finetune_model(corpus, model, out, options, reading=reading, overwrite=overwrite)
    _report(trained, time.monotonic() - begin, json)
    output.note(f"next: stride index build {' '.join(corpus)} --model {out}")


@app.command(epilog=_example("stride model info model", "stride model info model --json | jq .recipe"))
def info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint directory, .gguf file or hub id.")
    ],
    json: Json = False,
) -> None:
    """What a checkpoint is: architecture, size, fingerprints, and how STRIDE trained it, if it did."""
    from stride_cli.models.description import describe_model

    show_record({"schema": "stride.model_info/1", **describe_model(model)}, json, title=model)


def _report(trained: Trained, seconds: float, json: bool) -> None:
    record: dict[str, Any] = {
        "schema": "stride.model/1",
        "path": str(trained.path),
        "parameters": trained.parameters,
        "loss": trained.loss,
        "steps": trained.result.steps,
        "epochs": trained.recipe.epochs,
        "tokens": trained.recipe.corpus["tokens"],
        "documents": trained.recipe.corpus["documents"],
        "chunks": trained.recipe.corpus["chunks"],
        "seconds": seconds,
    }
    show_record(record, json, title="model")
