"""Everything that is exported is what the corpus and the design were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.corpus import export
from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.readers import read_documents

from .test_build import small_index

RECORDS: list[dict[str, Any]] = [
    *({"id": f"d{n}", "text": "Paris is the capital of France " * (1 + n % 4)} for n in range(9)),
    {"id": "asked", "messages": [{"role": r, "content": "water boils"} for r in ("user", "assistant") * 2]},
]


@pytest.fixture
def source(write_jsonl: Callable[..., str]) -> str:
    return write_jsonl(RECORDS)


@pytest.fixture
def tokenizer(make_tokenizer: Any, chatml: str) -> Any:
    return make_tokenizer(chat_template=chatml)


@pytest.mark.parametrize("store_text", [True, False])
def test_records_say_what_the_corpus_and_the_design_are(
    tmp_path: Path, tokenizer: Any, source: str, store_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_BLOCK", 5)
    index = small_index([source], tokenizer, tmp_path / "x", seed=5, store_text=store_text)
    chunker = DocumentTokenizer(tokenizer, block_size=12)
    documents = list(read_documents([source]))
    pieces = [chunker.chunks(one) for one in chunker.encode_batch(documents)]
    written = list(export.document_records(index))
    assert [record["document"] for record in written] == [one.id for one in documents]
    assert [record["text"] for record in written] == [
        one.plain_text if store_text else None for one in documents
    ]
    assert [np.diff(record["chunks"])[0] for record in written] == [len(some) for some in pieces]

    chunks = list(export.chunk_records(index))
    expected = [(one.id, chunk) for one, some in zip(documents, pieces, strict=True) for chunk in some]
    assert len(chunks) == len(expected) == written[-1]["chunks"][1]
    for number, (record, (document, chunk)) in enumerate(zip(chunks, expected, strict=True)):
        assert (record["chunk"], record["document"]) == (number, document)
        assert record["tokens"] == chunk.tokens.tolist() and record["loss_start"] == chunk.loss_start
        mask = np.arange(len(chunk.tokens)) >= chunk.loss_start
        np.testing.assert_array_equal(
            record["loss_mask"], mask if chunk.loss_mask is None else chunk.loss_mask
        )

    design = np.zeros((index.n_subsets, index.n_chunks), bool)
    for record in chunks:
        assert record["subsets"] == sorted(set(record["subsets"])) and len(record["subsets"]) == 3
        design[record["subsets"], record["chunk"]] = True
    for record in export.subset_records(index):
        assert record["chunks"] == np.flatnonzero(design[record["subset"]]).tolist()
