"""`stride train` killed at random moments, and on a full disk: nothing lost, the same bits in the end."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.prepared import Prepared
from tests.same_fit import assert_same_fit

pytestmark = pytest.mark.slow

# without the prompts that are asked once a fit is whole
FITS = {
    "closed": "--fit closed --project 48 --save-seconds 0 --no-calibration",
    "sgd": "--fit sgd --steps 25 --save-seconds 0",
}


def bare(workspace: Path, target: Path) -> Path:
    """A copy of the built index without its operators."""
    return Path(shutil.copytree(workspace / "run.stride", target, ignore=shutil.ignore_patterns("operators")))


@pytest.mark.parametrize("fit", FITS)
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    run, workspace: Path, tmp_path: Path, fit: str, prepared: Prepared
) -> None:
    whole = bare(workspace, tmp_path / "whole.stride")
    assert run(f"train --index {whole} {FITS[fit]}").code == 0
    killed = bare(workspace, tmp_path / "killed.stride")
    command = ["stride", "train", "--index", str(killed), *FITS[fit].split()]
    moments = random.Random(fit)
    kills = 0
    while kills < 6 and not (killed / "operators").exists():
        process = prepared.start(command)
        # from the moment the fit has begun: importing torch is not what is tested
        while process.poll() is None and not (killed / "operators.partial").exists():
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1.2))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if not (killed / "operators").exists():
            # a half-finished fit never looks whole
            result = run(f'query "x" --index {killed}')
            assert result.code == 2 and "stride train" in result.err
    assert kills > 0
    if not (killed / "operators").exists():
        assert run(f"train --index {killed} {FITS[fit]}").code == 0
    assert_same_fit(killed / "operators", whole / "operators")
    assert not (killed / "operators.partial").exists()
    assert run(f"index verify {killed}").code == 0


def test_a_full_disk_is_named_and_the_fit_goes_on_later(run, workspace: Path, small_disk) -> None:
    size = sum(file.stat().st_size for file in (workspace / "run.stride").rglob("*") if file.is_file())
    index = bare(workspace, small_disk(str(size // 2)) / "run.stride")
    result = run(f"train --index {index} --save-seconds 0")  # looked at before it begins
    assert result.code == 2 and "needs about" in result.err and "fix: free some space" in result.err
    assert not (index / "operators.partial").exists()
    small_disk(str(size * 2))  # too small for the state that it saves
    result = run(f"train --index {index} --save-seconds 0")
    assert result.code == 2 and "fix: free some space" in result.err and not (index / "operators").exists()
    assert run(f"index verify {index}").code in (0, 1)  # 1: the unfinished fit is named as extra
    small_disk(str(size * 80))
    assert run(f"train --index {index} --save-seconds 0").code == 0
    assert run(f"index verify {index}").code == 0
    assert_same_fit(index / "operators", workspace / "run.stride" / "operators")
