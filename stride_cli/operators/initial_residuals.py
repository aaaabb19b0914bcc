"""Initial-model residuals: how far a model was from each token before it was trained on it, a byte a token.

A memorised text has almost no gradient left, although it taught the model most. A chunk's part in the weights
is the sum of its gradients over training, and in each of them a token counts by its residual ρ = 1 − p: by ρ₀
at the beginning, by ρ at the end. Here it counts by the mean of both instead of ρ. ρ₀ is 1 where training
began from nothing; of a fine-tuned model its base says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stride_cli.data.batches import packed
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.configuration import base_name, is_adapter
from stride_cli.models.language.files import find_offline
from stride_cli.models.language.fingerprints import cuts_alike
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.loading import Opener, model_fingerprint
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.head import check_finite, head_blocks
from stride_cli.operators.saving import SavedState
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import note, progress

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.models.protocol import AttributableModel

_BLOCK = 1 << 22  # tokens
_LEAST = 1e-9  # of a residual: what is smaller is lost to rounding


def average_residuals(residual: torch.Tensor, before: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Divide a token's mean residual over training by that at its end.

    The mean is that of beginning and end. Residuals that fell exponentially would have the logarithmic mean,
    which gives memorised text too little.

    Parameters
    ----------
    residual : (b, s) float64           ρ, 0 … 1
    before : (b, s), or a number        ρ₀, 0 … 1

    Returns
    -------
    Tensor (b, s) float32               (ρ₀ + ρ) / (2 ρ)
    """
    return (0.5 + 0.5 * torch.as_tensor(before) / residual.clamp_min(_LEAST)).float()


def load_initial_residuals(
    model: AttributableModel,
    chunks: ChunkReader,
    settings: Any,
    *,
    base: str | None = None,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
) -> None:
    """Give chunks ρ₀ of their tokens, where a fit asks for it and there is a model before training.

    Parameters
    ----------
    model : that was trained
    chunks : ChunkReader                its `before` is set
    settings : ClosedSettings or SgdSettings
    base : path of the model before training; default: what a fine-tuning's recipe says, where it is there
    scratch : directory, optional       where an interrupted pass continues from
    save_seconds : float                how often the pass is saved there

    Raises
    ------
    ModelError          `base` cannot be loaded
    UsageError          it has another vocabulary
    NumericalError      a loss is not finite
    """
    chunks.before = None
    if getattr(settings, "residuals", "final") != "average":
        if base is not None:
            said = f"--base is '{base}', and tokens count as at the training's end"
            raise UsageError(said, fix="leave out --base, or --residuals final and --checkpoints")
        return
    found = base or recorded_base(model)
    if found is None:
        return
    before = Opener.like(model).load(found)
    if not _reads_alike(before, model, chunks):
        raise UsageError(
            f"the model before training, '{found}', has tokenizer {before.tokenizer_fingerprint} (expected "
            f"{model.tokenizer_fingerprint}, that of '{model.path}')",
            fix="give the model that the training began from (--base), or --residuals final",
        )
    chunks.before = measure_initial_residuals(
        before, chunks, batch_tokens=settings.batch_tokens, scratch=scratch, save_seconds=save_seconds
    )


def _reads_alike(before: AttributableModel, model: AttributableModel, chunks: ChunkReader) -> bool:
    """Tell whether chunks' tokens are the same texts to both: their tokenizers may pad otherwise, or have a
    token that training added."""
    if before.tokenizer_fingerprint == model.tokenizer_fingerprint:
        return True
    theirs, own = before.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if not (cuts_alike(before.tokenizer, model.tokenizer) and theirs.items() <= own.items()):
        return False
    tokens = chunks.tokens
    last = max((int(tokens[at : at + _BLOCK].max()) for at in range(0, len(tokens), _BLOCK)), default=0)
    return last <= max(theirs.values(), default=0)


def recorded_base(model: AttributableModel, tell: Callable[[str], None] = note) -> str | None:
    """Find the model that a fine-tuning began from, by its recipe, or that an adapter is on; None of others,
    and where it is gone (with a note)."""
    if model.path is not None and is_adapter(model.path):
        return base_name(model.spec)[0]
    recipe = None if model.classes or model.path is None else read_recipe(model.path)
    if recipe is None or recipe.base is None:
        return None
    try:
        if find_offline(recipe.base) is None:
            reason = "is not on this machine"
        elif model_fingerprint(recipe.base) == recipe.base_fingerprint:
            return recipe.base
        else:
            reason = "has changed since"
    except ModelError as error:
        reason = f"cannot be read: {error.message}"
    tell(
        f"the model before its fine-tuning, '{recipe.base}', {reason}: tokens count as if it had known "
        "nothing (--base says where it is)"
    )
    return None


def measure_initial_residuals(
    base: AttributableModel,
    chunks: ChunkReader,
    *,
    batch_tokens: int,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
) -> np.ndarray:
    """Measure ρ₀ of every token by one forward pass of the model before training; (N,) uint8, see `packed`.

    Parameters
    ----------
    base : AttributableModel            with the corpus's own tokenizer
    chunks : ChunkReader
    batch_tokens : int                  padded tokens at once
    scratch : directory, optional       where an interrupted pass continues from
    save_seconds : float                how often the pass is saved there

    Raises
    ------
    NumericalError      a loss is not finite
    StorageError        the pass cannot be saved
    """
    plan = chunks.plan(batch_tokens)
    found, first = np.zeros(int(chunks.offsets[-1]), np.uint8), 0
    saved, shrinking = (
        SavedState(None if scratch is None else scratch / "before.pt", save_seconds),
        ShrinkingBatches(),
    )
    if (state := saved.load()) is not None:
        first, found = state["next"], state["before"].numpy()
    with progress("reading the model before training", chunks.n_chunks, unit="chunks") as bar:
        bar.advance(sum(len(group) for group in plan[:first]))
        for number in range(first, len(plan)):
            batches = [chunks.batch(plan[number])]
            for batch, residuals in shrinking.each(batches, lambda part: _residuals(base, part)):
                for row, residual in zip(batch.rows.tolist(), residuals, strict=True):
                    start, stop = int(chunks.offsets[row]), int(chunks.offsets[row + 1])
                    found[start:stop] = packed(residual[: stop - start])
            bar.advance(len(plan[number]))
            if saved.due or number + 1 == len(plan):
                saved.save({"next": number + 1, "before": torch.from_numpy(found)})
    return found


@torch.no_grad()
def _residuals(base: AttributableModel, batch: Batch) -> np.ndarray:
    """Residuals of a batch's tokens, (B, T) float64; 1 where a token is not scored."""
    ids = batch.ids.to(base.device)
    with SteeredModel(base, [], base.n_layers, fitting=True).products():
        final = base.continue_from(base.hidden(ids, base.n_layers), base.n_layers)
    residuals = torch.ones(ids.shape, dtype=torch.float64)
    losses = []
    for block in head_blocks(base, final, ids, batch.weights.to(base.device), tracked=False):
        with block.labelled(ids[block.rows, block.after]) as found:
            losses.append(found.surprise.sum(dim=1))
            known = torch.where(block.weight > 0, found.doubt, 1.0)
            residuals[block.rows, block.after] = known.cpu()
    check_finite(torch.cat(losses), batch)
    return residuals.numpy()
