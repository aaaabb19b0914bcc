#!/usr/bin/env bash
# dattri's LDS is -1 for a perfect attributor where the target is a loss: the metric has no orientation of its own.
#
# Versions: dattri 0.3.0, torch 2.13.0.
# Behaviour: `lds` correlates summed scores with the retrained models' targets as they are. The library's own influences
# are above zero where a training example lowers the loss. The default target is the loss.
# Surprise: the two parts of one library, at their defaults, give a number below zero, the better the lower. A reader who
# ranks methods by it turns the table over, and one who takes absolute values cannot see an attributor of the wrong sign.
# Way round: negate the target, or give a target that rises (a logit, a margin) to both parts.
# Seen: "target is the loss: -0.99, target is the negated loss: 0.99"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 dattri==0.3.0
cd "$work"
TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from dattri.algorithm.influence_function import IFAttributorExplicit
from dattri.metric import lds
from dattri.task import AttributionTask
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
train, held, features, subsets = 200, 6, 5, 100
x = torch.randn(train + held, features)
y = x @ torch.randn(features) + torch.randn(train + held)
model = torch.nn.Linear(features, 1, bias=False)


def fitted(rows):
    return torch.linalg.lstsq(x[rows], y[rows, None]).solution


def loss(parameters, data):
    return ((functional_call(model, parameters, data[0])[..., 0] - data[1]) ** 2).mean()


rows = torch.stack([torch.randperm(train)[: train // 2] for _ in range(subsets)])
losses = torch.stack([((x[train:] @ fitted(each))[:, 0] - y[train:]) ** 2 for each in rows])
how = IFAttributorExplicit(AttributionTask(loss, model, {"weight": fitted(torch.arange(train)).T}))
data, asked = TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])
how.cache(DataLoader(data, batch_size=train))
scores = how.attribute(DataLoader(data, batch_size=train), DataLoader(asked, batch_size=held)).detach()
direct = lds(scores, (losses, rows))[0].mean().item()
negated = lds(scores, (-losses, rows))[0].mean().item()
print(f"target is the loss: {direct:.2f}, target is the negated loss: {negated:.2f}")
assert direct < -0.8 and abs(direct + negated) < 1e-6
PYTHON
