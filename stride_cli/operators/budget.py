"""What fitting may take of memory: how many tokens go through a model at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.operator_space import OperatorSpace

_BATCH_BYTES = 2 << 30  # of what a batch leaves for its backward pass; on a GPU a quarter of its memory
_MOST_TOKENS = 4096
# numbers a token, block and width of a block that is differentiated, beside what spaces keep of linear layers
# inside (`OperatorSpace.kept_numbers`; SmolLM2-135M at every linear layer: 3.5 MB a token)
DIFFERENTIATED = 24


def tokens_at_once(
    model: AttributableModel, spaces: Iterable[OperatorSpace | type[OperatorSpace]], layer: int
) -> int:
    """Padded tokens of a batch whose gate gradients are taken: 4,096, or as many as memory is allowed for.

    Parameters
    ----------
    spaces : operator spaces, or their classes
    layer : int      where residual spaces act: the blocks above it are differentiated
    """
    found = list(spaces)
    kept = max((space.kept_numbers for space in found), default=0)
    residual = any(space.site == "residual" for space in found)
    blocks = model.n_layers if kept else model.n_layers - layer if residual else 0
    a_token = 4 * model.d_model * (DIFFERENTIATED * blocks + kept * model.n_layers)
    allowed = _BATCH_BYTES
    if model.device.type == "cuda":
        import torch

        allowed = torch.cuda.get_device_properties(model.device).total_memory // 4
    return max(1, min(_MOST_TOKENS, allowed // max(1, a_token)))
