"""Further models, loaded as the one at hand was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel


@dataclass(frozen=True)
class Opener:
    """Loads checkpoints of a training as the model at hand was loaded: on its device, in its precision.

    Attributes
    ----------
    device, dtype : as `load_model` takes them
    table : inputs of a classifier's rows, by number
    """

    device: str
    dtype: str
    table: Any = None

    @classmethod
    def like(cls, own: AttributableModel) -> Opener:
        """With device, precision and (classifiers) inputs of a model."""
        import torch

        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        return cls(str(own.device), names[own.dtype], getattr(own, "table", None))

    def load(self, path: str) -> AttributableModel:
        """The model at a path; ModelError where it cannot be loaded."""
        from stride_cli.models.loading import load_model

        model: Any = load_model(path, device=self.device, dtype=self.dtype)
        if self.table is not None:
            model.table = self.table
        loaded: AttributableModel = model
        return loaded
