"""What is shown of hits' chunks: the sentence that carries the influence, or the one most like the query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.recovery.ranking import Hit


def row_labels(workspace: Workspace, chunks: Sequence[int]) -> dict[int, str]:
    """Labels of a classifier's rows; none where the model is one of language."""
    names, index = workspace.model.classes, workspace.index
    if not names:
        return {}
    return {chunk: names[int(index.chunk_tokens(chunk)[1])] for chunk in dict.fromkeys(chunks)}


def carrying_passages(
    steered: SteeredModel,
    workspace: Workspace,
    query: Query,
    responses: Any,
    hits: Sequence[Hit],
    batch: Batch | None = None,
) -> dict[int, str]:
    """Sentences that carry the influence of hits' chunks, of those that have one; one pass over them.

    Parameters
    ----------
    steered : SteeredModel         of the index's own model, with its operators
    responses : (C K,) float64     as measured
    batch : Batch, optional        the query's; where it remembers its gradient, that is not taken again
    """
    import numpy as np

    from stride_cli.attribution.carriers import carried_by, direction_of, token_influence
    from stride_cli.data.batches import consecutive_groups

    model, index, reader = workspace.model, workspace.index, workspace.chunks
    own = responses[: steered.operators.n_subsets]  # of several models the index's own
    direction = direction_of(steered, query, own, batch)
    # long chunks with long ones: little of a batch is padding
    chunk_tokens = {hit.chunk: index.chunk_tokens(hit.chunk) for hit in hits}
    hits = sorted(hits, key=lambda hit: len(chunk_tokens[hit.chunk]))
    lengths, found = [len(chunk_tokens[hit.chunk]) for hit in hits], {}
    for group in consecutive_groups(lengths, max(1, steered.tokens_at_once // 2)):
        some = [hits[place] for place in group]
        chunks = reader.batch(np.array([hit.chunk for hit in some]))
        for hit, values in zip(some, token_influence(steered, direction, chunks), strict=True):
            tokens, supports = chunk_tokens[hit.chunk], hit.sign == "supports"
            carried = carried_by(model.tokenizer, tokens, values, supports=supports)
            if carried.passage:
                found[hit.chunk] = carried.passage
    return found


def likest_passages(
    workspace: Workspace, query: Query, chunks: Sequence[int], known: Collection[int] = ()
) -> dict[int, str]:
    """Of each chunk, but for those `known`, the sentence most like the query."""
    from stride_cli.recovery.passages import best_passage, rarity

    if all(chunk in known for chunk in chunks):
        return {}
    tokenizer, index = workspace.model.tokenizer, workspace.index
    texts = {
        chunk: str(tokenizer.decode(index.chunk_tokens(chunk), skip_special_tokens=True))
        for chunk in dict.fromkeys(chunks)
    }
    weights = rarity(texts.values())
    wanted = f"{query.prompt} {query.response}"
    return {chunk: best_passage(text, wanted, weights) for chunk, text in texts.items() if chunk not in known}
