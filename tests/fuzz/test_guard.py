"""What `tests.fuzz.targets.options` refuses to commands: to write, move or remove outside their directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.targets import options

DOES: dict[str, Callable[[Path], object]] = {
    "write": lambda place: place.write_text("x"),
    "append": lambda place: os.close(os.open(place, os.O_APPEND | os.O_WRONLY)),
    "directory": lambda place: (place.parent / "made").mkdir(),
    "remove": lambda place: place.unlink(),
    "move": lambda place: place.rename(place.with_name("moved")),
    "tree": lambda place: shutil.rmtree(place.parent),
    "link": lambda place: (place.parent / "link").symlink_to(place),
    "temporary": lambda place: tempfile.NamedTemporaryFile(dir=place.parent),  # noqa: SIM115
}


@pytest.mark.parametrize("what", DOES)
def test_nothing_is_written_outside(tmp_path: Path, what: str) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    for folder in (home / "a", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("kept")
    (home / "way").symlink_to(outside)
    guard = options._guard
    ways = [outside / "file", home / "a" / ".." / ".." / "outside" / "file"]
    ways += [home / "way" / "file"] if what != "tree" else []  # which goes through no link
    for place in ways:
        with guard.within(home), pytest.raises(options.Escaped):
            DOES[what](place)
        assert guard.refused and os.listdir(outside) == ["file"]  # noqa: PTH208
    with guard.within(home):
        DOES[what](home / "a" / "file")
        assert (outside / "file").read_text() == "kept"
    assert not guard.refused


def test_no_command_is_run(tmp_path: Path) -> None:
    with options._guard.within(tmp_path), pytest.raises(options.Escaped):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    subprocess.run([sys.executable, "-c", "pass"], check=True)
