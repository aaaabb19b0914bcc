"""The collector's rest, and where compiled kernels are kept."""

from __future__ import annotations

import importlib
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import stride_cli
from stride_cli import startup


@pytest.fixture
def fresh_kernel_cache() -> Iterator[None]:
    """Where kernels go is found out once a process; here, again."""
    startup.kernel_cache.cache_clear()
    yield
    startup.kernel_cache.cache_clear()


@pytest.mark.usefixtures("fresh_kernel_cache")
def test_kernels_are_kept_in_the_users_cache_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One for each version, Python, numba and processor; never beside the source."""
    import numba
    from llvmlite import binding

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: str(tmp_path / name))
    found = startup.kernel_cache()
    assert found is not None and found.is_dir() and found.parent == tmp_path / "stride" / "kernels"
    for part in (stride_cli.__version__, numba.__version__, "python3.", binding.get_host_cpu_name()):
        assert part in found.name
    before = numba.config.CACHE_DIR
    kernel = startup.compiled(_twice)
    # other people's kernels stay where they were
    assert kernel(21) == 42
    assert before == numba.config.CACHE_DIR
    assert list(found.rglob("*.nbi")) and kernel.stats.cache_path.startswith(str(found))
    assert not list(Path(__file__).parent.glob("__pycache__/*_twice*"))


def _twice(value):
    return 2 * value


@pytest.mark.usefixtures("fresh_kernel_cache")
def test_kernels_of_an_account_without_a_home_are_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under the temporary directory, which all share: not in one that somebody else may write to."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: f"~/.cache/{name}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = startup.kernel_cache()
    assert found is not None and found.is_relative_to(tmp_path)
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    shutil.rmtree(found.parent)
    (tmp_path / "theirs").mkdir()
    found.parent.symlink_to(tmp_path / "theirs")
    startup.kernel_cache.cache_clear()
    assert startup.kernel_cache() is None
    kernel = startup.compiled(_twice)
    assert kernel(21) == 42 and not list(tmp_path.rglob("*.nbi"))


@pytest.mark.usefixtures("fresh_kernel_cache")
def test_what_is_the_same_is_compiled_once_wherever_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a kernel calls is a part of it, though it stands in another file, and so are numbers."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    head = "from stride_cli.startup import compiled\n"

    def installed(place: str, factor: int, size: int = 1) -> tuple[int, int, int]:
        """What its outer kernel gives of 1, and how many were compiled and loaded."""
        directory = tmp_path / place / "scaling"
        directory.mkdir(parents=True)
        (directory / "__init__.py").touch()
        inner = f"{head}@compiled\ndef scaled(value):\n    return {factor} * value\n"
        outer = f"from scaling import inner\nfrom scaling.sizes import SIZE\n{head}@compiled\n"
        outer += "def twice(value):\n    return 2 * SIZE * inner.scaled(value)\n"
        for name, text in (("inner", inner), ("outer", outer), ("sizes", f"SIZE = {size}\n")):
            (directory / f"{name}.py").write_text(text, encoding="utf-8")
        for name in [name for name in sys.modules if name.partition(".")[0] == "scaling"]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(directory.parent)
            kernel = importlib.import_module("scaling.outer").twice
            value = kernel(1)
        return value, sum(kernel.stats.cache_misses.values()), sum(kernel.stats.cache_hits.values())

    assert installed("one", 3) == (6, 1, 0)
    assert installed("two", 3) == (6, 0, 1)
    assert installed("three", 5) == (10, 1, 0)
    assert installed("four", 3, size=7) == (42, 1, 0)
