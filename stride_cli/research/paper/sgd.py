"""The published recipe: operators trained by gradient descent (paper, alg:stride, tab:stride_hparams)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from index_format.design import offsets_of, row_sizes
from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.errors import NumericalError
from stride_cli.models.muon import Muon
from stride_cli.operators.logit_spaces import LogitSpace, vocabulary_buckets
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.saving import SavedState
from stride_cli.operators.spaces import SPACES, space_classes
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import progress
from stride_cli.randomness import stream, torch_seed
from stride_cli.research.paper.base_states import BaseStates, Entered
from stride_cli.research.paper.losses import fidelity_loss, linearity_residual, stability_loss

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel

_LOGIT_BYTES = 256 << 20
TRAINABLE = ("residual", "residual-matrix", "logit", "token-logit")
CURVES = ("loss", "fidelity", "stability", "linearity", "gain")


@dataclass(frozen=True)
class SgdSettings:
    """Defaults are tab:stride_hparams.

    Attributes
    ----------
    spaces : names of the operator spaces
    layer : residual spaces act after this many blocks
    ranks : r of each space by name
    n_buckets : c of the logit space
    steps, warmup : training iterations; linear warm-up, then linear decay from lr to lr_end
    subsets_per_step : subsets in one iteration
    fidelity_batch, stability_batch : sequences per subset
    fidelity, stability, linearity : λ_fid, λ_stab, λ_LDS
    variant : "kl", "logit" or "norm" (see `stability_loss`)
    top : m of the truncated KL
    sketch : q, columns of R in L_LDS
    seed : names every random stream
    """

    spaces: tuple[str, ...]
    layer: int
    ranks: dict[str, int]
    n_buckets: int = 4096
    steps: int = 10_000
    warmup: int = 100
    lr: float = 3e-4
    lr_end: float = 3e-5
    subsets_per_step: int = 8
    fidelity_batch: int = 2
    stability_batch: int = 2
    fidelity: float = 1.0
    stability: float = 1.0
    linearity: float = 0.1
    variant: str = "kl"
    top: int = 20
    sketch: int = 4
    seed: int = 0


def fit_sgd(
    model: AttributableModel,
    chunks: ChunkReader,
    row_offsets: np.ndarray,
    row_members: Any,
    settings: SgdSettings,
    *,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
) -> Operators:
    """Train bases and gates jointly; Muon for the bases' matrices, AdamW for the gates.

    Each iteration draws a few subsets, for each some of its own chunks (fidelity) and some chunks outside it
    (stability), and one further chunk on which all drawn subsets are measured (linearity).

    Parameters
    ----------
    model : AttributableModel
    chunks : ChunkReader               the n chunks of the corpus
    row_offsets : (K + 1,) int64, row_members : (n d,)      chunks of each subset
    settings : SgdSettings
    scratch : directory, optional      where an interrupted run continues from
    save_seconds : float               how often the run is saved there

    Returns
    -------
    Operators        gates (K, p) float32; `seen` marks the chunks drawn for fidelity; curves per iteration

    Raises
    ------
    NumericalError   the loss is not finite
    """
    row_offsets = np.asarray(row_offsets)
    n_subsets = len(row_offsets) - 1
    # 1. Random bases and zero gates. Each space has a width of its own: a classifier's layers differ, and
    # some heads read a projection (OPT)
    probe = chunks.batch(np.arange(1)).ids.to(model.device)
    with torch.no_grad():
        hidden = model.hidden(probe, settings.layer)
        final = model.continue_from(hidden, settings.layer)
        inputs = model.hidden(probe, 0)

    def width(kind: type[OperatorSpace]) -> int:
        if kind.site != "logit":
            return hidden.shape[-1]
        return (final if kind.source == "final" else inputs).shape[-1]

    spaces = [
        initial_space(
            kind.name,
            d_model=width(kind),
            vocab_size=model.vocab_size,
            rank=settings.ranks[kind.name],
            n_buckets=settings.n_buckets,
            seed=settings.seed,
        ).to(model.device)
        for kind in space_classes(settings.spaces)
    ]
    steered = SteeredModel(model, spaces, settings.layer)
    gates = [
        torch.zeros(n_subsets, space.gate_size, device=model.device, requires_grad=True) for space in spaces
    ]
    # 2. Optimisers, the sketch of L_LDS, and what the model says unsteered
    bases = [parameter for space in spaces for parameter in space.parameters()]
    muon = Muon(bases, lr=settings.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(gates, lr=settings.lr, weight_decay=0.0)
    sketches = _sketch(row_offsets, row_members, chunks.n_chunks, settings)
    seen = np.zeros(chunks.n_chunks, dtype=np.uint8)
    curves = {name: np.zeros(settings.steps) for name in CURVES}
    base = BaseStates(steered, chunks, top=0 if settings.variant == "norm" else settings.top)

    # 3. What an interrupted run has left
    first, saved = 0, SavedState(None if scratch is None else scratch / "sgd.pt", save_seconds)
    if (state := saved.load()) is not None:
        first = state["next"]
        for target, source in zip([*bases, *gates], state["parameters"], strict=True):
            target.data.copy_(source)
        muon.load_state_dict(state["muon"])
        adamw.load_state_dict(state["adamw"])
        seen, base.losses = state["seen"].numpy(), state["base losses"].numpy()
        curves = {name: values.numpy() for name, values in state["curves"].items()}
    # 4. The iterations: draw subsets and chunks, accumulate the three losses' gradients, step
    with progress("training operators", settings.steps, unit="steps") as bar:
        bar.advance(first)
        for step in range(first, settings.steps):
            rate = _learning_rate(step, settings)
            for group in (*muon.param_groups, *adamw.param_groups):
                group["lr"] = rate
            draw = _draw(step, row_offsets, row_members, chunks.n_chunks, settings)
            muon.zero_grad(set_to_none=True)
            adamw.zero_grad(set_to_none=True)
            values = _step_losses(steered, gates, chunks, draw, sketches, base, settings)
            if not np.isfinite(values["loss"]):
                raise NumericalError(
                    f"the operator loss at step {step} is {values['loss']} (expected a finite number)",
                    fix="lower --lr, or run with --dtype fp32",
                )
            muon.step()
            adamw.step()
            seen[draw.fidelity.reshape(-1)] = 1
            for name in CURVES:
                curves[name][step] = values[name]
            bar.advance()
            if step % 20 == 0:
                bar.describe(f"training operators (loss {values['loss']:.3f})")
            if saved.due:
                checkpoint: dict[str, Any] = {"next": step + 1, "muon": muon.state_dict()}
                checkpoint["parameters"] = [parameter.detach() for parameter in (*bases, *gates)]
                checkpoint["adamw"] = adamw.state_dict()
                checkpoint["seen"] = torch.from_numpy(seen)
                checkpoint["base losses"] = torch.from_numpy(base.losses)
                checkpoint["curves"] = {name: torch.from_numpy(curve) for name, curve in curves.items()}
                saved.save(checkpoint)
    return Operators(
        spaces=[space.cpu().requires_grad_(False) for space in spaces],
        gates=[gate.detach().cpu().numpy() for gate in gates],
        layer=settings.layer,
        fit="sgd",
        seen=seen,
        log=curves,
    )


@dataclass(frozen=True)
class _Draw:
    """The chunks of one iteration, by number."""

    subsets: np.ndarray  # (s,)
    fidelity: np.ndarray  # (s, f), members of each subset
    stability: np.ndarray  # (s, o), outside each subset
    probe: int  # measured by every subset, for linearity


def _draw(
    step: int, row_offsets: np.ndarray, row_members: np.ndarray, n_chunks: int, settings: SgdSettings
) -> _Draw:
    random = stream(settings.seed, "sgd step", step)
    filled = np.flatnonzero(np.diff(row_offsets) > 0)
    subsets = random.choice(filled, size=min(settings.subsets_per_step, len(filled)), replace=False)
    fidelity, stability = [], []
    for subset in subsets:
        members = np.asarray(row_members[row_offsets[subset] : row_offsets[subset + 1]])
        fidelity.append(members[random.integers(0, len(members), settings.fidelity_batch)])
        outside: list[int] = []
        while len(outside) < settings.stability_batch:
            candidate = int(random.integers(n_chunks))
            position = int(np.searchsorted(members, candidate))
            # a subset that holds every chunk has no outside: take any
            if len(members) == n_chunks or position == len(members) or members[position] != candidate:
                outside.append(candidate)
        stability.append(outside)
    return _Draw(subsets, np.asarray(fidelity), np.asarray(stability), int(random.integers(n_chunks)))


def _learning_rate(step: int, settings: SgdSettings) -> float:
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr + (settings.lr_end - settings.lr) * done


def _sketch(
    row_offsets: np.ndarray, row_members: np.ndarray, n_chunks: int, settings: SgdSettings
) -> torch.Tensor:
    """Sketch the design matrix: M̃ = M R / √(mean subset size), (K, q) float64, R Gaussian."""
    projection = stream(settings.seed, "linearity sketch").standard_normal((n_chunks, settings.sketch))
    sketch = np.zeros((len(row_offsets) - 1, settings.sketch))
    for subset in range(len(sketch)):
        sketch[subset] = projection[
            np.asarray(row_members[row_offsets[subset] : row_offsets[subset + 1]])
        ].sum(0)
    return torch.from_numpy(sketch / np.sqrt(max(1.0, len(row_members) / len(sketch))))


def _step_losses(
    steered: SteeredModel,
    gates: list[torch.Tensor],
    chunks: ChunkReader,
    draw: _Draw,
    sketches: torch.Tensor,
    base: BaseStates,
    settings: SgdSettings,
) -> dict[str, float]:
    """Accumulate one iteration's gradient, micro-batch by micro-batch; returns the loss and its parts."""
    model, device = steered.model, steered.model.device
    values = dict.fromkeys(CURVES, 0.0)

    def run(rows: np.ndarray, owners: np.ndarray, part: Callable[..., torch.Tensor]) -> None:
        batch = chunks.batch(rows)
        scale = 4 * model.vocab_size * batch.ids.shape[1]
        size = max(1, _LOGIT_BYTES // scale)
        for start in range(0, len(rows), size):
            stop = start + size
            length = int((chunks.lengths[rows[start:stop]]).max())
            piece = Batch(
                batch.rows[start:stop], batch.ids[start:stop, :length], batch.weights[start:stop, :length]
            )
            gate = [value[torch.from_numpy(owners[start:stop]).to(device)] for value in gates]
            loss = part(piece, gate, slice(start, stop))
            loss.backward()

    def fidelity(piece: Batch, gate: list[torch.Tensor], where: slice) -> torch.Tensor:
        entered = base.enter(piece)
        losses = _losses(steered, entered, gate) / settings.fidelity_batch
        values["fidelity"] += float(losses.detach().sum())
        before = float(base.losses_of(piece, entered).sum()) / settings.fidelity_batch
        values["gain"] += before - float(losses.detach().sum())
        return settings.fidelity * losses.sum()

    def stability(piece: Batch, gate: list[torch.Tensor], where: slice) -> torch.Tensor:
        entered = base.enter(piece)
        final, logit, shift = _steer(steered, entered, gate)
        top, moved = None, shift
        if settings.variant != "norm":
            top, tokens = base.highest(entered)
            moved = model.uncapped_logits(final, tokens).float()
            moved = model.soft_cap(sum((added.gather(-1, tokens) for added in logit), moved))
        losses = stability_loss(settings.variant, top, moved, shift, entered.weights)
        losses = losses / settings.stability_batch
        values["stability"] += float(losses.detach().sum())
        return settings.stability * losses.sum()

    count = len(draw.subsets)
    if settings.fidelity:
        run(draw.fidelity.reshape(-1), np.repeat(draw.subsets, settings.fidelity_batch), fidelity)
    if settings.stability:
        run(draw.stability.reshape(-1), np.repeat(draw.subsets, settings.stability_batch), stability)
    if settings.linearity and count > settings.sketch:
        residual = linearity_residual(sketches[draw.subsets])
        batch = chunks.batch(np.asarray([draw.probe]))
        probe = base.enter(batch)
        before = float(base.losses_of(batch, probe)[0])
        owners = torch.from_numpy(draw.subsets).to(device)
        size = max(1, _LOGIT_BYTES // (4 * model.vocab_size * probe.targets.shape[1]))

        def respond(start: int) -> torch.Tensor:
            gate = [value[owners[start : start + size]] for value in gates]
            return before - _losses(steered, probe.repeated(len(gate[0])), gate)

        # L_LDS couples the subsets: its gradient 2 QᵀQ y in y, then backward through each response. Graphs
        # that do not fit together in memory are built a second time.
        whole = size >= count
        with torch.set_grad_enabled(whole):
            pieces = [respond(start) for start in range(0, count, size)]
        responses = torch.cat(pieces).detach().double().cpu()
        slope = (2 * residual.T @ (residual @ responses)).to(device)
        values["linearity"] = float((residual @ responses).square().sum())
        for number, start in enumerate(range(0, count, size)):
            response = pieces[number] if whole else respond(start)
            (settings.linearity * (slope[start : start + size] * response).sum()).backward()
    values["loss"] = (
        settings.fidelity * values["fidelity"]
        + settings.stability * values["stability"]
        + settings.linearity * values["linearity"]
    )
    return {name: value / (1 if name == "linearity" else count) for name, value in values.items()}


def _losses(steered: SteeredModel, entered: Entered, gates: list[torch.Tensor]) -> torch.Tensor:
    """Loss (B,) of each row under its operator."""
    model = steered.model
    final, logit, _ = _steer(steered, entered, gates)
    if not logit:  # nothing acts behind the head: its logits need not be held
        losses = model.token_losses(final, entered.targets)
    else:
        logits = model.soft_cap(sum(logit, model.uncapped_logits(final).float()))
        flat = F.cross_entropy(logits.flatten(0, 1), entered.targets.flatten(), reduction="none")
        losses = flat.reshape(entered.targets.shape)
    return fidelity_loss(losses, entered.weights)


def _steer(
    steered: SteeredModel, entered: Entered, gates: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Steered input of the head (B, T − 1, d), what is added to the logits, and the first shift of all."""
    hidden = entered.hidden
    pairs = list(zip(steered.spaces, gates, strict=True))
    shifts = [space(hidden, gate) for space, gate in pairs if space.site == "residual"]
    state = hidden if not shifts else hidden + sum(shifts[1:], shifts[0]).to(hidden.dtype)
    final = steered.model.continue_from(state, steered.layer)[:, :-1]
    logit = [
        space(space.reads(final, entered.inputs, entered.tokens), gate)
        for space, gate in pairs
        if space.site == "logit"
    ]
    return final, logit, [*shifts, *logit][0][:, : final.shape[1]]


def build_rows(columns: np.ndarray, n_subsets: int) -> tuple[np.ndarray, np.ndarray]:
    """Transpose the design: list the members of every subset.

    Parameters
    ----------
    columns : (n, d) uint16 or uint32
    n_subsets : int        K

    Returns
    -------
    row_offsets : (K + 1,) int64
    row_members : (n d,) uint32, or uint64 where n > 2**32
        Subset k holds chunks ``row_members[row_offsets[k] : row_offsets[k + 1]]``, ascending.
    """
    entries = np.argsort(columns.ravel(), kind="stable")  # stable: members stay ascending
    dtype = np.uint32 if len(columns) <= 1 << 32 else np.uint64
    return offsets_of(row_sizes(columns, n_subsets)), (entries // columns.shape[1]).astype(dtype)


def initial_space(
    name: str, *, d_model: int, vocab_size: int, rank: int, n_buckets: int, seed: int
) -> OperatorSpace:
    """Draw the bases of a space of `TRAINABLE`, uniform ±1/√fan-in as torch.nn.Linear."""
    place = list(SPACES).index(name)
    generator = torch.Generator().manual_seed(torch_seed(seed, "operator bases", place))

    def uniform(rows: int, columns: int) -> torch.Tensor:
        bound = 1 / math.sqrt(columns)
        return (torch.rand(rows, columns, generator=generator) * 2 - 1) * bound

    kind, rank = SPACES[name], min(rank, d_model)
    if issubclass(kind, LogitSpace):
        bucket, sign = vocabulary_buckets(vocab_size, n_buckets, seed, name)
        return kind(uniform(rank, d_model), bucket, sign)
    drawn: OperatorSpace = kind(uniform(rank, d_model), uniform(d_model, rank))
    return drawn
