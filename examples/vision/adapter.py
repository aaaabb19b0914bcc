"""A network of one's own: stride model train data.npz --network examples/vision/adapter.py --holdout 100

The file defines `network(shape, n_classes)`, which returns a torch.nn.Module from inputs (B, *shape) to
logits (B, n_classes). STRIDE runs it block by block: an nn.Sequential, or a module with `blocks` (a
ModuleList) and `head`, or `features` and `classifier`, whose forward pass runs them one after the other and
nothing else.

Add --weights FILE (a state dict) and --epochs 0 to study a network that is trained already.
"""

import math

from torch import nn


def network(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 96),
        nn.GELU(),
        nn.LayerNorm(96),
        nn.Linear(96, 48),
        nn.GELU(),
        nn.Linear(48, n_classes),
    )
