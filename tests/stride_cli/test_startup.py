"""The collector's rest, and where compiled kernels are kept."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from stride_cli import startup


def test_the_collector_is_on_again_afterwards_whatever_happens() -> None:
    with pytest.raises(ValueError), startup.without_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with startup.without_collection():
            pass
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()


def test_what_was_imported_is_kept_only_in_a_process_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(startup.gc, "freeze", lambda: calls.append(1))
    monkeypatch.setattr(startup, "_own_process", False)
    startup.keep_imported()
    assert not calls
    startup.own_process()
    startup.keep_imported()
    assert calls == [1]


@pytest.mark.parametrize(
    "source, home, chosen", [(True, True, False), (False, True, False), (False, False, True)]
)
def test_kernels_have_a_place_where_nothing_else_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: bool, home: bool, chosen: bool
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "kept")
    startup.choose_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == "kept"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    allowed = {Path(startup.__file__).parent: source, tmp_path: home}
    monkeypatch.setattr(startup, "_writable", allowed.__getitem__)
    startup.choose_kernel_cache()
    assert ("NUMBA_CACHE_DIR" in os.environ) == chosen
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # so that what was chosen does not outlive the test


@pytest.mark.parametrize("given, found", [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # restored afterwards
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    startup.share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == found
