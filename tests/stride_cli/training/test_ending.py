"""Whether a corpus has taught a model more than itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stride_cli.training.ending import Ending, pairs_alone

DEMO = Path(__file__).parents[3] / "stride_cli" / "demo" / "corpus.jsonl"


def test_pairs_that_stand_in_one_chunk_only_are_counted_as_often_as_they_stand() -> None:
    chunks = [np.array(tokens) for tokens in ([1, 2, 3, 1, 2], [2, 3, 4], [5], [5, 6, 5, 6])]
    # (1,2) twice, (3,1), (3,4), (5,6) twice, (6,5) alone; (2,3) in two
    assert pairs_alone(chunks) == 7 / 9
    assert pairs_alone([np.array([3])]) == 1


@pytest.mark.parametrize("documents, recites", [(5, True), (60, False), (400, False)])
def test_few_documents_are_recited_and_many_are_not(documents: int, recites: bool) -> None:
    """By the demo's first documents; models trained on them speak accordingly (see `ending`)."""
    import json

    from stride_cli.models.language.bpe import train_bpe
    from stride_cli.models.language.nanochat import choose_architecture

    texts = [json.loads(line)["text"] for line in DEMO.read_text("utf-8").splitlines()[:documents]]
    vocab = choose_architecture(sum(len(text.encode()) for text in texts)).vocab
    tokenizer = train_bpe(texts, vocab_size=vocab, context_length=512)
    alone = pairs_alone([np.array(tokenizer(text)["input_ids"]) for text in texts])
    ending = Ending([], alone=alone, loss=0.05, entropy=5.2)
    assert (ending.warning() is not None) is recites
    assert "has not learnt" in str(replace(ending, loss=3.0).warning())
