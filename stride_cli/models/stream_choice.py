"""The choice to stream a model's weights, told to processes that are started; light to import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stride_cli.options import MORE, Options, option
from stride_cli.permissions import variable, with_variables

_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


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


@contextmanager
def streaming(options: StreamOptions) -> Iterator[None]:
    """Within: models are loaded so, here and in processes that are started, unless `load_model` is told
    otherwise."""
    given = {} if options.stream is None else {variable("stream"): str(int(options.stream))}
    with with_variables(given):
        yield


def chosen_stream() -> bool | None:
    """The choice for this process; None: where they are larger than the memory."""
    return _WORDS.get(os.environ.get(variable("stream"), "").lower())
