"""Shared by all tests: a quiet environment, commands that start at once, and what is made once a session."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.prepared import Prepared

pytest_plugins = ["tests.tiny_models", "tests.tiny_chunks", "tests.trained_model"]

# processes side by side share the cores: torch's threads, and those of all commands that tests start. Threads
# that spin while they wait for one that has no core make minutes of seconds
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("STRIDE_NO_PROGRESS", "1")
# a fifth of what answers are held against after each stride train; tests of verdicts ask for all of them
os.environ.setdefault("STRIDE_TRAIN_NULLS", "40")

# how long an example takes is the machine's business
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# a shell that starts the tests in the background has them ignore Ctrl-C, and so would all that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# what pytest makes of our asserts is kept beside the files, as Python keeps bytecode, and so is the bytecode
# of the commands that tests start: to make it again takes each process longer than all of its imports
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# millions of objects are imported, and stay: there is nothing to collect among them, now or later
gc.disable()

# what takes longest goes first, so that neither of two processes ends long after the other; before all, one
# that needs the commands' trained workspace: one process makes that, and the other has work without it
_FIRST = (
    "commands/test_calibrate.py",
    "test_readme.py",
    "commands/test_examples.py",
    "test_notebook.py",
    "test_packaged_models.py",
    "test_truth.py",
    "commands/test_sharing.py",
    "test_installation.py",
    "test_records.py",
    "test_parallel.py",
    "test_one_pipeline.py",
    "test_house.py",
    "recovery/test_benchmark.py",
    "recovery/test_compilation.py",
    "tuning/test_tune.py",
)


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands remember of this machine is kept with what tests keep, and not among the user's own; what
    the process beside remembers is elsewhere, as it makes the same models at other places."""
    cache = getattr(pytestconfig, "cache", None)
    name = f"state-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    place = tmp_path_factory.mktemp("state") if cache is None else cache.mkdir(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """fsync is most of the time of much that writes, and only a power failure could tell what it is good for.
    Processes that start from nothing do sync; those of `prepared` do not either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `_FIRST`, then as collected."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((number for number, name in enumerate(_FIRST) if path.endswith(name)), len(_FIRST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Everything is imported: what a test makes is collected from here on, and only that."""
    gc.freeze()
    gc.enable()


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    from stride_cli.schema import json_schema, records

    assert name in records(), f"a record calls itself {name}, which stride_cli.schema does not list"
    return Draft202012Validator(json_schema(name))


@pytest.fixture(autouse=True, scope="session")
def records_keep_to_their_schema() -> Iterator[None]:
    """Every record that a test makes a command write is what `stride schema` says it is."""
    from stride_cli import output

    written: Callable[[Mapping[str, Any]], None] = output.emit

    def checked(record: Mapping[str, Any]) -> None:
        if "$schema" not in record:  # a schema itself, of `stride schema`
            assert "schema" in record, f"a record without a schema: {sorted(record)}"
            _validator(record["schema"]).validate(json.loads(output.to_json(record)))
        written(record)

    output.emit = checked
    yield
    output.emit = written


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """Starts commands that need not import torch again; see tests/prepared.py."""
    made = Prepared(tmp_path_factory.mktemp("tools"))
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """(size) → a filesystem of that size at `tmp_path / "small"`; asked again, the same has the new size."""
    disk = tmp_path / "small"

    def sized(size: str) -> Path:
        if disk.exists():
            subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
            return disk
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"may not mount a tmpfs: {error}")
        return disk

    yield sized
    if disk.is_mount():  # files of it may still be mapped
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of several local workers is done in this process, one task after the other."""
    from stride_cli import parallel

    monkeypatch.setattr(parallel, "_Processes", lambda *given: None)


@pytest.fixture
def living_workers() -> Callable[[], list[int]]:
    """() → the workers that this process has."""
    return lambda: [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@pytest.fixture(scope="session")
def kept_home(pytestconfig: pytest.Config) -> Path:
    """Where `tests.kept.kept` keeps things: in pytest's own cache, which --cache-clear empties."""
    return pytestconfig.cache.mkdir("kept")
