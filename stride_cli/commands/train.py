"""`stride train`: fit the steering operators of an index."""

from __future__ import annotations

from typing import Annotated

import typer

from stride_cli.commands.completion import CURVATURES, FITS, STABILITY_LOSSES, complete_spaces, one_of
from stride_cli.commands.options import Device, Dtype, IndexPath, Json, ModelPath, find_index
from stride_cli.errors import UsageError

EXAMPLE = """\b
Examples:
  stride train --index run.stride
  stride train --index run.stride --fit sgd --steps 2000
  stride train --index run.stride --recipe paper
  stride train --index run.stride --sketch 768
  stride train --index run.stride --checkpoints model/checkpoints/step-*
"""


def train(
    more_checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="CHECKPOINT", hidden=True, show_default=False)
    ] = None,
    index: IndexPath = None,
    model: ModelPath = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            help="closed (one pass over the corpus, the default) or sgd (the paper's).",
            autocompletion=one_of(*FITS),
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            help="residual, residual-matrix, mlp-matrix, linear-matrix, logit, token-logit, pair-logit, or a "
            "sum such as the default, mlp-matrix+logit+token-logit+pair-logit (linear-matrix for a model of "
            "stride model finetune, residual-matrix where there is no plain MLP; sgd: residual). "
            "Classifiers: head-matrix+linear-matrix, their own weights, or logit.",
            autocompletion=complete_spaces,
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", help="Steer after this many blocks; default: 2/3 of the depth.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of the operators.")] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            "--damping",
            help="closed: γ relative to the Fisher matrix's mean eigenvalue. [0.1; classifiers: by their "
            "training's time]",
        ),
    ] = None,
    curvature: Annotated[
        str | None,
        typer.Option(
            "--curvature",
            help="closed: kronecker (the default), fisher (as a whole) or exact (classifiers' default).",
            autocompletion=one_of(*CURVATURES),
        ),
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            "--buckets", help="Buckets of the vocabulary in the logit spaces: more are more precise."
        ),
    ] = None,
    sketch: Annotated[
        int,
        typer.Option(
            "--sketch",
            metavar="BITS",
            help="closed: keep so many bits of every chunk's own gradient, by a second pass over the corpus; "
            "stride query --refine then finds what is worth reading by them too. For large corpora, where "
            "chunks are 30 times as many as subsets and more; try 768.",
        ),
    ] = 0,
    steps: Annotated[int | None, typer.Option("--steps", help="sgd: training iterations. [10000]")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="sgd: peak learning rate. [3e-4]")] = None,
    stability_loss: Annotated[
        str | None,
        typer.Option(
            "--stability-loss",
            help="sgd: kl (truncated, the default), logit or norm.",
            autocompletion=one_of(*STABILITY_LOSSES),
        ),
    ] = None,
    fidelity: Annotated[float | None, typer.Option("--fidelity", help="sgd: λ_fid. [1]")] = None,
    stability: Annotated[float | None, typer.Option("--stability", help="λ_stab. [1]")] = None,
    linearity: Annotated[float | None, typer.Option("--linearity", help="sgd: λ_LDS. [0.1]")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="paper: every published hyperparameter, when querying too.",
            autocompletion=one_of("paper"),
        ),
    ] = None,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoints",
            metavar="PATH...",
            help="Further models that every query is measured with, one or several: checkpoints of the same "
            "training, or models trained independently, with the same tokenizer. The index's own model "
            "always takes part.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Default: the index's seed.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace operators that are there.")] = False,
    save_seconds: Annotated[
        float, typer.Option("--save-seconds", help="How often an unfinished fit is saved.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Fit one light steering operator per subset of the index, on the frozen model's activations.

    An interrupted fit continues where it was when the same command is run again.
    """
    from stride_cli import api
    from stride_cli.config import resolve
    from stride_cli.output import emit, note, wants_json

    if more_checkpoints and not checkpoints:
        raise UsageError(
            f"unexpected argument '{more_checkpoints[0]}'",
            fix="an index is given with --index, checkpoints with --checkpoints",
        )
    path = find_index(index)
    general = resolve("general", {"model": model})
    chosen = resolve(
        "train",
        {
            "fit": fit,
            "space": space,
            "layer": layer,
            "rank": rank,
            "damping": damping,
            "seed": seed,
            "checkpoints": [*(checkpoints or ()), *(more_checkpoints or ())] or None,
            "device": device,
            "dtype": dtype,
        },
    )
    options = api.TrainOptions(
        fit=chosen.fit,
        space=chosen.space,
        layer=chosen.layer,
        rank=chosen.rank,
        damping=chosen.damping,
        curvature=curvature,
        buckets=buckets,
        sketch=sketch,
        steps=steps,
        lr=lr,
        variant=stability_loss,
        fidelity=fidelity,
        stability=stability,
        linearity=linearity,
        recipe=recipe,
        seed=chosen.seed,
        checkpoints=chosen.checkpoints or (),
    )
    result = api.train(
        path,
        options,
        model_path=general.model,
        device=chosen.device,
        dtype=chosen.dtype,
        overwrite=overwrite,
        save_seconds=save_seconds,
    )
    if wants_json(json):
        emit(result)
        return
    bits = f", {result['sketch']:,} bits a chunk" if result["sketch"] else ""
    note(
        f"fitted {result['subsets']:,} operators "
        f"({result['fit']}, {result['space']}, layer {result['layer']}, "
        f"{result['gate_size']:,} gates each{bits}) in {result['seconds']['fit']:.1f} s; "
        f"coverage {result['coverage']:.0%}"
    )
    for entry in result["checkpoints"]:
        note(f"and of checkpoint {entry['path']} (layer {entry['layer']}) in {entry['seconds']:.1f} s")
    note(f'next: stride query "…" --index {path}')
