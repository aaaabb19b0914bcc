#!/usr/bin/env bash
# traker's scores are noise at its defaults where the examples are fewer than the projection's dimensions.
#
# Versions: traker 0.3.2, torch 2.13.0.
# Behaviour: `lambda_reg` is 0 by default, and the matrix of n examples' gradients in `proj_dim` dimensions has rank n at
# most. With n < proj_dim (2048 by default) it is singular, its inverse in single precision is rounding, and `featurize`
# to `finalize_scores` run without a warning.
# Surprise: no error tells it, and the result looks like scores. The same examples in another order give other scores, with
# a correlation near 0. A small study, or a class of its own, is below 2048 examples at once.
# Way round: `lambda_reg` above 0, or a `proj_dim` well below n.
# Seen: "correlation of two orders of 40 examples: 0.11 at lambda 0, 1.00 at lambda 0.1"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 traker==0.3.2
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from trak import TRAKer

torch.manual_seed(0)
train, held = 40, 6
x, y = torch.randn(train + held, 20), torch.randint(0, 4, (train + held,))
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4)).eval()


def scores(order, ridge):
    """Of every training example for every held one, rows in the examples' own order."""
    traker = TRAKer(
        model=model,
        task="image_classification",
        train_set_size=train,
        save_dir=f"{ridge}-{order[0]}",
        device="cpu",
        proj_dim=256,
        use_half_precision=False,
        lambda_reg=ridge,
        logging_level=50,
    )
    traker.load_checkpoint(model.state_dict(), model_id=0)
    traker.featurize(batch=(x[:train][order], y[:train][order]), num_samples=train)
    traker.finalize_features()
    traker.start_scoring_checkpoint("held", model.state_dict(), 0, num_targets=held)
    traker.score(batch=(x[train:], y[train:]), num_samples=held)
    return torch.as_tensor(traker.finalize_scores("held"))[order.argsort()]


def agreement(ridge):
    both = [scores(order, ridge).flatten() for order in (torch.arange(train), torch.arange(train).flip(0))]
    return torch.corrcoef(torch.stack(both))[0, 1].item()


without, within = agreement(0.0), agreement(0.1)
print(f"correlation of two orders of {train} examples: {without:.2f} at lambda 0, {within:.2f} at lambda 0.1")
assert abs(without) < 0.5 and within > 0.999
PYTHON
