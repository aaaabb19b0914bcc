from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.same_fit import contents


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """The module sample_build.py beside this file."""
    spec = importlib.util.spec_from_file_location("sample_build", Path(__file__).with_name("sample_build.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[1 << 20, 256], ids=["one file", "several files"])
def index_path(request: pytest.FixtureRequest, tmp_path: Path, sample: ModuleType) -> Path:
    """A whole small index with operators: every array in one file, or in several."""
    path = tmp_path / "run.stride"
    sample.build(path, shard_bytes=request.param)
    sample.add_operators(path)
    return path


@pytest.fixture(scope="session")
def read_tree():
    return contents
