#!/usr/bin/env bash
# dattri-llm weighs the examples of a smaller last batch more, and adds up the scores of equal examples.
#
# Versions: dattri-llm 0.1.0, transformers 5.24.0, torch 2.13.0.
# Behaviour: a score is a product with the gradient of the batch's loss, as the training loss is written: the mean. So it
# is divided by the number of examples in the batch, and a last batch of 2 beside one of 8 has four times the score. Rows
# are named by the hash of their content. `agnostic_matrix` adds rows of one name, so two equal examples are one row with
# twice the score.
# Surprise: scores "per sample" are expected to hang on the sample alone. Who is first in a ranking depends on whether the
# batch size divides the size of the corpus, and a matrix has fewer rows than the data has.
# Way round: a loss that is a sum, and ids as part of each example where equal ones are to stay apart.
# Seen: "batches of 8: 0.125 for the first eight, 0.500 for the last two; 10 examples, 9 rows, the pair's 2.0 times"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 dattri-llm==0.1.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from dattri_llm.attribution.algorithm.tracin import TracInAttributor
from dattri_llm.attribution.arguments import AttributionArguments
from dattri_llm.task import AttributionTask
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x, y = torch.randn(12, 6), torch.randint(0, 3, (12,))
x[7], y[7] = x[2], y[2]
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradient(i):
    found = torch.autograd.grad(loss(model, (x[i : i + 1], y[i : i + 1])), list(model.parameters()))
    return torch.cat([each.flatten() for each in found])


gradients = torch.stack([gradient(i) for i in range(12)])
wanted = gradients[:10] @ gradients[10:].T
arguments = AttributionArguments(per_device_train_batch_size=8, per_device_eval_batch_size=1, output_dir="out")
how = TracInAttributor(arguments, task=AttributionTask(loss, model))
score = how.attribute(TensorDataset(x[:10], y[:10]), TensorDataset(x[10:], y[10:]))
share = score.scores / wanted
names, matrix = score.agnostic_matrix()
times = (matrix[2] / score.scores[2]).mean().item()
print(f"batches of 8: {share[0, 0]:.3f} for the first eight, {share[9, 0]:.3f} for the last two", end="; ")
print(f"10 examples, {len(names)} rows, the pair's {times:.1f} times")
assert torch.allclose(share[:8], torch.tensor(1 / 8), rtol=1e-3)
assert torch.allclose(share[8:], torch.tensor(1 / 2), rtol=1e-3)
assert len(names) == 9 and torch.allclose(matrix[2], 2 * score.scores[2])
PYTHON
