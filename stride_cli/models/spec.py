"""Name a model, and how it is loaded: one value that is passed as an argument, also to workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from stride_cli.options import MORE, Options, option
from stride_cli.permissions import Permissions


@dataclass(frozen=True)
class StreamOptions(Options):
    """Options for a model whose weights may not fit into memory."""

    stream: bool | None = option(
        None,
        "Load each block's weights from disk when it runs; default: where they are larger than the memory.",
        off="--no-stream",
        setting=True,
        panel=MORE,
    )


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded, here or in a worker.

    Attributes
    ----------
    path : directory, .gguf file or hub id; None: where the index says
    adapter : directory of a LoRA adapter, put on `path`; without one, on the base that the adapter names
    device : "auto": CUDA where there is one, else CPU; or a torch device name
    dtype : "auto": bf16 on CUDA, fp32 on CPU; or "fp32", "bf16", "fp16" (of a classifier: "fp32", "fp64")
    stream : leave the weights of a language model's blocks on disk while they do not run; None: where they
        are larger than the free memory
    permissions : what may be run and downloaded for it
    """

    path: str | Path | None = None
    adapter: str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    stream: bool | None = None
    permissions: Permissions = field(default_factory=Permissions)

    @classmethod
    def of(cls, given: GivenModel | None) -> ModelSpec:
        """Name a model by its path; a `ModelSpec` stays as it is."""
        return given if isinstance(given, ModelSpec) else cls(given)

    @property
    def place(self) -> str | None:
        """Path of what is loaded: of the adapter where there is one, else of the model."""
        found = self.path if self.adapter is None else self.adapter
        return None if found is None else str(found)

    def absolute(self) -> ModelSpec:
        """Name what is on this machine from its root, for workers that run elsewhere."""

        def from_root(given: str | Path | None) -> str | Path | None:
            local = None if given is None else Path(given).expanduser()
            return given if local is None or not local.exists() else str(local.absolute())

        return replace(self, path=from_root(self.path), adapter=from_root(self.adapter))

    def at(self, path: str | Path) -> ModelSpec:
        """Name another model, to be loaded in the same way."""
        return replace(self, path=path, adapter=None)


GivenModel = str | Path | ModelSpec


def place_of(given: GivenModel) -> str:
    """Path of what is loaded; of a `ModelSpec` that has one."""
    place = ModelSpec.of(given).place
    assert place is not None
    return place
