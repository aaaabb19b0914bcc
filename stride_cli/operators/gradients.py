"""Per-example gate gradients: one forward pass, and one backward pass down to the steered layer.

A gate adds ``B(h) a`` to an activation (paper, §3.1), so at a = 0 the chain rule gives its gradient from two
things that do not depend on the space: what the basis reads, h, and the pull of the loss on what it adds to,
−∂loss/∂(activation). `signals` finds both at every site at once; `assemble` contracts them, space by space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.batches import Batch
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.head import check_finite, head_blocks, seeded
from stride_cli.operators.initial_residuals import average_residuals
from stride_cli.operators.operator_space import OperatorSpace, Signals
from stride_cli.operators.steered_model import SteeredModel

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader


def gate_gradients(
    steered: SteeredModel, batch: Batch, *, sampled: np.ndarray | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gate gradients ``g_i = −∂loss(z_i)/∂a |_{a=0}`` of every row, in every space.

    Parameters
    ----------
    steered : SteeredModel          its spaces say which gates; fitted ones are not looked at
    batch : Batch                   B rows; a row without a scored token gets a zero gradient
    sampled : (B, T) float64, optional
        Uniform numbers in [0, 1). When given, the loss is that of labels drawn from the model's own
        distribution (inverse CDF), as the Fisher matrix needs them.

    Returns
    -------
    gradients : list of (B, p) float32, one per space; positive along gates that lower the row's loss
    loss : (B,) float64             mean nats per scored token

    Raises
    ------
    NumericalError
        An activation or loss is not finite; names the first such row.
    """
    found = signals(steered, batch, sampled=sampled)
    with steered.products():
        return assemble(steered.spaces, found), found.loss


def chunk_gradients(steered: SteeredModel, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`gate_gradients` of training chunks: what operators, projections and exact gradients are made of.

    Where the model is `averaged`, a token counts as on average over training, and not as at its end
    (`initial_residuals.average_residuals`); the losses are those at its end. Where it is `normalized` by e,
    g_i is divided by |s_i g_i|^e, with s_i the row's scored tokens and the length taken over all spaces: a
    gradient twice as large is not twice the influence.
    """
    found = signals(steered, batch, averaged=steered.averaged)
    with steered.products():
        gradients = assemble(steered.spaces, found)
    if steered.normalized:
        lengths = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in gradients])  # no copy
        # of the chunk's sum over tokens, as subsets add it up: the mean times the tokens it is taken over
        whole = torch.linalg.vector_norm(lengths, dim=0) * batch.scored.to(lengths)
        # a chunk without a gradient keeps its zeros
        factor = whole.clamp_min(torch.finfo(whole.dtype).tiny).pow(-steered.normalized)[:, None]
        gradients = [each.mul_(factor) for each in gradients]
    return gradients, found.loss


def signals(
    steered: SteeredModel,
    batch: Batch,
    *,
    sampled: np.ndarray | None = None,
    with_inputs: bool = False,
    with_prediction: bool = False,
    averaged: bool = False,
) -> Signals:
    """Activations and loss gradients of a batch; see `gate_gradients` for the parameters.

    With ω the weights of scored tokens (paper, L_fid) and p_t the model's distribution at position t,

        loss_i = Σ_t ω_t / Σω · −log p_t(y_{t+1}),        −∂loss_i/∂o_t = ω_t / Σω · (onehot(y_{t+1}) − p_t).

    Labels y are the chunk's own, or with `sampled` drawn from the model, y ~ p: the second moment of the
    gradients is then the Fisher matrix.

    Parameters
    ----------
    with_inputs : bool           keep the first block's input although no space reads it
    with_prediction : bool       add up Σ_t p_t over scored positions
    averaged : bool              weigh tokens as on average over training (`average_residuals`)
    """
    model, spaces, layer = steered.model, steered.spaces, steered.layer
    # 1. The batch: ids (B, T), and ω / Σω (B, T), which makes of each row a mean over its scored tokens
    ids = batch.ids.to(model.device)
    scored = batch.scored.to(model.device)  # (B,)
    share = batch.weights.to(model.device) / scored.clamp_min(1)[:, None]

    # 2. Sites that spaces act at decide how far back gradients go: to the layer, to the first block with a
    # linear layer that is steered, or nowhere, where only logits are shifted
    residual = any(space.site == "residual" for space in spaces)
    logit_spaces = [space for space in spaces if space.site == "logit"]
    layers = steered.layer_space
    tracked = residual or layers is not None
    start = steered.first_block

    # 3. Forward: without a graph up to the first block that is steered, (B, T, d); with one from there on.
    # What linear layers inside read is kept as it is. What they give is not: a hook takes its gradient
    begin, inputs = steered.entry_states(ids, with_inputs=with_inputs)
    inner: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def catch(number: int, read: torch.Tensor, output: torch.Tensor) -> None:
        inner.append(read.detach())
        # zero for a layer whose output the model does not use: no memory is taken for it
        given.append(output.new_zeros(()).expand(output.shape))
        output.register_hook(partial(given.__setitem__, number))

    caught = model.at_layers(layers.which, ids.shape[1], catch) if layers else nullcontext()
    with torch.set_grad_enabled(tracked), caught, steered.products():
        if tracked:
            begin.requires_grad_(True)
        hidden = model.advance(begin, start, layer) if start < layer else begin  # (B, T, d) at the layer
        final = model.continue_from(hidden, layer)  # (B, T, d) before the head

    # 4. Through the head, a block of rows at a time (alg:microbatch): the loss, the gradients of spaces at
    # the logits, and −∂loss/∂final, from which step 5 goes on
    uniform = None if sampled is None else torch.from_numpy(sampled).to(model.device)
    before = None if batch.before is None else batch.before.to(model.device)
    prediction = torch.zeros(model.vocab_size, dtype=torch.float64, device=model.device)
    d_final = torch.zeros_like(final)  # (B, T, d)
    logit_parts: list[list[torch.Tensor]] = [[] for _ in logit_spaces]  # of each, (b, p) of every block
    loss_parts: list[torch.Tensor] = []  # (b,) float64 of every block
    for block in head_blocks(model, final, ids, share, tracked=tracked):
        rows, stretch = block.rows, block.stretch
        # logits of a block only: of all tokens at once they are larger than the model
        slope = model.cap_slope(block.values) if logit_spaces else None
        # y ~ p_t, (b, s): before the labels change what the block holds of p
        label = ids[rows, block.after] if uniform is None else block.draw(uniform[rows, block.after])
        if with_prediction:
            prediction += block.expected(scored[rows])
        with block.labelled(label) as found:  # error = ω (onehot − p), (b, s, V)
            loss_parts.append((found.surprise * block.weight).sum(dim=1))
            # tokens that were hard at first have taught more than their residual at the end says
            if averaged:
                known = 1.0 if before is None else before[rows, block.after].double()
                found.error.mul_(average_residuals(found.doubt, known)[..., None])
            # logit spaces act before the model's soft cap, where it has one: times its slope
            before_cap = found.error if slope is None else found.error * slope
            for space, parts in zip(logit_spaces, logit_parts, strict=True):
                given_inputs = None if inputs is None else inputs[rows, stretch]
                read = space.reads(block.state.detach(), given_inputs, ids[rows, stretch])
                parts.append(space.gate_gradient(read, before_cap))  # (b, p)
            if tracked:  # error pulled back through the head, (b, s, d)
                begun = seeded(block.raw, found.error.to(block.raw.dtype))
                (d_final[rows, stretch],) = torch.autograd.grad(begun, block.state)
    loss = torch.cat(loss_parts)  # (B,)
    check_finite(loss, batch)

    # 5. Backward through the blocks: −∂loss/∂ the stream at the layer, and −∂loss/∂ what each linear layer
    # gives. Rows do not mix: each row's is of its own loss
    pulls: list[torch.Tensor] = []
    if tracked:
        begun = seeded(final, d_final)
        sites = [hidden, begin]  # behind layers inside, and before them
        pulls = list(torch.autograd.grad(begun, sites, allow_unused=True, materialize_grads=True))

    # 6. What spaces contract, each as it acts at its site
    return Signals(
        hidden.detach(),
        final.detach(),
        pulls[0] if residual else None,
        [joined(parts) for parts in logit_parts],
        loss,
        inputs=inputs,
        inner=inner,
        given=given,
        prediction=prediction if with_prediction else None,
    )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join parts of rows; a single one stays as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def label_signals(steered: SteeredModel, batch: Batch) -> Iterator[tuple[Signals, torch.Tensor]]:
    """Yield a classifier's signals of a batch for each label, and the label's probability, (B, 1) float64.

    Instead of a label drawn from p, all of them, weighted: E_{c~p}[g gᵀ] = Σ_c p_c g_c g_cᵀ exactly.
    """
    # only the label differs: inputs are the row numbers in column 0
    for label in range(steered.model.vocab_size):
        ids = batch.ids.clone()
        ids[:, 1] = label
        found = signals(steered, Batch(batch.rows, ids, batch.weights))
        yield found, torch.exp(-found.loss)[:, None]  # p_c = exp(−loss) of one scored token


def assemble(spaces: Sequence[OperatorSpace], found: Signals) -> list[torch.Tensor]:
    """Contract signals to one gate gradient per space, in the order of the spaces."""
    logit = iter(found.logit)
    with torch.no_grad():
        return [next(logit) if space.site == "logit" else space.gradient_from(found) for space in spaces]


def gradient_products(
    steered: SteeredModel,
    queries: Sequence[torch.Tensor],
    chunks: ChunkReader,
    rows: np.ndarray | None = None,
    *,
    batch_tokens: int | None = None,
    advance: Callable[[float], None] | None = None,
) -> np.ndarray:
    """Multiply given vectors, such as queries' gate gradients, with those of chunks, space by space.

    Parameters
    ----------
    queries : one (Q, p) float32 a space, on the CPU
    chunks : ChunkReader
    rows : (t,) int64, optional     which chunks, distinct; default: all n
    batch_tokens : int, optional    padded tokens at once; default: what memory allows
    advance : callable, optional    told of so many chunks read, each time

    Returns
    -------
    ndarray (spaces, Q, t) float64      share_i g_x · g_i, each chunk as the fit weighs it: see
                                        `ChunkReader.share`

    Raises
    ------
    NumericalError      a loss is not finite
    """
    rows = np.arange(chunks.n_chunks) if rows is None else np.asarray(rows, np.int64)
    order = np.argsort(rows)
    ascending = rows[order]

    def place(some: np.ndarray) -> np.ndarray:
        """Find these in `rows`; a table of all n would be larger than what a query holds otherwise."""
        return order[np.searchsorted(ascending, some)]

    # batches come by length, so that padding is little; places are those of `rows`
    found = np.zeros((len(steered.spaces), len(queries[0]), len(rows)))
    moved = [query.to(steered.model.device) for query in queries]
    for batch, gradients in weighted_gradients(steered, chunks, rows, batch_tokens=batch_tokens):
        for number, (query, gradient) in enumerate(zip(moved, gradients, strict=True)):
            found[number][:, place(batch.rows)] = (query @ gradient.T).cpu().numpy()
        if advance is not None:
            advance(len(batch.rows))
    return found


def weighted_gradients(
    steered: SteeredModel, chunks: ChunkReader, rows: np.ndarray, *, batch_tokens: int | None = None
) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
    """Yield share_i g_i of chunks, batch by batch: one (B, p) float32 a space, on the model's device."""
    # two bounds of a batch: tokens in the forward pass, and chunks whose gradients are held together
    tokens, together = batch_tokens or steered.tokens_at_once, steered.chunks_at_once
    groups = (part for group in chunks.plan(tokens, rows) for part in chunks.small_groups(group, together))
    batches = map(chunks.batch, groups)
    for batch, gradients in ShrinkingBatches().each(batches, lambda part: chunk_gradients(steered, part)[0]):
        # in the unit of the mean chunk, as the fit weighs them
        share = chunks.share(batch).to(steered.model.device)
        yield batch, [gradient.mul_(share) for gradient in gradients]
