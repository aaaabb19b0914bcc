"""The registry: every entry satisfies the protocol, options are parsed, errors list what there is."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from stride_cli.errors import UsageError
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


@pytest.mark.parametrize(
    ("spec", "message", "fix"),
    [
        ("tfidff", "did you mean 'tfidf'", "tfidf, bm25"),
        ("", "no attribution method ''", "chance"),
        ("tfidf:ngram=2", "did you mean 'ngrams'", "ngrams, units, top, shrink"),
        ("tfidf:ngrams", "option=value, found 'ngrams'", "ngrams"),
        ("tfidf:ngrams=", "option=value", "ngrams"),
        ("tfidf:ngrams=two", "ngrams should be an integer, found 'two'", None),
        ("trak:damping=much", "damping should be a number, found 'much'", None),
        ("tfidf:ngrams=1,ngrams=2", "given twice", None),
        ("tfidf:ngrams=0", "ngrams", None),
        ("tfidf:units=letters", "words or tokens, found 'letters'", None),
        ("tfidf:top=0", "top should be 1 or more", None),
    ],
)
def test_errors_name_what_there_is(spec: str, message: str, fix: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        open_method(spec)
    assert message in caught.value.message
    if fix is not None:
        assert fix in (caught.value.fix or "")
