"""The registry: every entry satisfies the protocol, options are parsed, errors list what there is."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from stride_cli.research.methods.registry import METHODS, method_options, open_method


@pytest.mark.parametrize("name", METHODS)
def test_entry_satisfies_the_protocol(name: str) -> None:
    entry = METHODS[name]
    kind = entry.load()
    assert list(inspect.signature(kind.fit).parameters) == ["self", "workspace"]
    assert list(inspect.signature(kind.score).parameters)[:2] == ["self", "queries"]
    assert kind.__doc__
    assert all(
        option.default is not option.empty
        for option in method_options(kind).values()
        if option.kind is not option.VAR_KEYWORD
    ), "every option has a default: a method opens by its name alone"
    method = open_method(name)
    assert method.name == name
    assert method.bytes_per_chunk == 0  # nothing is kept before `fit`


def test_importing_the_registry_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "sklearn", "bm25s", "sentence_transformers", "numba", "zarr", "scipy")
    code = (
        f"import stride_cli.research.methods.registry, sys; print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
