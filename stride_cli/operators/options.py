"""How operators are fitted: what can be chosen, and every default filled in for one model and index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel

_CLASSIFIER_GATES = 8192
_CLASSIFIER_DAMPING = 1.0


@dataclass(frozen=True)
class TrainOptions:
    """What `train` can be told; None means "the default that fits this index and model".

    Attributes
    ----------
    fit : "closed" or "sgd"
    space : operator space, or a sum of them such as ``residual-matrix+logit``
    layer : residual spaces act after this many blocks (default: two thirds of the depth)
    rank : r of every space
    curvature : "kronecker", "fisher" or "exact", how the Fisher matrix is taken (closed)
    damping : γ relative to the mean eigenvalue (closed)
    buckets : buckets of the vocabulary in the logit spaces
    sketch : bits that are kept of every chunk's own gradient, to choose what a refined query reads (closed)
    steps, lr, variant, fidelity, stability, linearity : the sgd recipe
    recipe : "paper" sets every published hyperparameter, at training and at query time
    seed : default: the index's
    checkpoints : further models whose operators are fitted and which queries are measured with, beside the
        index's own: paths of checkpoints along its training, or of models trained independently
    """

    fit: str | None = None
    space: str | None = None
    layer: int | None = None
    rank: int | None = None
    curvature: str | None = None
    damping: float | None = None
    buckets: int | None = None
    sketch: int = 0
    steps: int | None = None
    lr: float | None = None
    variant: str | None = None
    fidelity: float | None = None
    stability: float | None = None
    linearity: float | None = None
    batch_tokens: int | None = None
    recipe: str | None = None
    seed: int | None = None
    checkpoints: Sequence[str | Path] = ()


def options_fit(options: TrainOptions) -> str:
    """The fit that options ask for, with the recipe taken into account."""
    if options.recipe not in (None, "paper"):
        raise UsageError(f"unknown recipe '{options.recipe}'", fix="the only named recipe is 'paper'")
    fit = options.fit or ("sgd" if options.recipe == "paper" else "closed")
    if fit not in ("closed", "sgd"):
        raise UsageError(f"unknown fit '{fit}'", fix="use --fit closed or --fit sgd")
    return fit


def resolve_settings(options: TrainOptions, model: AttributableModel, index: Index) -> Any:
    """Options with every default filled in: ClosedSettings or SgdSettings.

    Raises
    ------
    UsageError      an option is out of range, or does not fit the model
    """
    from stride_cli.corpus.gate_budget import check_sketch
    from stride_cli.models.kinds import kind_of_index

    fit = options_fit(options)
    classifier = kind_of_index(index) == "classifier"
    default_layer = min(model.n_layers, max(1, round(2 * model.n_layers / 3)))
    layer = options.layer if options.layer is not None else default_layer
    if not 0 <= layer <= model.n_layers:
        raise UsageError(
            f"layer {layer} is not in the model (expected 0 to {model.n_layers})",
            fix=f"two thirds of the depth is {round(2 * model.n_layers / 3)}",
        )
    if options.rank is not None and options.rank < 1:
        raise UsageError(f"rank {options.rank} is below 1", fix="use a positive --rank")
    if options.buckets is not None and options.buckets < 1:
        raise UsageError(f"{options.buckets} buckets are too few", fix="use a positive --buckets")
    check_sketch(options.sketch)
    if options.sketch and fit != "closed":
        raise UsageError("sketches are of the closed form's gates", fix="drop --fit sgd, or --sketch")
    common: dict[str, Any] = {
        "spaces": _spaces(options, model, fit),
        "layer": layer,
        "seed": options.seed if options.seed is not None else index.seed,
    }
    if fit == "closed":
        return _closed(options, model, index.n_subsets, classifier, common)
    return _sgd(options, common)


def like_own(options: TrainOptions, own: AttributableModel, index: Index) -> TrainOptions:
    """Options with the spaces that the index's own model gets: a checkpoint along its fine-tuning does not
    say that it is one, and is steered in the same spaces."""
    return replace(options, space="+".join(resolve_settings(options, own, index).spaces))


def _spaces(options: TrainOptions, model: AttributableModel, fit: str) -> tuple[str, ...]:
    from stride_cli.operators.spaces import parse_space, space_classes

    names = parse_space(options.space or model.default_space(fit))
    classes = space_classes(names)
    # by default, what has a Fisher matrix of its own is there only where the others' is in their bases too
    if not options.space and options.curvature not in (None, "kronecker"):
        classes = [cls for cls in classes if not cls.needs_whitening]
        names = tuple(cls.name for cls in classes)
    for cls in classes:
        cls.check_model(model)
    closed_only = [cls.name for cls in classes if not cls.trainable]
    if closed_only and fit == "sgd":
        raise UsageError(
            f"space {closed_only[0]} is fitted in closed form only",
            fix="drop --fit sgd, or use --space residual",
        )
    return names


def _closed(
    options: TrainOptions, model: AttributableModel, n_subsets: int, classifier: bool, common: dict[str, Any]
) -> Any:
    from stride_cli.models.classifier.training_path import training_path
    from stride_cli.operators.budget import tokens_at_once
    from stride_cli.operators.closed import CURVATURES, ClosedSettings, is_whitened
    from stride_cli.operators.logit_spaces import CLASSIFIER_RANK
    from stride_cli.operators.spaces import affordable_buckets, space_classes

    if options.damping is not None and not options.damping > 0:
        raise UsageError(f"damping {options.damping} is not positive", fix="try --damping 0.1")
    if options.curvature not in (None, *CURVATURES):
        raise UsageError(
            f"unknown curvature '{options.curvature}'", fix=f"use one of {', '.join(CURVATURES)}"
        )
    names = common["spaces"]
    classes = space_classes(names)
    ranks = {cls.name: cls.choose_rank(model, n_subsets, options.rank) for cls in classes}
    curvature, of_weights = options.curvature, all(cls.of_weights for cls in classes)
    # with few classes F is small enough to be taken whole: of changes of the weights, which are in one unit,
    # or of one space that reads what the head does
    few = min(CLASSIFIER_RANK, model.d_model) * model.vocab_size <= _CLASSIFIER_GATES
    of_head = len(classes) == 1 and classes[0].site == "logit" and classes[0].source == "final"
    if curvature is None and classifier and few and (of_head or of_weights):
        curvature = "exact"
    exact = curvature == "exact" and not options.damping
    given: dict[str, Any] = {
        "ranks": ranks,
        "curvature": curvature,
        "n_buckets": options.buckets or affordable_buckets(names, ranks, model, n_subsets),
        "damping": _CLASSIFIER_DAMPING if exact else options.damping,
        "batch_tokens": options.batch_tokens or tokens_at_once(model, classes, common["layer"]),
        "stability": options.stability,
    }
    if classifier and exact and of_weights:
        network: Any = model
        path = training_path(network)
        given |= {} if path is None else {"time": path.time, "trajectory": path.checkpoints}
    chosen = ClosedSettings(**common, **{key: value for key, value in given.items() if value is not None})
    for cls in classes:
        if cls.needs_whitening and not is_whitened(chosen):
            raise UsageError(
                f"space {cls.name} has a Fisher matrix of its own, and the curvature is {chosen.curvature}",
                fix="use --curvature kronecker, and not the space residual",
            )
    if options.sketch and not is_whitened(chosen):
        raise UsageError(
            "sketches need gates that are sums over chunks' gradients, which "
            f"{'+'.join(names)} with curvature {chosen.curvature} does not have",
            fix="leave out --sketch, or --space and --curvature",
        )
    return replace(chosen, sketch=options.sketch)


def _sgd(options: TrainOptions, common: dict[str, Any]) -> Any:
    from stride_cli.operators.losses import STABILITY_VARIANTS
    from stride_cli.operators.sgd import SgdSettings

    if options.variant is not None and options.variant not in STABILITY_VARIANTS:
        raise UsageError(
            f"unknown stability loss '{options.variant}'", fix=f"use one of {', '.join(STABILITY_VARIANTS)}"
        )
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"{options.steps} steps are too few", fix="use a positive --steps")
    given: dict[str, Any] = {
        "ranks": dict.fromkeys(common["spaces"], options.rank or 32),
        "steps": options.steps,
        "lr": options.lr,
        "variant": options.variant,
        "fidelity": options.fidelity,
        "stability": options.stability,
        "linearity": options.linearity,
    }
    chosen = SgdSettings(**common, **{key: value for key, value in given.items() if value is not None})
    if options.lr is not None:
        chosen = replace(chosen, lr_end=options.lr / 10)
    return replace(chosen, warmup=min(chosen.warmup, max(1, chosen.steps // 10)))
