"""What fitting may take of memory: how many tokens go through a model at once, and how many chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.operator_space import OperatorSpace

_BATCH_BYTES = 2 << 30  # of what a batch leaves for its backward pass; on a GPU a quarter of its memory
_MOST_TOKENS = 4096
_MOST_TOKENS_ON_DEVICE = 65_536  # of fewer, a small model leaves most of a GPU idle
_GRADIENTS_OF_DEVICE = 32  # the share of a device's memory that gate gradients of one kind may take: 1/32
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
    numbers = model.d_model * (DIFFERENTIATED * blocks + kept * model.n_layers)  # a token
    if model.device.type != "cuda":
        return max(1, min(_MOST_TOKENS, _BATCH_BYTES // max(1, 4 * numbers)))
    from stride_cli.models.devices import total_bytes

    # half of what a CPU takes: fused kernels keep less (an H200 in bf16: .47 MB a token of 1.45)
    room = total_bytes(model.device) // 4
    return max(1, min(_MOST_TOKENS_ON_DEVICE, 2 * room // max(1, model.dtype.itemsize * numbers)))


def chunks_at_once(device: torch.device, gate_size: int) -> int:
    """Chunks whose gate gradients are held together: 32 in memory, more where a device has room for them.

    Parameters
    ----------
    gate_size : p of all spaces
    """
    from stride_cli.data.batches import TOGETHER
    from stride_cli.models.devices import total_bytes

    return max(TOGETHER, total_bytes(device) // _GRADIENTS_OF_DEVICE // max(1, 4 * gate_size))
