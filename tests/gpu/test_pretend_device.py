"""Nothing of the fit, the query and the reading mixes a device with the CPU: checked without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.prepared import Prepared

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no private device with Python behind it (2.9 has none, 2.13 and 2.15 have)",
)

PATHS = Path(__file__).with_name("device_paths.py")

# what it refuses, and what CUDA takes too
REFUSES = """
import torch
from tests.gpu import pretend_device

here, there = torch.ones(3), torch.ones(3).to("pretend")
for mix in (
    lambda: there + here,
    lambda: there[torch.tensor([0, 2])],
    lambda: there.numpy(),
    lambda: torch.zeros(3).index_add_(0, torch.arange(3), there),
    lambda: torch.zeros(3, device="pretend").index_copy_(0, torch.arange(3), there),
    lambda: torch.cat([here, there]),
):
    try:
        mix()
    except (RuntimeError, TypeError):
        continue
    raise SystemExit("it was taken")
assert float((there * torch.tensor(2.0)).sum()) == 6.0
there.copy_(here)
with torch.device("meta"):
    assert torch.tensor([1]).device.type == "meta"
leaf = torch.ones(2, device="pretend").requires_grad_()
(leaf.exp().sum() * 2).backward()
assert leaf.grad.device.type == "pretend" and abs(float(leaf.grad[0]) - 5.43656) < 1e-4
"""


def test_it_refuses_to_mix(prepared: Prepared) -> None:
    done = prepared.run(["-c", REFUSES], cwd=PATHS.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # every path twice, through Python at each operator
def test_every_path_stays_on_the_device(prepared: Prepared) -> None:
    # as another device rounds: what is compared is not a matter of the last digits
    done = prepared.run([str(PATHS), "pretend", "--rounding", "1e-6"], cwd=PATHS.parents[2])
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(records) == 9, [record for record in records if not record["ok"]]
