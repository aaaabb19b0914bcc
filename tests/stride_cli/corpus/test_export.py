"""Everything that is exported is what the index holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.corpus import summary as export

from .test_build import small_index, some_records


@pytest.mark.parametrize("store_text", [True, False])
def test_records_are_the_arrays_of_the_index(
    tmp_path: Path, make_tokenizer: Any, chatml: str, write_jsonl: Callable[..., str], store_text: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(export, "_BLOCK", 5)
    records = some_records(12)
    index = small_index(
        [write_jsonl(records)], make_tokenizer(chat_template=chatml), tmp_path / "x", store_text=store_text
    )
    written = list(export.document_records(index))
    assert [record["document"] for record in written] == [record["id"] for record in records]
    assert [record["text"] for record in written[:8]] == [
        record["text"] if store_text else None for record in records[:8]
    ]
    assert [record["chunks"][0] for record in written[1:]] == [record["chunks"][1] for record in written[:-1]]
    chunks = list(export.chunk_records(index))
    assert [record["chunk"] for record in chunks] == list(range(index.n_chunks))
    tokens = [token for record in chunks for token in record["tokens"]]
    assert tokens == np.asarray(index.array("corpus/tokens")).tolist()
    masks = [bit for record in chunks for bit in record["loss_mask"] or ()]
    assert masks == np.asarray(index.array("corpus/loss_mask")).tolist()
    columns = np.sort(np.asarray(index.array("design/columns")), axis=1)
    assert [record["subsets"] for record in chunks] == columns.tolist()
    assert [chunks[record["chunks"][0]]["document"] for record in written] == [r["id"] for r in records]
    for record in export.subset_records(index):
        assert record["chunks"] == np.flatnonzero((columns == record["subset"]).any(axis=1)).tolist()
