"""Train a language model by a recipe: interruptible anywhere, repeatable on any subset of its chunks."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from index_format.durable import replace_file
from stride_cli.errors import CorpusError, ModelError, NumericalError
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.models.language.objective import next_token_loss
from stride_cli.models.muon import Muon, multiplies_bf16
from stride_cli.output import Ticker
from stride_cli.training.epoch_batches import as_read, make_batch, plan_epoch

_LOG_LINES = 2000
_EVALUATED_TOKENS = 50_000


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run of the loop.

    Attributes
    ----------
    loss : float       mean nats per scored token over the last whole pass, while it was training
    steps : int
    tokens : int       scored tokens trained on, repeats counted
    seconds : float    of this process (a resumed run does not count what came before)
    log : list         at most 2,000 of {"step", "epoch", "loss", "lr", "tokens"}; loss: mean since the last
    """

    loss: float
    steps: int
    tokens: int
    seconds: float
    log: list[dict[str, Any]]


@dataclass
class _State:
    """The progress of a run; with weights and optimizer states, all that its future depends on."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # within the epoch
    tokens: int = 0
    loss_sum: float = 0.0  # since the last point of the log
    loss_count: int = 0
    pass_sum: float = 0.0  # over this pass, and over the last whole one
    pass_count: int = 0
    last_pass: float = math.nan
    log: list[dict[str, Any]] = field(default_factory=list)

    def count(self, loss: float, tokens: int, lr: float, *, logs: bool) -> None:
        """Count one more step, and add a point to the log where one is due."""
        self.tokens += tokens
        self.loss_sum += loss
        self.loss_count += 1
        self.pass_sum += loss
        self.pass_count += 1
        if logs:
            mean = self.loss_sum / self.loss_count
            point = {"step": self.step, "epoch": self.epoch, "loss": mean, "lr": lr, "tokens": self.tokens}
            self.log.append(point)
            self.loss_sum, self.loss_count = 0.0, 0

    @property
    def pass_mean(self) -> float:
        """Average the loss over the last whole pass; over the first, as far as it goes."""
        return self.last_pass if math.isfinite(self.last_pass) else self.pass_sum / max(1, self.pass_count)


def train(
    model: Any,
    chunks: Sequence[Any],
    recipe: Recipe,
    *,
    subset: np.ndarray | None = None,
    kept: tuple[Path, float] | None = None,
    optimizers: list[torch.optim.Optimizer] | None = None,
    after_step: Callable[[int], None] | None = None,
    ticker: Ticker | None = None,
) -> TrainingResult:
    """Train a model's parameters that require gradients, in place, by a recipe.

    Minimises the mean loss of the scored tokens of each batch. There is no dropout: the same model, chunks,
    recipe, subset, machine and number of threads give the same weights, bit for bit on a CPU, also across
    interruptions.

    Parameters
    ----------
    model : PreTrainedModel             as from `initial_model(recipe)`, on the device to train on
    chunks : sequence of Chunk          of the whole corpus; chunk i is chunk i of an index with the same
                                        tokenizer and block size
    recipe : Recipe
    subset : (n,) bool or (m,) int64, optional      train on these chunks only, with as many passes over them
                                        as the recipe makes over all (so m/n of its steps)
    kept : (Path, float), optional      a file for the state of the run, read, if there, to go on from; and
                                        the seconds between two writes, more where writing takes long
    optimizers : list, optional         as from `make_optimizers`, for a caller that looks at their states
    after_step : callable, optional     called with the number of each step once it is done
    ticker : Ticker, optional           told of each step

    Raises
    ------
    CorpusError         the subset has no scored token
    NumericalError      the loss is not finite
    """
    began = time.monotonic()
    # 1. Plan the passes; take up the run where its state says
    total, passes = _passes(chunks, recipe, subset)
    model.eval()  # no dropout; gradients flow as in training mode
    device = next(model.parameters()).device
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = optimizers or make_optimizers(model, recipe)
    state = _State()
    state_path, save_seconds = kept or (None, 0.0)
    if state_path is not None and state_path.exists():
        state = _restore(state_path, parameters, optimizers, device)
        if ticker is not None:
            ticker.advance(state.step)
    every = max(1, math.ceil(total / _LOG_LINES))
    peak = recipe.lr if recipe.optimizer == "muon+adamw" else recipe.adam_lr
    saved, spent = time.monotonic(), 0.0
    for batch in _remaining(passes, state, total):
        # 2. Loss and gradients of a batch
        rate = _rate(recipe, state.step, total)
        tensors = make_batch(as_read(chunks, batch, recipe, state.epoch), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bf16"):
            loss = next_token_loss(model, tensors)
        loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NumericalError(
                f"the training loss is {value} at step {state.step + 1} of {total}",
                fix="train again with a lower --lr, and --overwrite",
            )
        # 3. A step of the optimizers
        _apply(optimizers, rate, recipe)
        state.step += 1
        logs = state.step % every == 0 or state.step == total
        state.count(value, len(tensors.targets), rate * peak, logs=logs)
        if ticker is not None:
            ticker.advance()
            ticker.describe(f"training, loss {value:.3f}")
        if after_step is not None:
            after_step(state.step)
        # 4. Save what is needed to go on; writing may take a twentieth of the time at most
        due = time.monotonic() - saved > max(save_seconds, 20 * spent)
        if state_path is not None and due and state.step < total:
            start = time.monotonic()
            _save(state_path, state, parameters, optimizers)
            saved = time.monotonic()
            spent = saved - start
    return TrainingResult(state.pass_mean, state.step, state.tokens, time.monotonic() - began, state.log)


def planned_steps(
    chunks: Sequence[Any], recipe: Recipe, *, subset: np.ndarray | None = None
) -> tuple[int, Iterator[tuple[np.ndarray, int, float]]]:
    """Plan what `train` does: how many steps, and for each its batch (chunk numbers), its pass and the share
    of the peak learning rate; CorpusError as `train`."""
    total, passes = _passes(chunks, recipe, subset)

    def steps() -> Iterator[tuple[np.ndarray, int, float]]:
        state = _State()
        for batch in _remaining(passes, state, total):
            yield batch, state.epoch, _rate(recipe, state.step, total)
            state.step += 1
            state.pass_count += 1

    return total, steps()


@torch.no_grad()
def mean_loss(model: Any, chunks: Sequence[Any], recipe: Recipe, *, limit: int = _EVALUATED_TOKENS) -> float:
    """Average the loss over the corpus, or over an even sample of about `limit` tokens: nats per scored
    token."""
    members = np.flatnonzero(np.array([chunk.n_scored for chunk in chunks]))
    lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
    step = max(1, int(lengths[members].sum()) // limit)
    device = next(model.parameters()).device
    total, count = 0.0, 0
    plan = plan_epoch(lengths, members[::step], batch_tokens=recipe.batch_tokens, seed=0, epoch=0)
    for batch in plan:
        tensors = make_batch([chunks[i] for i in batch], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bf16"):
            total += float(next_token_loss(model, tensors)) * len(tensors.targets)
        count += len(tensors.targets)
    return total / count


def choose_dtype(dtype: str, device: torch.device) -> str:
    """Resolve "auto": bf16 where the device multiplies it faster, else fp32."""
    if dtype != "auto":
        return dtype
    return "bf16" if multiplies_bf16(device) else "fp32"


def _passes(
    chunks: Sequence[Any], recipe: Recipe, subset: np.ndarray | None
) -> tuple[int, Callable[[int], list[np.ndarray]]]:
    """Count the optimizer steps, and plan the batches of each pass over the subset."""
    lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
    scored = np.array([chunk.n_scored for chunk in chunks], np.int64)
    among, members = np.flatnonzero(scored), _members(subset, scored)

    def batches(epoch: int) -> list[np.ndarray]:
        return plan_epoch(
            lengths, members, batch_tokens=recipe.batch_tokens, seed=recipe.seed, epoch=epoch, among=among
        )

    if len(members) == len(among):
        return recipe.steps, batches
    return max(1, round(recipe.epochs * len(batches(0)))), batches


def _members(subset: np.ndarray | None, scored: np.ndarray) -> np.ndarray:
    wanted = np.zeros(len(scored), bool)
    wanted[slice(None) if subset is None else subset] = True  # a mask, or numbers
    members = np.flatnonzero(wanted & (scored > 0))
    if len(members) == 0:
        raise CorpusError(
            "there is no token to train on: no chunk has a scored token",
            fix="give documents of two tokens or more, or prompts with a response",
        )
    return members


def _remaining(passes: Callable[[int], list[np.ndarray]], state: _State, total: int) -> Iterator[np.ndarray]:
    """Yield the batches from where the state is, moving it along the passes."""
    while state.step < total:
        plan = passes(state.epoch)
        while state.batch < len(plan) and state.step < total:
            batch = plan[state.batch]
            state.batch += 1
            yield batch
        if state.batch == len(plan):
            state.epoch, state.batch = state.epoch + 1, 0
            state.last_pass, state.pass_sum, state.pass_count = state.pass_sum / state.pass_count, 0.0, 0


def _rate(recipe: Recipe, step: int, total: int) -> float:
    """Compute the share of the peak learning rate at a step (from 0)."""
    warm = recipe.warmup * total
    if step < warm:
        return (step + 1) / (warm + 1)
    if recipe.schedule == "constant":
        return 1.0
    done = (step - warm) / max(1.0, total - warm)
    shape = 1 - done if recipe.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return recipe.final_lr + (1 - recipe.final_lr) * shape


def make_optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the blocks and AdamW for embeddings, head and vectors; or AdamW for all.

    Only for parameters that require gradients.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    embeddings.update(id(p) for p in (head.parameters() if head is not None else ()))
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
    chosen = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in chosen]
    betas = (0.9, 0.95)
    if recipe.optimizer == "muon+adamw":
        made: list[torch.optim.Optimizer] = []
        if matrices:
            made.append(Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay))
        if rest:
            made.append(torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=betas, weight_decay=0.0))
    elif recipe.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        kept = [group for group in groups if group["params"]]
        # on a GPU one kernel for all: steps of small batches wait for those of a dozen
        fused = all(p.device.type == "cuda" for p in parameters) or None
        made = [torch.optim.AdamW(kept, lr=recipe.adam_lr, betas=betas, fused=fused)]
    else:
        raise ModelError(f"optimizer '{recipe.optimizer}' is unknown", fix="one of muon+adamw, adamw")
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def _apply(optimizers: list[torch.optim.Optimizer], rate: float, recipe: Recipe) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        if recipe.clip and isinstance(optimizer, torch.optim.AdamW):  # Muon's steps have a norm of their own
            own = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(own, recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _save(
    path: Path, state: _State, parameters: dict[str, Any], optimizers: list[torch.optim.Optimizer]
) -> None:
    """Replace the state file in one step, so that a kill leaves the old or the new one."""
    buffer = io.BytesIO()
    record = {
        "state": vars(state),
        "weights": {name: p.detach().cpu() for name, p in parameters.items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(record, buffer)
    replace_file(path, buffer.getvalue())


def _restore(
    path: Path, parameters: dict[str, Any], optimizers: list[torch.optim.Optimizer], device: torch.device
) -> _State:
    try:
        record = torch.load(path, map_location=device, weights_only=True)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(record["weights"][name])
        for optimizer, saved in zip(optimizers, record["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return _State(**record["state"])
    except Exception as error:  # unpickling raises many classes
        raise ModelError(
            f"the state of unfinished training cannot be read: {path}", fix="start afresh with --overwrite"
        ) from error
