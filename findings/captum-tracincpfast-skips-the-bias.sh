#!/usr/bin/env bash
# captum's TracInCPFast leaves out the bias of the last layer, so it is not TracInCP on that layer.
#
# Versions: captum 0.9.0, torch 2.13.0.
# Behaviour: the fast form multiplies (input · input) by (error · error), which is the weight's part of the gradient. The
# bias's part, (error · error) alone, is nowhere. `TracInCP(layers=[last])` has both.
# Surprise: the two are named as one method at two speeds, and a last layer has a bias by default. Pairs of examples whose
# features are orthogonal, and whose errors are not, get zero from one and a score from the other.
# Way round: a column of ones in the features and `bias=False`, or `TracInCP` with `layers`.
# Seen: "without bias 1e-07, with bias 6e-01, with the product of errors added 2e-07" (largest relative difference)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 captum==0.9.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from captum.influence import TracInCP, TracInCPFast
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))


def difference(bias):
    """Of the fast scores from the slow ones, as they are and with the errors' products added."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3, bias=bias))
    torch.save(model.state_dict(), "checkpoint.pt")

    def load(model, path):
        model.load_state_dict(torch.load(path))
        return 1.0

    settings = dict(
        train_dataset=TensorDataset(x[:16], y[:16]),
        checkpoints=["checkpoint.pt"],
        checkpoints_load_func=load,
        loss_fn=torch.nn.CrossEntropyLoss(reduction="sum"),
        batch_size=4,
    )
    asked = (x[16:], y[16:])
    fast = TracInCPFast(model, model[2], **settings).influence(asked)
    slow = TracInCP(model, layers=["2"], sample_wise_grads_per_batch=True, **settings).influence(asked)
    errors = torch.softmax(model(x), 1) - torch.nn.functional.one_hot(y, 3)
    return [((each - slow).abs().max() / slow.abs().max()).item() for each in (fast, fast + errors[16:] @ errors[:16].T)]


without, _ = difference(bias=False)
within, corrected = difference(bias=True)
print(f"without bias {without:.0e}, with bias {within:.0e}, with the product of errors added {corrected:.0e}")
assert without < 1e-5 and corrected < 1e-5 and within > 0.1
PYTHON
