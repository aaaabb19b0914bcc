#!/usr/bin/env bash
# dattri's self-influences are the sum over all examples, the same for each, where a loader gives one example at a time.
#
# Versions: dattri 0.3.0, torch 2.13.0.
# Behaviour: `self_attribute` of the influence functions adds each batch's values to the whole vector. With one batch the
# result is right. With batches of one, the single value is broadcast, and every example ends with the sum.
# Surprise: nothing is raised there. (Other batch sizes raise, since the shapes differ.) Batches of one are what a model
# with little memory is run with, and a mislabelled example cannot be told from any other by the result.
# Way round: the diagonal of `attribute`, or one batch.
# Seen: "one batch 0.19 26.69 2.89 18.50, batches of one 138.59 138.59 138.59 138.59" (the first four of eight)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 dattri==0.3.0
cd "$work"
TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from dattri.algorithm.influence_function import IFAttributorExplicit
from dattri.task import AttributionTask
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(8, 3), torch.randn(8)
model = torch.nn.Linear(3, 1)
full = DataLoader(TensorDataset(x, y), batch_size=8)


def loss(parameters, data):
    return ((functional_call(model, parameters, data[0])[..., 0] - data[1]) ** 2).mean()


def values(batch):
    how = IFAttributorExplicit(AttributionTask(loss, model, model.state_dict()))
    how.cache(full)
    return how.self_attribute(DataLoader(TensorDataset(x, y), batch_size=batch))


together, single = values(8), values(1)
print("one batch", *(f"{each:.2f}" for each in together.tolist()[:4]), end=", ")
print("batches of one", *(f"{each:.2f}" for each in single.tolist()[:4]))
assert torch.allclose(single, together.sum().expand(8)) and together.std() > 0.1
PYTHON
