"""STRIDE: which training documents made this language model say that?"""

from typing import TYPE_CHECKING, Any

from stride_cli.version import __version__ as __version__

if TYPE_CHECKING:
    from stride_cli.training.callback import StrideCallback as StrideCallback


def __getattr__(name: str) -> Any:
    """`StrideCallback`, which brings torch and transformers, once it is asked for."""
    if name == "StrideCallback":
        from importlib import import_module

        return import_module("stride_cli.training.callback").StrideCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
