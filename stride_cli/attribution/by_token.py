"""Influences of documents on each scored token of a response, which add up to those on all.

A response's loss is the weighted mean of its tokens' losses, and gate gradients are linear in the loss. So
is what is read of a chunk from its own gradient (`direct.exact_products`):

    w_i(response) = Σ_t c_t w_i(token t) / Σ_t c_t

with c_t how much a token counts. What the Lasso recovers is not linear in this way, nor are shrunk
influences: rows are of the chunks' own gradients alone, by the index's own model, whatever the answer was
found by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.session import Session
    from stride_cli.data.batches import Batch

_FEWEST, _EACH = 24, 3  # chunks to read at least; further ones that each token by itself makes likely
_VALUES = 1 << 26  # numbers of all tokens and all chunks, beyond which no token has further ones of its own


@dataclass(frozen=True)
class TokenInfluences:
    """Influences of documents on each scored token of a response.

    Attributes
    ----------
    positions : (S,) int64          places of the scored tokens in the query's ids
    documents : (D,) int64          of the chunks that were read: the answer's hits, then by |influence|
    values : (S, D) float64         a token's part of the influence on the whole response, summed over the
                                    document's chunks that were read; the sum over tokens is `whole`
    whole : (D,) float64            influence on the whole response, read in the same way by itself
    chunks : (t,) int64             that were read, ascending
    strongest : (D,) int64          of each document, the chunk of these that moves the response most
    losses : (S,) float64           of the tokens, nats
    """

    positions: np.ndarray
    documents: np.ndarray
    values: np.ndarray
    whole: np.ndarray
    chunks: np.ndarray
    strongest: np.ndarray
    losses: np.ndarray


def token_influences(session: Session, answer: Answer) -> TokenInfluences:
    """Influences on each scored token of an answer; one pass over a few chunks, as reading them takes.

    Parameters
    ----------
    session : Session          that gave the answer
    answer : Answer

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to (`direct_scale`), or
                    the index is of a classifier, whose response is one token, or the answer is a comparison
                    or of several prompts
    """
    from stride_cli.attribution.direct import exact_products, influence_unit
    from stride_cli.operators.linear_response import gradients_with_loss

    if session.model.classes or answer.query.parts:
        raise UsageError(
            "a class, a comparison and several prompts together have no tokens: there is nothing to divide",
            fix="ask a language model about one response by itself",
        )
    steered, workspace = session.steered[0], session.workspace
    # or an error, before anything is measured
    unit = influence_unit(steered.operators, workspace, np.atleast_2d(session.designs.row_sizes)[0])
    batch, positions = _by_token(answer)
    losses = gradients_with_loss(steered, batch)[1]
    chunks = _chunks(session, answer, batch)
    found = unit * exact_products(steered, [batch], workspace.chunks, chunks)
    counts = answer.query.weights[positions]
    rows, whole = found[:-1] * (counts / counts.sum())[:, None], found[-1]
    documents, owner = np.unique(session.chunk_document[chunks], return_inverse=True)
    values, total = np.zeros((len(documents), len(positions))), np.zeros(len(documents))
    np.add.at(values, owner, rows.T)
    np.add.at(total, owner, whole)
    shown = [hit.document for hit in (*answer.supporters, *answer.opposers)]
    others = documents[np.argsort(-np.abs(total), kind="stable")].tolist()
    order = np.searchsorted(documents, list(dict.fromkeys([*shown, *others])))
    by_strength = np.lexsort((-np.abs(whole), owner))  # each document's chunks together, the strongest first
    strongest = chunks[by_strength][np.searchsorted(owner[by_strength], order)]
    return TokenInfluences(
        positions, documents[order], values[order].T, total[order], chunks, strongest, losses[:-1].copy()
    )


def _by_token(answer: Answer) -> tuple[Batch, np.ndarray]:
    """A row for each scored token, which alone is scored in it, and one for them all; the tokens' places."""
    from stride_cli.data.batches import RememberingBatch, pad_batch

    query = answer.query
    positions = np.flatnonzero(query.weights[1:]) + 1
    weights = np.zeros((len(positions) + 1, len(query.ids)), np.float32)
    weights[np.arange(len(positions)), positions] = 1.0
    weights[-1] = query.weights
    batch = pad_batch(np.arange(len(weights)), [query.ids] * len(weights), list(weights))
    return RememberingBatch.of(batch), positions


def _chunks(session: Session, answer: Answer, batch: Batch) -> np.ndarray:
    """The chunks to read, ascending: the hits', the strongest others, and the likeliest of each token."""
    from stride_cli.attribution.defaults import default_reads
    from stride_cli.attribution.direct import Exact
    from stride_cli.attribution.estimates import Estimate
    from stride_cli.data.query_set import QuerySet

    workspace = session.workspace
    wanted = list(dict.fromkeys(hit.chunk for hit in (*answer.supporters, *answer.opposers)))
    most = max(_FEWEST, len(wanted), default_reads(workspace))
    strongest = np.argsort(-np.abs(answer.solution.values), kind="stable")[:most]
    by_answer = answer.solution.indices[strongest].tolist()
    tokens, by_token = len(batch.ids) - 1, []
    if tokens * workspace.n_chunks <= _VALUES and answer.estimated:
        ids, weights = batch.ids[:tokens].numpy(), batch.weights[:tokens].numpy()
        queries = QuerySet(list(ids), list(weights), [str(number) for number in range(tokens)])
        found = Estimate.of(session.steered[0], queries, [batch], workspace)
        none = Exact(np.empty(0, np.int64), np.empty(0), 1.0, 0.0)
        values = np.stack([each.given(none).prior.means for each in found])
        by_token = np.argsort(-values, axis=1, kind="stable")[:, :_EACH].T.flatten().tolist()
    # half of the room for what the whole answer is about, the other for single tokens, then what is left
    room = (most - len(wanted)) // 2
    chosen = list(dict.fromkeys([*wanted, *by_answer[:room], *by_token[: most - room], *by_answer]))[:most]
    return np.unique(np.array(chosen, np.int64))
