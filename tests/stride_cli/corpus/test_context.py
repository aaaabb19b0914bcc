from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stride_cli.corpus.context import context_length
from stride_cli.errors import ModelError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "max_position_embeddings": 77}, 77),
        ({"model_type": "gpt2", "n_positions": 33}, 33),
        ({"model_type": "qwen2", "max_position_embeddings": 99}, 99),
    ],
)
def test_the_context_of_a_checkpoint(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == expected
    assert context_length(str(tmp_path)) == expected


@pytest.mark.parametrize("data", ["{", "{}", '{"model_type": "none such"}'])
def test_a_configuration_that_cannot_be_read(data: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(data)
    with pytest.raises(ModelError, match=r"configuration of .* cannot be read") as error:
        context_length(tmp_path)
    assert error.value.fix
