#!/usr/bin/env bash
# dattri's influence functions add up the inverse Hessians of single batches: the batch size changes what is computed.
#
# Versions: dattri 0.3.0, torch 2.13.0.
# Behaviour: the explicit and the CG attributor go through the training loader, invert the Hessian of each batch and add
# the results. With the whole set as one batch that is the influence function. With 8 batches of 8 it is another quantity:
# the sum of inverses is led by the worst-conditioned batch.
# Surprise: a loader's batch size is a matter of memory elsewhere. Its help says that small batches are less accurate. It
# does not say that they are no estimate: scores grow without bound as batches come near the number of parameters.
# Way round: a loader of one batch, or dattri's Arnoldi attributor, which joins the batches before.
# Seen: "64: 0.996 x1, 32: 0.967 x2, 16: 0.905 x7, 8: 0.505 x452" (batch size: correlation with exact leave-one-out, scale)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 dattri==0.3.0
cd "$work"
TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorExplicit
from dattri.task import AttributionTask
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
train, held, features = 64, 8, 7
x = torch.randn(train + held, features)
y = x @ torch.randn(features) + torch.randn(train + held)
model = torch.nn.Linear(features, 1, bias=False)
every = torch.arange(train)


def loss(parameters, data):
    return ((functional_call(model, parameters, data[0])[..., 0] - data[1]) ** 2).mean()


def losses_without(left_out):
    rows = every[every != left_out]
    weight = torch.linalg.lstsq(x[rows], y[rows, None]).solution
    return (x[train:] @ weight - y[train:, None])[:, 0] ** 2


def scores(attributor, batch, **settings):
    weight = torch.linalg.lstsq(x[:train], y[:train, None]).solution.T
    how = attributor(AttributionTask(loss, model, {"weight": weight}), **settings)
    data = TensorDataset(x[:train], y[:train])
    how.cache(DataLoader(data, batch_size=batch))
    asked = DataLoader(TensorDataset(x[train:], y[train:]), batch_size=held)
    return how.attribute(DataLoader(data, batch_size=train), asked)


whole = losses_without(-1)
exact = torch.stack([losses_without(i) - whole for i in range(train)])
found, scale = {}, {}
for batch in (64, 32, 16, 8):
    got = scores(IFAttributorExplicit, batch)
    found[batch] = torch.corrcoef(torch.stack([got.flatten(), exact.flatten()]))[0, 1].item()
    scale[batch] = (got.norm() / scores(IFAttributorExplicit, 64).norm()).item()
print(", ".join(f"{batch}: {found[batch]:.3f} x{scale[batch]:.0f}" for batch in found))
explicit, conjugate = scores(IFAttributorExplicit, 32), scores(IFAttributorCG, 32, max_iter=features)
assert torch.allclose(explicit, conjugate, rtol=1e-2, atol=1e-2 * explicit.abs().max().item())
assert found[64] > 0.99 and found[8] < 0.8 and scale[8] > 50
PYTHON
