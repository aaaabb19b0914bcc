"""Options of a fit, declared once, and every default filled in for one model and index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stride_cli.corpus.gate_budget import MOST_PROJECTED, check_projection, default_projection
from stride_cli.errors import UsageError
from stride_cli.options import MORE, PAPER, Options, engine_option, entries, option, refuse_foreign

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.closed import ClosedSettings

_CLASSIFIER_GATES = 8192
_CLASSIFIER_DAMPING = 1.0
_NORMALIZE = 0.25  # of 0, .15, .25, .35 and .5, by every second query of the suite of instructions


@dataclass(frozen=True)
class FitRunOptions(Options):
    """Who fits, and how an interrupted fit goes on; the operators are the same."""

    save_seconds: float = option(60.0, "How often an unfinished fit is saved.", low=0, panel=MORE)
    workers: int | None = option(
        None,
        "closed: fit ranges of the chunks in N processes; default: in this one.",
        metavar="N",
        low=1,
        panel=MORE,
    )
    engine: str = engine_option()

    @property
    def in_ranges(self) -> bool:
        """True where other processes are to fit, range by range."""
        return self.engine != "local" or (self.workers or 1) > 1


@dataclass(frozen=True)
class FitChoice(Options):
    """The choice of one of the two fits, which decides what other options there are."""

    fit: str | None = option(
        None,
        "closed (one pass over the corpus, the default) or sgd (the paper's).",
        choices=("closed", "sgd"),
        setting=True,
        panel=PAPER,
    )


@dataclass(frozen=True)
class FitOptions(Options):
    """Options of both fits; None means "the default that fits this index and model"."""

    space: str | None = option(
        None,
        "Steer in this space, or a sum as mlp-matrix+logit+token-logit+pair-logit, the default (fine-tuned: "
        "output-matrix, if small linear-matrix; sgd: residual; classifiers: head-matrix+linear-matrix).",
        setting=True,
        panel=MORE,
    )
    layer: int | None = option(
        None,
        "Steer after this many blocks; default: 2/3 of the depth.",
        low=0,
        setting=True,
        example=1,
        panel=MORE,
    )
    rank: int | None = option(None, "Rank of the operators.", low=1, high=2**20, setting=True, panel=MORE)
    buckets: int | None = option(
        None,
        "Buckets of the vocabulary in the logit spaces: more are more precise, and count for more beside "
        "the layers.",
        low=1,
        high=2**24,
        panel=MORE,
    )
    stability: float | None = option(None, "λ_stab. [1]", low=0, panel=MORE)
    checkpoints: Sequence[str | Path] = option(
        (),
        "Average over these models, too: checkpoints of the same training, or models trained independently "
        "with the same tokenizer.",
        metavar="PATH...",
        setting=True,
    )
    seed: int | None = option(
        None, "Default: the index's seed.", low=0, high=2**64 - 1, setting=True, panel=MORE
    )


@dataclass(frozen=True)
class ClosedOptions(FitOptions):
    """Options of the closed form."""

    damping: float | None = option(
        None,
        "closed: γ relative to the Fisher matrix's mean eigenvalue. [0.1; classifiers: by their "
        "training's time]",
        above=0,
        setting=True,
        example=0.1,
        panel=MORE,
    )
    curvature: str | None = option(
        None,
        "closed: kronecker (the default), or exact (classifiers' default).",
        choices=("kronecker", "exact"),
        panel=MORE,
    )
    residuals: str | None = option(
        None,
        "closed: weight a token by its residual, averaged over training (average, the default for language "
        "models; --checkpoints: final) or at its end (final).",
        choices=("average", "final"),
        setting=True,
        example="final",
        panel=MORE,
    )
    normalize: float | None = option(
        None,
        "closed: divide each chunk's gradient by its length to this power, 0 (as it is) … 1 (all of one "
        "length). [0.25; classifiers and --checkpoints: 0]",
        low=0,
        high=1,
        setting=True,
        example=0.25,
        panel=MORE,
    )
    base: str | None = option(
        None,
        "closed: the model before its fine-tuning, for initial-model residuals. Default: the recorded one; "
        "else a model that knows nothing.",
        metavar="MODEL",
        example="base",
        panel=MORE,
    )
    project: int | None = option(
        None,
        "closed: keep so many bytes of a projection of every chunk's gradient, for candidate selection; 0: "
        "none. Operators that are there stay. [32,768; of few chunks up to 262,144, of many at least 512]",
        low=0,
        high=MOST_PROJECTED,
        metavar="BYTES",
        example=512,
        panel=MORE,
    )
    batch_tokens: int | None = option(None, low=1)
    recipe: ClassVar[None] = None  # that of the paper is of the other fit

    def __post_init__(self) -> None:
        super().__post_init__()
        check_projection(self.project)


@dataclass(frozen=True)
class SgdOptions(FitOptions):
    """Options of the published recipe."""

    steps: int | None = option(
        None, "sgd: training iterations. [10000]", low=1, high=10**9, example=2000, panel=PAPER
    )
    lr: float | None = option(
        None, "sgd: peak learning rate. [3e-4]", above=0, high=1e6, example=3e-4, panel=PAPER
    )
    variant: str | None = option(
        None,
        "sgd: kl (truncated, the default), logit or norm.",
        flag="--stability-loss",
        choices=("kl", "logit", "norm"),
        panel=PAPER,
    )
    fidelity: float | None = option(None, "sgd: λ_fid. [1]", low=0, panel=PAPER)
    linearity: float | None = option(None, "sgd: λ_LDS. [0.1]", low=0, panel=PAPER)
    recipe: str | None = option(
        None, "paper: every published hyperparameter, when querying too.", choices=("paper",), panel=PAPER
    )


TrainOptions = ClosedOptions | SgdOptions
FITS: dict[str, type[TrainOptions]] = {"closed": ClosedOptions, "sgd": SgdOptions}
FLAT = (FitChoice, ClosedOptions, SgdOptions)  # whatever `stride train` and the spec of a method can say


def fit_of(fit: str | None, recipe: str | None) -> str:
    """Choose the fit: the closed form, unless the other is named or the recipe is given."""
    FitChoice(fit)
    return fit or ("closed" if recipe is None else "sgd")


def train_options(
    fit: str | None = None,
    *,
    called: Callable[[str, str], str] = lambda name, flag: flag,
    choice: str = "--fit {}",
    **given: Any,
) -> TrainOptions:
    """Make the options of one of the fits from options by name.

    Parameters
    ----------
    called : (name, flag) → what an option is called where it comes from
    choice : how a fit is chosen there

    Raises
    ------
    UsageError      an option of the other fit, which would be dropped unseen; a value that cannot be
    """
    fit = fit_of(fit, given.get("recipe"))
    other = "closed" if fit == "sgd" else "sgd"
    refuse_foreign(
        given,
        [FITS[fit]],
        [FITS[other]],
        because=f"of {choice.format(other)}, and this fit is {fit}",
        otherwise=f"use {choice.format(other)}",
        called=called,
    )
    unset = entries(FITS[other]).keys() - entries(FITS[fit]).keys()
    return FITS[fit](**{name: value for name, value in given.items() if name not in unset})


def resolve_settings(options: TrainOptions, model: AttributableModel, index: Index) -> Any:
    """Fill in every default for one model and index: ClosedSettings or SgdSettings.

    Raises
    ------
    UsageError      an option does not fit the model
    """
    from stride_cli.operators.fitting import published_recipe
    from stride_cli.operators.spaces import parse_space, space_classes

    fit = "closed" if isinstance(options, ClosedOptions) else "sgd"
    two_thirds = round(2 * model.n_layers / 3)
    layer = min(model.n_layers, max(1, two_thirds)) if options.layer is None else options.layer
    if not 0 <= layer <= model.n_layers:
        found = f"layer {layer} is not in the model (expected 0 to {model.n_layers})"
        raise UsageError(found, fix=f"two thirds of the depth is {two_thirds}")
    if fit == "sgd" and getattr(model, "reads_tokens", False):
        raise UsageError(
            f"the blocks of {model.name} read tokens too: --fit sgd has none", fix="drop --fit sgd"
        )
    names = parse_space(options.space or model.default_space(fit))
    for cls in space_classes(names):
        cls.check_model(model)
        if fit == "sgd" and cls.name not in published_recipe().TRAINABLE:
            found = f"space {cls.name} is fitted in closed form only"
            raise UsageError(found, fix="drop --fit sgd, or use --space residual")
    seed = index.seed if options.seed is None else options.seed
    common: dict[str, Any] = {"spaces": names, "layer": layer, "seed": seed}
    if isinstance(options, ClosedOptions):
        return _closed(options, model, index, common)
    return _sgd(options, common)


def like_own(options: TrainOptions, own: AttributableModel, index: Index) -> TrainOptions:
    """Name the spaces that the index's own model gets: a checkpoint along its fine-tuning does not say that
    it is one, and is steered in the same spaces."""
    return replace(options, space="+".join(resolve_settings(options, own, index).spaces))


def _closed(
    options: ClosedOptions, model: AttributableModel, index: Index, common: dict[str, Any]
) -> ClosedSettings:
    from stride_cli.models.classifier.classifier_recipe import training_path
    from stride_cli.operators.closed import ClosedSettings, is_whitened
    from stride_cli.operators.device_memory import tokens_at_once
    from stride_cli.operators.logit_spaces import CLASSIFIER_RANK
    from stride_cli.operators.spaces import affordable_buckets, known_gates, space_classes

    names, n_subsets = common["spaces"], index.n_subsets
    classes, classifier = space_classes(names), bool(model.classes)
    ranks = {cls.name: cls.choose_rank(model, n_subsets, options.rank) for cls in classes}
    # 1. With few classes F is small enough to be taken whole: of changes of the weights, which are in one
    # unit, or of one space that reads what the head does
    curvature, of_weights = options.curvature, all(cls.of_weights for cls in classes)
    few = min(CLASSIFIER_RANK, model.d_model) * model.vocab_size <= _CLASSIFIER_GATES
    of_head = len(classes) == 1 and classes[0].site == "logit" and classes[0].source == "final"
    if curvature is None and classifier and few and (of_head or of_weights):
        curvature = "exact"
    exact = curvature == "exact" and not options.damping
    # 2. What is given, and defaults that depend on the model
    given: dict[str, Any] = {
        "ranks": ranks,
        "curvature": curvature,
        "n_buckets": options.buckets or affordable_buckets(names, ranks, model, n_subsets),
        "damping": _CLASSIFIER_DAMPING if exact else options.damping,
        "batch_tokens": options.batch_tokens or tokens_at_once(model, classes, common["layer"]),
        "stability": options.stability,
        "residuals": options.residuals,
        "normalize": options.normalize,
    }
    if classifier and exact and of_weights:
        network: Any = model
        path = training_path(network)
        given |= {} if path is None else {"time": path.time, "trajectory": path.checkpoints}
    chosen = ClosedSettings(**common, **_given(given))
    if not is_whitened(chosen):
        if options.project:
            raise UsageError(
                "projections need gates that are sums over chunks' gradients, which "
                f"{'+'.join(names)} with curvature {chosen.curvature} does not have",
                fix="leave out --project, or --space and --curvature",
            )
        return chosen
    # 3. What only whitened gates can have: projections, and chunks that count as over the whole training
    gates = known_gates(names, ranks, model, given["n_buckets"])
    size = 0 if classifier else default_projection(index.n_chunks, gates, finetuned=not model.pretrained)
    chosen = replace(chosen, project=size if options.project is None else options.project)
    if classifier or options.checkpoints:  # checkpoints are a sum over training themselves
        return chosen
    normalize = _NORMALIZE if options.normalize is None else options.normalize
    return replace(chosen, residuals=options.residuals or "average", normalize=normalize)


def _sgd(options: SgdOptions, common: dict[str, Any]) -> Any:
    from stride_cli.operators.fitting import published_recipe

    names = ("n_buckets", "steps", "lr", "variant", "fidelity", "stability", "linearity")
    given = {name: getattr(options, "buckets" if name == "n_buckets" else name) for name in names}
    ranks = dict.fromkeys(common["spaces"], options.rank or 32)
    chosen = published_recipe().SgdSettings(**common, ranks=ranks, **_given(given))
    if options.lr is not None:
        chosen = replace(chosen, lr_end=options.lr / 10)
    return replace(chosen, warmup=min(chosen.warmup, max(1, chosen.steps // 10)))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
