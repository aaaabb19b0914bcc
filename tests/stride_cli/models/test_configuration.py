from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stride_cli.corpus.gate_budget import inside_gates
from stride_cli.corpus.options import DesignOptions
from stride_cli.corpus.plan import choose_design
from stride_cli.models.configuration import context_length, subsets_bound


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


def test_a_language_model_has_few_subsets_by_default(tmp_path: Path) -> None:
    """A small one that is fine-tuned has more, a large one fewer."""

    def bound(layers: int, width: int, *, finetuned: bool = True) -> int:
        config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "vocab_size": 100}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return subsets_bound(tmp_path, finetuned=finetuned)

    assert (bound(30, 576), bound(4, 128, finetuned=False), bound(4, 128)) == (32, 64, 1000)
    assert choose_design(480, most=64) == choose_design(100_000, most=64) == (64, 10)
    assert choose_design(480) == (480, 10)
    assert choose_design(480, DesignOptions(n_subsets=300), 64) == (300, 10)
    # operators of so many subsets have the gates that are wanted
    assert inside_gates(64, finetuned=True) == 1 << 20
