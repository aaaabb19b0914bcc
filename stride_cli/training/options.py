"""Options of trainings; light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stride_cli.errors import UsageError
from stride_cli.options import MORE, Options, engine_option, option

SCHEDULES = ("linear", "cosine", "constant")
OPTIMIZERS = ("muon+adamw", "adamw")
_PANEL = "Classifiers (a file of examples)"
_LAYERS = "Blocks; default fits the corpus: 4 to 6."
_WIDTH = "Width of the residual stream; default 128 to 256."
_LR = "Peak learning rate: Muon's, default 0.02; AdamW's alone, 0.006."
_SCHEDULE = "How the learning rate falls; default linear, classifiers: cosine."
_OPTIMIZER = "Default muon+adamw; of a classifier, what suits its network."
_CHECKPOINTS = (
    "Checkpoints kept along the way, evenly spaced. [0; of a small classifier 9, which stride train uses]"
)
_SEED = "Seed of initial weights and order."
_LARGEST_SEED = 2**63 - 1
_LARGEST_RATE = 1e6
_DEVICE = "auto, cpu, cuda, cuda:1, …"


@dataclass(frozen=True)
class LanguageOptions(Options):
    """Length and device of a language model's training."""

    epochs: float | None = option(None, "Passes over the corpus; default fits it.", above=0, high=10**6)
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", low=1, high=10**9)
    batch_tokens: int | None = option(
        None, "Most tokens of a batch; default fits the corpus.", low=1, example=2048, panel=MORE
    )
    lr: float | None = option(None, _LR, above=0, high=_LARGEST_RATE, example=0.01, panel=MORE)
    schedule: str = option("linear", _SCHEDULE, choices=SCHEDULES, listed=True, panel=MORE)
    checkpoints: int = option(0, _CHECKPOINTS, low=0, high=10_000, metavar="N", panel=MORE)
    seed: int = option(0, _SEED, low=0, high=_LARGEST_SEED, panel=MORE)
    device: str = option("auto", _DEVICE)
    dtype: str = option(
        "auto",
        "Precision of matrix products; auto: bf16 where it is faster.",
        choices=("auto", "fp32", "bf16"),
        listed=True,
        panel=MORE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps both say how long to train", fix="give one of the two")


@dataclass(frozen=True)
class TrainOptions(LanguageOptions):
    """Options of `stride model train` for language models; None: chosen to fit the corpus.

    `lr` is Muon's peak rate, or AdamW's where it does all; beside Muon, AdamW's keeps its ratio to it.
    """

    optimizer: str = option("muon+adamw", _OPTIMIZER, choices=OPTIMIZERS, listed=True, panel=MORE)
    layers: int | None = option(None, _LAYERS, low=1, high=1_000)
    width: int | None = option(None, _WIDTH, low=2, high=2**16, example=128)
    heads: int | None = option(None, "Attention heads; default width / 64.", low=1, high=2**16, panel=MORE)
    vocab: int | None = option(
        None, "Tokens of the BPE; default 512 to 8192.", low=260, high=2**20, example=512
    )
    context: int | None = option(
        None, "Longest sequence; default 512.", low=2, high=2**20, example=512, panel=MORE
    )
    late_starts: float | None = option(
        None,
        "Share of passes that begin at a later sentence; default: half, of a small corpus.",
        low=0,
        high=1,
        example=0.5,
        panel=MORE,
    )


@dataclass(frozen=True)
class FinetuneOptions(LanguageOptions):
    """Options of `stride model finetune`; None: chosen to fit model and corpus.

    `lora_rank` 0 trains all weights.
    """

    epochs: float | None = option(
        None, "Passes over the corpus; default 3, or more of a small one.", above=0, high=10**6
    )
    lr: float | None = option(
        None,
        "Peak learning rate; default 3e-5, more with --lora or a small model.",
        above=0,
        high=_LARGEST_RATE,
        example=3e-5,
        panel=MORE,
    )
    schedule: str = option(
        "linear", "How the learning rate falls.", choices=SCHEDULES, listed=True, panel=MORE
    )
    checkpoints: int = option(
        0, "Models kept along the way, evenly spaced.", low=0, high=10_000, metavar="N", panel=MORE
    )
    lora_rank: int = option(
        0, "Train low-rank changes of the blocks only.", flag="--lora", metavar="RANK", low=0, high=2**16
    )


@dataclass(frozen=True)
class ClassifierOptions(Options):
    """Options of a classifier's training; None: what suits the network (see `ClassifierRecipe`).

    `checkpoints` is 9 by default for a network of less than a million weights. `weights` is a .safetensors or
    a torch file; `network` may be the path of an adapter file (see `networks`).
    """

    layers: int | None = option(None, _LAYERS, low=1, high=1_000)
    width: int | None = option(None, _WIDTH, low=1, high=2**16, example=128)
    epochs: int | None = option(None, "Passes over the rows.", low=0, high=10**6, example=20)
    lr: float | None = option(None, _LR, low=0, high=_LARGEST_RATE, example=0.01, panel=MORE)
    schedule: str | None = option(
        None, _SCHEDULE, choices=("cosine", "linear", "constant"), listed=True, panel=MORE
    )
    optimizer: str | None = option(None, _OPTIMIZER, choices=("sgd", "adamw"), listed=True, panel=MORE)
    checkpoints: int | None = option(None, _CHECKPOINTS, low=0, high=10_000, metavar="N", panel=MORE)
    seed: int = option(0, _SEED, low=0, high=_LARGEST_SEED, panel=MORE)
    device: str = option("auto", _DEVICE)
    network: str = option(
        "mlp",
        "mlp, resnet9, logistic, or a file FILE.py that defines network(shape, n_classes).",
        suggest=("mlp", "resnet9", "logistic"),
        panel=_PANEL,
    )
    rows: int | None = option(
        None, "Train on so many rows; default: all that are not held out.", low=1, panel=_PANEL, example=1000
    )
    holdout: int = option(0, "So many other rows are kept as queries.", low=0, panel=_PANEL, example=100)
    shuffle: bool = option(False, "Draw the rows by the seed, instead of the first ones.", panel=_PANEL)
    weights: Path | str | None = option(
        None, "A state dict to start from; with --epochs 0, used as it is.", panel=_PANEL
    )
    batch_size: int | None = option(None, "Rows of a batch; default 64.", low=1, panel=_PANEL, example=64)
    weight_decay: float | None = option(
        None, "Default: what suits the network.", low=0, high=_LARGEST_RATE, panel=_PANEL
    )


@dataclass(frozen=True)
class ColumnOptions(Options):
    """Columns of a table of examples: see `Columns`."""

    label: str | None = option(None, flag="--field label=")
    id: str | None = option(None, flag="--field id=")
    drop: Sequence[str] = option((), flag="--field drop=")


@dataclass(frozen=True)
class EngineOptions(Options):
    """Workers that retrain models: see `retraining.retrain`."""

    engine: str = engine_option()
    workers: int | None = option(
        None, "Trained at the same time; default: one a processor or GPU.", low=1, panel=MORE
    )


@dataclass(frozen=True)
class RetrainOptions(EngineOptions):
    """Recipe or command that retrains models, and workers: see `retraining.open_trainer`."""

    recipe: Path | str | None = option(None, "A stride_recipe.json; default: the model's own.", panel=MORE)
    command: str | None = option(
        None, "Retrain by this program instead; see stride evaluate truth.", panel=MORE
    )
