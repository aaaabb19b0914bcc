"""Exact measurement: K steered continuations from the layer (paper, alg:stride, "Measure perturbation")."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader, pad_batch
from stride_cli.errors import QueryError
from stride_cli.models.devices import total_bytes
from stride_cli.operators.exact_response import cross_entropy, pearson
from stride_cli.operators.gates import gate_rows
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import progress
from stride_cli.randomness import stream

_LOGIT_BYTES = 256 << 20
_OF_DEVICE = 64  # the share of a device's memory that logits may take where that is more: 1/64
_AGREEMENT = 0.999
# of a large model fine-tuned on little, a whole step changes losses by a thousand nats
_STEPS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6)
MOST_STEPS = len(_STEPS)  # that are tried
_PROBED = 6  # subsets that steps are tried on


def measure_exact(
    steered: SteeredModel, batch: Batch, *, subsets: np.ndarray | None = None, batch_size: int = 8
) -> np.ndarray:
    """Measure the loss change that steering towards each subset causes on each query.

        y[q, k] = loss(base, q) − loss(steered by k, q)                        operators fitted by sgd
        y[q, k] = (loss(steered by −εk, q) − loss(steered by +εk, q)) / 2ε     closed form, ε = operators.step

    Sign: positive where subset k lowers the loss on q (opposite to the paper's eq:perturbation). The hidden
    state is computed once per query, the head runs at scored positions only, the loss is in float32.

    Parameters
    ----------
    steered : SteeredModel       with operators of K subsets
    batch : Batch                Q queries
    subsets : (S,) int64         measure only these; all K by default
    batch_size : int             steered continuations at once; the result does not depend on it

    Returns
    -------
    ndarray (Q, S) float64       mean nats per scored token

    Raises
    ------
    QueryError                   a query has no scored token
    """
    model, operators, device = steered.model, steered.operators, steered.model.device
    chosen = np.arange(operators.n_subsets) if subsets is None else np.asarray(subsets)
    central = operators.fit == "closed"
    responses = np.zeros((len(batch.ids), len(chosen)))
    with torch.no_grad(), progress("measuring", len(batch.ids) * len(chosen), unit="continuations") as bar:
        for row in range(len(batch.ids)):
            weights = batch.weights[row, 1:]
            scored = torch.nonzero(weights).flatten()
            if len(scored) == 0:
                raise QueryError(
                    f"query {int(batch.rows[row])} has no scored token",
                    fix="give it a response of one token or more",
                )
            # the last scored token is predicted, not read (a classifier's rows always have two places)
            length = max(2, int(scored[-1]) + 1)
            ids = batch.ids[row : row + 1, :length].to(model.device)
            targets = batch.ids[row, scored + 1].to(model.device)
            share = (weights[scored] / weights[scored].sum()).to(model.device)
            scored = scored.to(model.device)
            entrance = Entrance.of(steered, ids, scored, targets)
            if all(space.site == "logit" for space in steered.spaces):
                entrance = entrance.run_through(steered)  # the blocks say the same for every subset
            losses = partial(_losses, steered, entrance, share)
            base = None if central else losses(None)[0]
            logit_bytes = max(_LOGIT_BYTES, total_bytes(model.device) // _OF_DEVICE)
            limit = max(1, logit_bytes // (4 * model.vocab_size * len(scored)))
            size = max(1, min(batch_size, limit))
            for start in range(0, len(chosen), size):
                picked = chosen[start : start + size]
                gates = [torch.from_numpy(gate_rows(gate, picked)).to(device) for gate in operators.gates]
                if central:  # in place: gates of many subsets are the largest thing in memory
                    ahead = losses([gate.mul_(operators.step) for gate in gates])
                    change = (losses([gate.neg_() for gate in gates]) - ahead) / (2 * operators.step)
                else:
                    assert base is not None
                    change = base - losses(gates)
                responses[row, start : start + len(picked)] = change.cpu().numpy()
                bar.advance(len(picked))
    return batch.of_queries(responses)


def choose_step(steered: SteeredModel, batch: Batch, *, seed: int) -> tuple[float, float]:
    """Find the largest ε at which central differences agree with the first-order response.

    Parameters
    ----------
    batch : Batch      probe sequences

    Returns
    -------
    step : float, agreement : float      Pearson correlation over random subsets there, worst probe
    """
    operators = steered.operators
    chosen = np.sort(stream(seed, "step probes").permutation(operators.n_subsets)[:_PROBED])
    linear = measure_linear(steered, batch)[:, chosen]
    before, probes, every_other = operators.step, range(len(batch.ids)), range(0, MOST_STEPS, 2)
    seen: dict[tuple[int, int], float] = {}

    def agreement(number: int, *, enough: float = -1.0) -> float:
        """Measure a step on the worst probe; those after one below `enough` are not looked at."""
        operators.step, worst = _STEPS[number], 1.0
        for row in probes:
            if (number, row) not in seen:
                probe = batch.take(slice(row, row + 1))
                exact = measure_exact(steered, probe, subsets=chosen, batch_size=_PROBED)
                seen[number, row] = pearson(linear[row], exact[0])
            worst = min(worst, seen[number, row])
            if worst < enough:
                break
        return worst

    def at_most(number: int) -> float:
        """Bound the agreement of a step by the probes that were looked at."""
        return min((seen[number, row] for row in probes if (number, row) in seen), default=1.0)

    try:
        with progress("choosing a step", len(every_other), unit="steps") as bar:
            # the error of a central difference falls with the square of the step: where one is too long, so
            # are the longer ones, and every other is enough to find the first that is not
            for number in every_other:
                if (found := agreement(number, enough=_AGREEMENT)) >= _AGREEMENT:
                    if number and (longer := agreement(number - 1, enough=_AGREEMENT)) >= _AGREEMENT:
                        number, found = number - 1, longer
                    return _STEPS[number], found
                bar.advance(1)
        # none is: the best of them, or one beside it, without what cannot be better any more
        best = max(every_other, key=at_most)
        while any((best, row) not in seen for row in probes):
            agreement(best)
            best = max(every_other, key=at_most)
        beside = [number for number in (best - 1, best, best + 1) if 0 <= number < MOST_STEPS]
        best = max(beside, key=agreement)
        return _STEPS[best], at_most(best)
    finally:
        operators.step = before


def probe_batch(chunks: ChunkReader, seed: int) -> Batch:
    """Take two scored chunks, cut to 32 tokens: enough to see where the response stops being linear."""
    rows, tokens, weights = [], [], []
    for row in stream(seed, "step probes", 1).permutation(chunks.n_chunks):
        ids, mask = chunks.chunk(int(row))
        start = max(0, int(mask.argmax()) - 16)
        if mask[start : start + 32].sum() > 0:
            rows.append(int(row))
            tokens.append(ids[start : start + 32])
            weights.append(mask[start : start + 32])
        if len(rows) == 2:
            break
    return pad_batch(np.asarray(rows), tokens, weights)


@dataclass(frozen=True)
class Entrance:
    """One sequence where steering begins, and what it is to predict.

    Attributes
    ----------
    hidden : (1, T, d)          state of the sequence after `SteeredModel.first_block` blocks
    inputs : (1, S, d) or None  embeddings at the scored positions, for spaces that read them
    tokens : (1, S) int64       tokens at the scored positions
    scored, targets : (S,)      positions that predict, and the tokens they should predict
    unsteered : ((1, S, d), (1, S, V)), optional
        State before the head and uncapped logits at the scored positions, where no space acts inside the
        network: the blocks and the head are not run again.
    """

    hidden: torch.Tensor
    inputs: torch.Tensor | None
    tokens: torch.Tensor
    scored: torch.Tensor
    targets: torch.Tensor
    unsteered: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls, steered: SteeredModel, ids: torch.Tensor, scored: torch.Tensor, targets: torch.Tensor
    ) -> Entrance:
        """Run a sequence ids (1, T) to where steering begins."""
        hidden, inputs = steered.entry_states(ids)
        return cls(hidden, None if inputs is None else inputs[:, scored], ids[:, scored], scored, targets)

    def run_through(self, steered: SteeredModel) -> Entrance:
        """Add what the blocks and the head say without steering."""
        final = steered.model.continue_from(self.hidden, steered.layer)[:, self.scored]
        return replace(self, unsteered=(final, steered.model.uncapped_logits(final).float()))


def _losses(
    steered: SteeredModel, entrance: Entrance, share: torch.Tensor, gates: list[torch.Tensor] | None
) -> torch.Tensor:
    """Average the losses of each continuation over scored tokens, (B,) float64; gates None: unsteered."""
    losses = token_losses(steered, entrance, gates)
    return (losses.double() * share.double()).sum(dim=1)


def token_losses(steered: SteeredModel, entrance: Entrance, gates: list[torch.Tensor] | None) -> torch.Tensor:
    """Compute the loss of each scored token in each steered continuation, (B, S) nats.

    Parameters
    ----------
    gates : list of (B, p)      one per space; None: one continuation, unsteered
    """
    model, spaces, layer = steered.model, steered.spaces, steered.layer
    hidden, scored = entrance.hidden, entrance.scored
    count = 1 if gates is None else len(gates[0])
    state = hidden.expand(count, -1, -1)
    pairs = [] if gates is None else list(zip(spaces, gates, strict=True))
    layers = None if gates is None else steered.layer_space

    def steer(number: int, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        assert layers is not None and gates is not None
        return output + layers(read, gates[list(spaces).index(layers)], number).to(output.dtype)

    if entrance.unsteered is None:
        with model.at_layers(layers.which, hidden.shape[1], steer) if layers else nullcontext():
            if (start := steered.first_block) < layer:
                state = model.advance(state, start, layer)
            shift = sum(space(state, gate) for space, gate in pairs if space.site == "residual")
            if not isinstance(shift, int):
                state = state + shift.to(state.dtype)
            final = model.continue_from(state, layer)[:, scored]  # (B, S, d)
        logits = model.uncapped_logits(final).float()  # (B, S, V)
    else:
        final, logits = (part.expand(count, -1, -1) for part in entrance.unsteered)
    for space, gate in pairs:
        if space.site == "logit":
            read = space.reads(final, entrance.inputs, entrance.tokens)
            logits = logits + space(read.expand(count, *read.shape[1:]), gate)
    logits = model.soft_cap(logits)
    return cross_entropy(logits, entrance.targets)
