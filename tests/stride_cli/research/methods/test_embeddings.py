"""Embeddings with the encoder that a package carries."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from stride_cli.errors import UsageError
from stride_cli.research.methods import vectors
from stride_cli.research.methods.embeddings import Embeddings, load_encoder, packaged_encoder
from tests.stride_cli.research.methods.gradients.scored import score_all


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(packaged_encoder(), device="cpu")


def test_cosine_of_the_encoders_embeddings(encoder, task, make_queries, sentences, monkeypatch) -> None:
    monkeypatch.setattr(vectors, "TEXT_BLOCK", 20)  # several blocks of chunks
    method = Embeddings()
    method.fit(task)
    expected = encoder.encode(sentences[:3], normalize_embeddings=True) @ (
        encoder.encode(sentences, normalize_embeddings=True).T
    )
    found = score_all(method, make_queries(sentences[:3]))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.argmax(1).tolist() == [0, 1, 2]
    assert method.bytes_per_chunk == 4 * 384


def test_without_a_checkpoint_the_error_says_how_to_give_one(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        packaged_encoder()
    assert "embeddings:model=PATH" in (caught.value.fix or "")
