#!/usr/bin/env bash
# Trainer of transformers 4 makes steps smaller where rows are short: it counts labels that nothing predicts.
#
# Versions: transformers 4.57.3 and 5.24.0, accelerate 1.15.0, torch 2.13.0.
# Behaviour: models that take `num_items_in_batch` add up the loss of an optimizer step's rows and divide it by that
# number. Transformers 4 counts all labels that are not -100. Where labels are the input ids, as in pre-training, the
# first of each row is among them, and no token comes before it. So a row of n tokens has n - 1 losses and counts as n.
# Transformers 5 counts n - 1.
# Surprise: the gradient of a step is not that of its mean loss, but a share (n - 1) / n of it, 2/3 for rows of three
# tokens. The same script has another learning rate after an upgrade, and steps of short rows weigh less than others.
# A model that does not take the number gets the mean over rows in both versions, whatever their lengths.
# Way round: set the first label of each row to -100, as collators for prompt and response do.
# Seen: "4.57.3: .867 .923 of the mean loss's gradient; with the first labels masked 1.000 1.000"
#       "5.24.0: 1.000 1.000 of the mean loss's gradient; with the first labels masked 1.000 1.000"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/steps.py" <<'PYTHON'
import logging
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

logging.disable(logging.CRITICAL)
random = torch.Generator().manual_seed(1)
ROWS = [torch.randint(3, 50, (n,), generator=random) for n in (4, 9, 5, 12, 6, 20)]
STEPS = ROWS[:4], ROWS[4:]  # four rows are accumulated for a step; the last has two


def fresh():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def flat(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def of_mean_loss(rows):
    model = fresh()
    total = sum(model(input_ids=row[None], labels=row[None]).loss * (len(row) - 1) for row in rows)
    (total / sum(len(row) - 1 for row in rows)).backward()
    return flat(model)


def of_trainer(masked):
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, *given, **named):
            seen.append(flat(trainer.model))

    class InOrder(Trainer):
        def _get_train_sampler(self, *given, **named):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    labels = [torch.cat([torch.tensor([-100]), row[1:]]) if masked else row for row in ROWS]
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ROWS, labels)]
    model = fresh()
    settings = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=1, gradient_accumulation_steps=4, num_train_epochs=1, max_grad_norm=0,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )
    optimizer = Watched(model.parameters(), lr=0.0)
    trainer = InOrder(model=model, args=settings, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return seen


def shares(masked):
    pairs = zip(of_trainer(masked), map(of_mean_loss, STEPS))
    return [float(found @ mean / (mean @ mean)) for found, mean in pairs]


plain, masked = shares(False), shares(True)
said = ["{:.3f} {:.3f}".format(*each) for each in (plain, masked)]
print(f"{transformers.__version__}: {said[0]} of the mean loss's gradient; with the first labels masked {said[1]}")
labels = [sum(map(len, rows)) for rows in STEPS]
counted = [(total - len(rows)) / total for total, rows in zip(labels, STEPS)]
expected = counted if transformers.__version__.startswith("4.") else [1, 1]
assert all(abs(a - b) < 1e-3 for a, b in zip(plain, expected)), plain
assert all(abs(each - 1) < 1e-3 for each in masked), masked
PYTHON
for version in 4.57.3 5.24.0; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet torch==2.13.0 "transformers==$version" accelerate==1.15.0
    "$work/$version/bin/python" -W ignore "$work/steps.py" "$work/out" 2>/dev/null | grep "mean loss"
done
