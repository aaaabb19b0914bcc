"""Defaults that go by how the model was trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stride_cli.models.language import language_recipe
from stride_cli.operators.options import ClosedOptions, resolve_settings


@pytest.mark.parametrize(
    ("base", "steps", "given", "expected"),
    [
        ("before", 38, None, 0.1 * (128 / 38) ** 3),
        ("before", 128, None, 0.1),
        ("before", 5000, None, 0.1),
        ("before", 1, None, 10.0),
        ("before", 38, 0.3, 0.3),
        (None, 38, None, 0.1),
    ],
)
def test_a_short_fine_tuning_is_damped_more(
    base: str | None,
    steps: int,
    given: float | None,
    expected: float,
    task_and_queries: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_and_queries[0]
    recipe = SimpleNamespace(base=base, steps=steps)
    monkeypatch.setattr(language_recipe, "read_recipe", lambda path: recipe)
    settings = resolve_settings(ClosedOptions(damping=given), task.model, task.index)
    assert settings.damping == pytest.approx(expected)
