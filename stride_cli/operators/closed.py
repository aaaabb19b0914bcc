"""The closed form: all K operators at once from one pass over the corpus.

For small gates fidelity plus stability is quadratic in the gates of each subset,

    −ḡ_k·a + ½ aᵀ (λ_stab F + γ I) a,      ḡ = D⁻¹ M G,   g_i = −∂loss(z_i)/∂a |_{a=0},

where the loss of chunk i is the sum over its scored tokens (paper, L_fid), in units of the mean chunk,
with F the Hessian of the stability loss KL(base ∥ steered), which at a = 0 is the Fisher matrix. Its minimum
is ``A = (λ_stab F + γ I)⁻¹ D⁻¹ M G``. Three ways to F:

- ``kronecker``: F ≈ A ⊗ S, second moments of the activations and of the gradients of labels drawn from the
  model. Its inverse root is part of the bases (`bases.fit_bases`), so that in the gates F is the identity and
  A = D⁻¹ M G / λ_stab. Costs a sample's second moments, whatever p is.
- ``fisher``: F from labels drawn for up to 4,096 chunks, orthonormal bases; where p exceeds the number of
  Fisher rows the system is solved in the dual.
- ``exact``: for classifiers, every label counted by its probability; of gates inside the blocks the diagonal
  in the Kronecker eigenbasis. Here ``A`` can be what training reaches in its own time instead of the minimum,
  with gradients and F averaged over checkpoints along the training (`label_fisher.solve_exact`).

The diagonal gate (``residual``) has too few gates for a Kronecker product and always takes the second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.errors import NumericalError
from stride_cli.operators.bases import fit_bases, label_uniforms
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.label_fisher import label_fisher, solve_exact
from stride_cli.operators.opener import Opener
from stride_cli.operators.operator_space import BasisOptions
from stride_cli.operators.projections import Projections, Projector
from stride_cli.operators.saving import save_atomically
from stride_cli.operators.spaces import space_classes, space_from_arrays
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.operators.subset_sums import subset_sums
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.shared_fit import Crew

CURVATURES = ("kronecker", "fisher", "exact")
_FISHER_ROWS = 4096
_FISHER_BYTES = 1 << 30
_SPREAD_CHUNKS = 256
_SPREAD_ROWS = 64  # of gates that are put in float64 at once


@dataclass(frozen=True)
class ClosedSettings:
    """How the closed form is fitted.

    Attributes
    ----------
    spaces : names of the operator spaces
    layer : residual spaces act after this many blocks
    ranks : rank of each space by name
    n_buckets : c of the logit spaces; None for what `fit_bases` chooses
    curvature : "kronecker", "fisher" (labels drawn from the model) or "exact" (classifiers: all labels)
    damping : of both Kronecker factors, or γ, as a multiple of the mean (non-zero) eigenvalue
    time : Σ of learning rates that the model was trained for, in place of a damping (exact)
    trajectory : paths of checkpoints along its training, each with the share of `time` that it stands for;
        the model itself has the rest (exact)
    stability : λ_stab
    residuals : "average": a chunk's tokens count as on average over training (`average_residuals`), or
        "final"
    normalize : chunks' gradients are divided by their lengths to this power (`chunk_gradients`)
    project : bytes that are kept of every chunk's own gradient (`projections`); whitened bases only
    batch_tokens : padded tokens in one forward pass
    seed : names every random stream
    """

    spaces: tuple[str, ...]
    layer: int
    ranks: dict[str, int]
    n_buckets: int | None = None
    curvature: str = "kronecker"
    damping: float = 0.1
    time: float | None = None
    trajectory: tuple[tuple[str, float], ...] = ()
    stability: float = 1.0
    residuals: str = "final"
    normalize: float = 0.0
    project: int = 0
    batch_tokens: int = 4096
    seed: int = 0


def fit_spaces(model: AttributableModel, chunks: ChunkReader, settings: ClosedSettings) -> SteeredModel:
    """The model with the operator spaces that these settings ask for: bases of this model and corpus."""
    return weighed(fit_bases(model, chunks, settings.spaces, basis_options(settings)), settings)


def keep_spaces(steered: SteeredModel, path: Path) -> None:
    """Write the bases that `kept_spaces` reads."""
    spaces = [
        (space.name, {key: torch.from_numpy(value) for key, value in space.arrays().items()})
        for space in steered.spaces
    ]
    save_atomically({"spaces": spaces}, path)


def kept_spaces(model: AttributableModel, path: Path, settings: ClosedSettings) -> SteeredModel:
    """The model with the operator spaces that `keep_spaces` wrote."""
    spaces = [
        space_from_arrays(name, {key: value.numpy() for key, value in arrays.items()})
        for name, arrays in torch.load(path, weights_only=True)["spaces"]
    ]
    on_device = [space.to(model.device).requires_grad_(False) for space in spaces]
    return weighed(SteeredModel(model, on_device, settings.layer), settings)


def weighed(steered: SteeredModel, settings: ClosedSettings) -> SteeredModel:
    """The same, with chunks' tokens and chunks counting as these settings say."""
    return replace(steered, averaged=settings.residuals == "average", normalized=settings.normalize)


def basis_options(settings: ClosedSettings) -> BasisOptions:
    """How the bases are fitted that these settings ask for."""
    return BasisOptions(
        layer=settings.layer,
        ranks=settings.ranks,
        n_buckets=settings.n_buckets,
        seed=settings.seed,
        batch_tokens=settings.batch_tokens,
        damping=settings.damping if settings.curvature == "kronecker" else None,
        all_labels=settings.curvature == "exact",
    )


@dataclass(frozen=True)
class CorpusPass:
    """What the pass over the corpus leaves.

    Attributes
    ----------
    steered : SteeredModel      with the bases that it was made with
    sums : of each space (K, p) float32                M G
    fisher : of each space (N, p) float32 or None      what F is estimated from, where no basis holds it
    probes : of each space (S, p) float32              true gradients, where `_equalise` has use for them
    loss : mean nats per scored token
    projections : of every chunk, where they are asked for
    """

    steered: SteeredModel
    sums: list[torch.Tensor]
    fisher: list[torch.Tensor | None]
    probes: list[torch.Tensor]
    loss: float
    projections: Projections | None


def fit_closed(
    model: AttributableModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    n_subsets: int,
    settings: ClosedSettings,
    *,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
    crew: Crew | None = None,
) -> Operators:
    """Fit every operator in closed form.

    Parameters
    ----------
    model : AttributableModel
    chunks : ChunkReader                the n chunks of the corpus
    columns : (n, d) unsigned           the subsets of each chunk
    n_subsets : K
    settings : ClosedSettings
    scratch : directory, optional       where an interrupted pass continues from
    save_seconds : float                how often the pass is saved there
    crew : Crew, optional               who goes over the corpus, with a `scratch` that they see; default:
                                        this process

    Returns
    -------
    Operators        gates (K, p) float32 per space; every chunk seen

    Raises
    ------
    NumericalError   a loss, gradient or Fisher matrix is not finite
    """
    # 1. The bases, shared by all subsets, from a sample
    # 2. One pass over the corpus: M G, what F is estimated from where the bases do not hold it, and a few
    # bytes of every chunk's own gradient
    if crew is None:
        found = _one_pass(model, chunks, columns, n_subsets, settings, scratch, save_seconds)
    else:
        assert scratch is not None
        found = crew.passes(model, chunks, (n_subsets, columns.shape[1]), settings, scratch, save_seconds)
    steered, sums, fisher, probes = found.steered, found.sums, found.fisher, found.probes
    curvature = _label_fisher(steered, chunks, settings) if settings.curvature == "exact" else None
    if settings.trajectory:
        assert curvature is not None
        _average_over_trajectory(steered, chunks, columns, settings, sums, curvature)
    # 3. A = (λ_stab F + γI)⁻¹ D⁻¹ M G, space by space; D holds the sizes of the subsets
    sizes = np.bincount(np.asarray(columns).reshape(-1), minlength=n_subsets)  # (K,) |A_k|
    gates = []
    for number, (total, rows) in enumerate(zip(sums, fisher, strict=True)):
        mean = total.div_(torch.from_numpy(np.maximum(sizes, 1)).to(total.dtype)[:, None])
        if curvature is not None:
            gates.append(
                solve_exact(
                    mean,
                    curvature[number],
                    damping=settings.damping,
                    time=settings.time,
                    stability=settings.stability,
                )
            )
        elif rows is None:  # whitened: F = I, and its damping is in the bases
            gates.append(mean if settings.stability == 1 else mean.div_(settings.stability))
        else:
            gates.append(solve_gates(mean, rows, damping=settings.damping, stability=settings.stability))
    # 4. Where spaces do not share a unit, they are given one
    if not on_one_scale(settings):
        _equalise(gates, probes)
    return Operators(
        spaces=[space.cpu() for space in steered.spaces],
        gates=[gate.numpy() for gate in gates],
        layer=settings.layer,
        fit="closed",
        seen=np.ones(chunks.n_chunks, dtype=np.uint8),
        direct_scale=1.0 / settings.stability if is_whitened(settings) else None,
        averaged=steered.averaged,
        normalized=steered.normalized,
        projections=found.projections,
        log={"loss": np.asarray([found.loss])},
    )


def _one_pass(
    model: AttributableModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    n_subsets: int,
    settings: ClosedSettings,
    scratch: Path | None,
    save_seconds: float,
) -> CorpusPass:
    """Bases, and the pass over the corpus, by this process."""
    kept = None if scratch is None else scratch / "spaces.pt"
    if kept is not None and kept.exists():  # of a larger model they take longer than the pass
        steered = kept_spaces(model, kept, settings)
    else:
        steered = fit_spaces(model, chunks, settings)
        if kept is not None:
            keep_spaces(steered, kept)
    projector = None
    if settings.project:
        size = settings.project
        projector = Projector(steered.gate_size, size, chunks.n_chunks, settings.seed, folder=scratch)
    found = accumulate(steered, chunks, columns, n_subsets, settings, scratch, save_seconds, projector)
    return CorpusPass(steered, *found, None if projector is None else projector.projections())


def _label_fisher(steered: SteeredModel, chunks: ChunkReader, settings: ClosedSettings) -> list[torch.Tensor]:
    return label_fisher(steered, chunks, batch_tokens=settings.batch_tokens, seed=settings.seed)


def _average_over_trajectory(
    steered: SteeredModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    settings: ClosedSettings,
    sums: list[torch.Tensor],
    curvature: list[torch.Tensor],
) -> None:
    """Make M G and F means over the checkpoints of the training, in place: the bases are the final model's,
    so that a gate is the same direction in weights throughout."""
    opener = Opener.like(steered.model)
    own = 1.0 - sum(share for _, share in settings.trajectory)
    for total in (*sums, *curvature):
        total.mul_(own)
    for path, share in settings.trajectory:
        earlier = replace(steered, model=opener.load(path))
        n_subsets = len(sums[0])
        found = accumulate(earlier, chunks, columns, n_subsets, settings, None, 0.0)[0]
        for total, part in zip(sums, found, strict=True):
            total.add_(part, alpha=share)
        for total, part in zip(curvature, _label_fisher(earlier, chunks, settings), strict=True):
            total.add_(part, alpha=share)


def solve_gates(
    mean_gradients: torch.Tensor, fisher_rows: torch.Tensor, *, damping: float, stability: float = 1.0
) -> torch.Tensor:
    """``(λ_stab F + γ I)⁻¹ ḡ_k`` for every subset, with ``F = RᵀR / N``.

    Parameters
    ----------
    mean_gradients : (K, p) float32      ḡ = D⁻¹ M G
    fisher_rows : (N, p) float32         R
    damping : float                      γ / (mean non-zero eigenvalue of λ_stab F)
    stability : float                    λ_stab

    Returns
    -------
    Tensor (K, p) float32; primal (p × p) when p ≤ N, else dual (N × N), in float64 where it matters

    Raises
    ------
    NumericalError
        F is zero or not finite.
    """
    n_rows, size = fisher_rows.shape
    trace = float((fisher_rows.double() ** 2).sum()) * stability / n_rows
    if not np.isfinite(trace) or trace <= 0:
        raise NumericalError(
            f"the Fisher matrix has trace {trace} (expected a positive number): the model's output does not "
            "depend on the gates",
            fix="steer at another layer (--layer) or check the checkpoint",
        )
    gamma = damping * trace / min(n_rows, size)  # F has min(N, p) eigenvalues that are not zero
    # primal: p equations, (λ_stab RᵀR / N + γI) a = ḡ
    if size <= n_rows:
        rows = fisher_rows.double()
        system = rows.T @ rows * (stability / n_rows)
        system.diagonal().add_(gamma)
        factor = torch.linalg.cholesky(system)
        return torch.cholesky_solve(mean_gradients.double().T, factor).T.float().contiguous()
    # dual: N equations. Woodbury: (c RᵀR + γI)⁻¹ b = (b − Rᵀ (RRᵀ + γ/c I)⁻¹ R b) / γ,  c = λ_stab / N
    gram = (fisher_rows @ fisher_rows.T).double()
    gram.diagonal().add_(gamma * n_rows / stability)
    factor = torch.linalg.cholesky(gram)
    inner = torch.cholesky_solve((fisher_rows @ mean_gradients.T).double(), factor)  # (N, K)
    return torch.addmm(mean_gradients, inner.T.float(), fisher_rows, alpha=-1).div_(gamma)


def accumulate(
    steered: SteeredModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    n_subsets: int,
    settings: ClosedSettings,
    scratch: Path | None,
    save_seconds: float,
    projector: Projector | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor], float]:
    """One pass: M G (K, p), Fisher rows (N, p) where wanted, and a few true gradients (S, p) of every space
    (none where `_equalise` has no use for them); mean loss. The projector is handed every gradient."""
    # F is estimated from drawn labels where no basis holds it: as many rows as fit in memory, of chunks that
    # are drawn once; the first of them are probes of how far each space moves the corpus
    spaces = steered.spaces
    sizes = [space.gate_size for space in spaces]
    dense = [settings.curvature == "fisher" or not space.whitens for space in spaces]
    limit = _FISHER_ROWS
    if any(dense):
        wanted_size = sum(size for size, needs in zip(sizes, dense, strict=True) if needs)
        limit = min(limit, max(64, _FISHER_BYTES // (4 * wanted_size)))
    equalised = len(spaces) > 1 and not on_one_scale(settings)
    drawn_chunks = _drawn_chunks(chunks.n_chunks, limit, settings.seed) if any(dense) or equalised else None
    n_fisher = min(limit, chunks.n_chunks)
    n_probe = min(_SPREAD_CHUNKS, n_fisher) if equalised else 0

    together = steered.chunks_at_once
    # gradients of both labels, and what is made of them on the way
    sums = subset_sums(n_subsets, sizes, steered.model.device, beside=16 * together * steered.gate_size)
    shrinking = ShrinkingBatches()
    fisher = [
        torch.zeros(n_fisher, size) if needs else None for size, needs in zip(sizes, dense, strict=True)
    ]
    probes = [torch.zeros(n_probe, size) for size in sizes]
    plan = chunks.plan(settings.batch_tokens)
    first, loss_sum, loss_count = 0, 0.0, 0
    saved = scratch / "closed-pass.pt" if scratch is not None else None
    state = torch.load(saved, weights_only=True, mmap=False) if saved is not None and saved.exists() else None
    # one of other turns, of a device that had more room or less, is begun again
    if state is not None and state.get("turns", 1) == sums.turns:
        first, loss_sum, loss_count = state["next"], state["loss_sum"], state["loss_count"]
        fisher, probes = state["fisher"], state["probes"]
        sums.resume(state["sums"], state.get("turn", 0))
        if projector is not None:
            projector.resume(state["projector"])
    last_saved, pause = time.monotonic(), save_seconds
    total = int(chunks.lengths.sum())

    def gradients(batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, torch.Tensor]:
        draws = not sums.turn and any(dense) and (_slots(drawn_chunks, batch.rows) >= 0).any()
        return chunk_gradients(
            steered, batch, sampled=label_uniforms(settings.seed, batch) if draws else None
        )

    with progress("fitting operators", sums.turns * total, unit="tokens") as bar:
        done = [plan[step % len(plan)] for step in range(first)]
        bar.advance(sum(int(chunks.lengths[group].sum()) for group in done))
        for step in range(first, sums.turns * len(plan)):
            if step and step % len(plan) == 0:
                sums.next_turn()
            group = plan[step % len(plan)]
            parts = map(chunks.batch, chunks.small_groups(group, together))
            for batch, (true, drawn, loss) in shrinking.each(parts, gradients):
                sums.add(columns[batch.rows], true, chunks.share(batch))
                if sums.turn:  # all else is known since the first
                    continue
                if projector is not None:
                    projector.add(batch, true)
                loss_sum += float(loss.sum())
                loss_count += int((batch.scored > 0).sum())
                slot = _slots(drawn_chunks, batch.rows)  # which Fisher row each fills
                wanted = slot >= 0
                if not wanted.any():
                    continue
                # the stability loss is a mean over tokens: Σ_t g_t g_tᵀ / T has the rows √T · mean gradient
                root = batch.scored.sqrt()[:, None]
                target, keep = torch.from_numpy(slot[wanted]), torch.from_numpy(wanted)
                inside = target < n_probe
                for position, gradient in enumerate(true):
                    if inside.any():
                        few = torch.nonzero(keep)[inside, 0].to(gradient.device)
                        probes[position][target[inside]] = gradient[few].cpu()
                    fisher_rows = fisher[position]
                    if drawn is not None and fisher_rows is not None:
                        fisher_rows[target] = (drawn[position].cpu() * root)[keep]
            bar.advance(int(chunks.lengths[group].sum()))
            if saved is not None and time.monotonic() - last_saved > pause:
                state = {"next": step + 1, "loss_sum": loss_sum, "loss_count": loss_count}
                state |= {"sums": sums.sums(), "turn": sums.turn, "turns": sums.turns}
                state |= {"fisher": fisher, "probes": probes}
                if projector is not None:
                    state["projector"] = projector.state()
                started = time.monotonic()
                save_atomically(state, saved)
                last_saved = time.monotonic()
                # K × p may be a gigabyte, and the disk slow
                if save_seconds:
                    pause = max(save_seconds, 20 * (last_saved - started))
    return sums.sums(), fisher, probes, loss_sum / max(1, loss_count)


def _drawn_chunks(n_chunks: int, count: int, seed: int) -> np.ndarray:
    """Chunks that F is estimated from, ascending."""
    return np.sort(stream(seed, "fisher chunks").permutation(n_chunks)[:count])


def _slots(drawn: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """The place of each chunk among the drawn ones, −1 of others."""
    if drawn is None:
        return np.full(len(rows), -1)
    place = np.minimum(np.searchsorted(drawn, rows), len(drawn) - 1)
    return np.where(drawn[place] == rows, place, -1)


def on_one_scale(settings: ClosedSettings) -> bool:
    """Whether the gates of all spaces are in units that hold across spaces: their sum needs no weights.

    Changes of a network's own weights are. So are whitened gates, in units of the model's own Fisher matrix,
    which says how far each space moves the model: gates inside the blocks hardly do so in pre-training, and
    most of it in fine-tuning. Other spaces are put on one spread of responses instead (`_equalise`).
    """
    if settings.curvature == "exact":
        return all(cls.of_weights for cls in space_classes(settings.spaces))
    return is_whitened(settings)


def is_whitened(settings: ClosedSettings) -> bool:
    """Whether the bases hold the Fisher matrix, so that gates are plain means of chunks' gradients."""
    return settings.curvature == "kronecker" and all(cls.whitens for cls in space_classes(settings.spaces))


def _equalise(gates: list[torch.Tensor], probes: list[torch.Tensor]) -> None:
    """Scale the spaces of a sum so that each moves the corpus's own chunks equally far, in place.

    The spread of a space is the median over probe chunks of the median absolute deviation of its responses
    over subsets (robust: the few subsets that hold the probe itself stand out). The geometric mean is kept.
    """
    if len(gates) < 2:
        return
    # r_ks = a_k · g_s of subset k and probe s; its spread over k, typical over s
    spreads = []
    for gate, probe in zip(gates, probes, strict=True):
        # in float64: what is left of responses that are nearly alike scales all gates of the space
        wide = probe.double().T
        responses = torch.cat([some.double() @ wide for some in gate.split(_SPREAD_ROWS)])  # (K, S)
        deviation = (responses - responses.median(dim=0).values).abs().median(dim=0).values
        spreads.append(max(float(deviation.median()), float(np.finfo(np.float32).tiny)))
    common = float(np.exp(np.mean(np.log(spreads))))
    for gate, spread in zip(gates, spreads, strict=True):
        gate.mul_(common / spread)
