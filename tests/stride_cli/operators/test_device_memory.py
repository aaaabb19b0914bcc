"""How many tokens go through a model at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stride_cli.operators.device_memory import tokens_at_once
from stride_cli.operators.spaces import space_classes


def test_tokens_at_once() -> None:
    """A small model: as many as ever. SmolLM2-135M: what 2 GB hold of its activations, more where fewer
    blocks are differentiated, all where only logits are steered."""

    def model(layers: int, width: int) -> Any:
        return SimpleNamespace(n_layers=layers, d_model=width, device=torch.device("cpu"))

    default = space_classes(("mlp-matrix", "logit", "token-logit"))
    assert tokens_at_once(model(4, 128), default, 3) == 4096
    large = model(30, 576)
    inside = tokens_at_once(large, space_classes(("linear-matrix", "logit")), 20)
    assert 400 < inside < tokens_at_once(large, default, 20) < 1000
    residual = tokens_at_once(large, space_classes(("residual-matrix", "logit")), 20)
    assert residual > 3 * inside
    assert tokens_at_once(large, space_classes(("logit", "token-logit")), 20) == 4096
