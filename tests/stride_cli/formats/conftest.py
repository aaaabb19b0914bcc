"""Answers made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stride_cli.report.conftest import make_record


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    return make_record
