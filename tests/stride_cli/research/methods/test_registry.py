"""The registry: every entry satisfies the protocol, options are parsed, errors list what there is."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stride_cli.errors import UsageError
from stride_cli.research.methods.registry import METHODS, method_options, open_method
from stride_cli.research.methods.truncation import Truncated

EXTRAS = {
    "baselines": "bm25s",
    "embeddings": "sentence-transformers",
    "dsir": "data-selection",
}


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


def test_extras_are_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["project"]["optional-dependencies"]
    for extra, package in EXTRAS.items():
        assert any(line.startswith(package) for line in declared[extra])
        assert any(line.startswith(package) for line in declared["dev"])


def test_options_take_the_kind_of_their_annotation() -> None:
    method = open_method("bm25:k1=2,b=0.5")
    assert (method.k1, method.b) == (2.0, 0.5)
    assert method.name == "bm25:k1=2,b=0.5"
    method = open_method("tfidf:ngrams=1,units=tokens")
    assert (method.ngrams, method.units) == (1, "tokens")
    assert open_method("rds:layer=1").layer == 1
    assert open_method("rds:layer=none").layer is None


def test_top_and_shrink_are_options_of_every_method() -> None:
    method = open_method("tfidf:ngrams=1,top=10,shrink=true")
    assert isinstance(method, Truncated)
    assert method.name == "tfidf:ngrams=1,top=10,shrink=true"
    assert (method.ngrams, method.top, method.shrink) == (1, 10, True)
    assert not isinstance(open_method("tfidf:shrink=false"), Truncated)
    assert not isinstance(open_method("direct:shrink=true"), Truncated), "it has a shrink of its own"


@pytest.mark.parametrize(
    ("spec", "message", "fix"),
    [
        ("tfidff", "did you mean 'tfidf'", "tfidf, bm25"),
        ("", "no attribution method ''", "chance"),
        ("tfidf:ngram=2", "did you mean 'ngrams'", "ngrams, units, max_features, top, shrink"),
        ("tfidf:ngrams", "option=value, found 'ngrams'", "ngrams"),
        ("tfidf:ngrams=", "option=value", "ngrams"),
        ("tfidf:ngrams=two", "ngrams should be an integer, found 'two'", None),
        ("bm25:b=much", "b should be a number, found 'much'", None),
        ("tfidf:ngrams=1,ngrams=2", "given twice", None),
        ("tfidf:ngrams=0", "ngrams", None),
        ("tfidf:units=letters", "words or tokens, found 'letters'", None),
        ("tfidf:top=0", "top should be 1 or more", None),
        ("bm25:b=2", "between 0 and 1", None),
        ("rds:pool=max", "mean or last or scored, found 'max'", None),
    ],
)
def test_errors_name_what_there_is(spec: str, message: str, fix: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        open_method(spec)
    assert message in caught.value.message
    if fix is not None:
        assert fix in (caught.value.fix or "")
