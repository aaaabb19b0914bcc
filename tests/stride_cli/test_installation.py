"""What pip installs, pip can remove, whatever has run in between: nothing stays to hide the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED_FROM = ("pyproject.toml", "README.md", "LICENSE", "stride_cli", "index_format")
ROOMS = ("operators.gate_kernels", "operators.fit_kernels")
# compiles kernels of recovery, and of the rooms that are named
RUN = """
import importlib, sys, numpy as np
from stride_cli.recovery import kernels
for room in sys.argv[1:]:
    importlib.import_module(f"stride_cli.{room}")
kernels.keep_largest_kernel(np.arange(9), np.arange(9.0), 9, 3, True)
print(kernels.keep_largest_kernel.stats.cache_path)
"""


class Environment:
    """A virtual environment of its own, with this one's packages behind its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder / "env", folder / "env" / "bin" / "python"
        self.away = folder / "elsewhere"
        self.away.mkdir()
        self.cache = folder / "cache"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        (self.site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.before = self.files()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}

    def pip(self, *arguments: str) -> None:
        done = subprocess.run(
            [self.python, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments],
            cwd=self.away,
            env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def install(self, *source: str) -> None:
        self.pip("install", "--no-deps", "--no-build-isolation", *source)

    def run(self, *command: str) -> str:
        """What a command says, run in another directory, kernels kept in a cache of its own."""
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": ""}
        environment.pop("NUMBA_CACHE_DIR", None)
        done = subprocess.run(command, cwd=self.away, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout

    def check(self, root: Path, *rooms: str) -> None:
        """The command answers, and its kernels, the rooms' too, are kept outside of the environment."""
        assert self.run(str(self.folder / "bin/stride"), "--version").startswith("stride ")
        assert self.run(str(self.folder / "bin/stride"), "--help")
        where = "import stride_cli, index_format; print(stride_cli.__file__, index_format.__file__)"
        for found in self.run(str(self.python), "-c", where).split():
            assert Path(found).is_relative_to(root)
        assert Path(self.run(str(self.python), "-c", RUN, *rooms).strip()).is_relative_to(self.cache)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what is installed from: building writes beside it."""
    copy = tmp_path / "source"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *INSTALLED_FROM],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="paths of a POSIX environment")
def test_installed_run_and_removed_nothing_is_left(tmp_path: Path, source: Path) -> None:
    there = Environment(tmp_path)
    there.install(str(source))
    there.check(there.folder, *ROOMS)
    # a newer version over it
    version = source / "stride_cli" / "version.py"
    version.write_text(version.read_text().replace('__version__ = "', '__version__ = "9.'))
    there.install(str(source))
    there.check(there.folder)
    assert there.run(str(there.folder / "bin/stride"), "--version").startswith("stride 9.")
    # an editable one over that, as README's second command is run after the first
    there.install("-e", str(source))
    there.check(source)
    there.pip("uninstall", "-y", "stride-attribution")
    assert there.files() == there.before
    kept = {path.name.partition("-")[0] for path in (there.cache / "stride" / "kernels").iterdir()}
    assert len(kept) == 2 and any(version.startswith("9.") for version in kept)  # versions do not share
