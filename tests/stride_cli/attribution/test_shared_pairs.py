"""Shared pairs of tokens against a count by hand, over chunks of any length and any scored part."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution import shared_pairs as module
from stride_cli.data.query_set import QuerySet
from stride_cli.research.methods.lexical import shared_pairs

V = 5
sequence = st.lists(st.integers(0, V - 1), max_size=12)


def pairs_of(ids, scored):
    return [(x, y) for x, y, counts in zip(ids, ids[1:], scored[1:], strict=False) if counts]


@given(
    corpus=st.lists(st.tuples(sequence, st.integers(0, 4), st.integers(0, 2**12 - 1)), max_size=8),
    masked=st.booleans(),
    asked=st.lists(st.lists(st.integers(0, V - 1), min_size=2, max_size=9), min_size=1, max_size=3),
    block=st.integers(1, 40),
)
@settings(deadline=None)
def test_they_are_counted_within_chunks_and_where_scored(corpus, masked, asked, block) -> None:
    lengths = [len(ids) for ids, _, _ in corpus]
    masks = [[bits >> place & 1 for place in range(len(ids))] for ids, _, bits in corpus]
    tokens = np.array([token for ids, _, _ in corpus for token in ids], np.uint16)
    chunks = SimpleNamespace(
        span=lambda start, stop: tokens[start:stop],
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64),
        loss_start=np.array([start for _, start, _ in corpus], np.uint32),
        loss_mask=np.array([bit for mask in masks for bit in mask], np.uint8) if masked else None,
        n_chunks=len(corpus),
    )
    weights = [np.ones(len(ids), np.float32) for ids in asked]
    queries = QuerySet(asked, weights, [str(number) for number in range(len(asked))])

    held = []
    for (ids, start, _), mask in zip(corpus, masks, strict=True):
        scored = [place >= max(1, start) and (not masked or mask[place]) for place in range(len(ids))]
        held.append(pairs_of(ids, scored))
    total = [pair for pairs in held for pair in pairs]
    expected = np.zeros((len(asked), len(corpus)))
    for number, ids in enumerate(asked):
        for pair in pairs_of(ids, [True] * len(ids)):
            for row, pairs in enumerate(held):
                if pair in pairs:
                    expected[number, row] += pairs.count(pair) / (total.count(pair) + 1)
    with patch.object(module, "_TOKENS", block):
        found = shared_pairs(queries, chunks, V)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)
