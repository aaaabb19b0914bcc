"""Every attribution method by name. A module is imported when one of its methods is opened."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from stride_cli.characters import shortened
from stride_cli.errors import UsageError
from stride_cli.options import About, Entry, declared_options

if TYPE_CHECKING:
    from stride_cli.research.methods.protocol import Method

Needs = Literal["text", "model", "truth"]
_HERE = "stride_cli.research.methods"


@dataclass(frozen=True)
class MethodEntry:
    """Where a method lives and what it looks at.

    Attributes
    ----------
    module, class_name : str
    description : str      one line
    needs : str            "text": the tokens alone; "model": the model's states or gradients; "truth": models
                           retrained on subsets (`stride evaluate truth`), some of which it uses up
    """

    module: str
    class_name: str
    description: str
    needs: Needs

    def load(self) -> type:
        """The class; what its module needs is imported now."""
        return cast(type, getattr(importlib.import_module(self.module), self.class_name))


def _entry(module: str, class_name: str, description: str, needs: Needs) -> MethodEntry:
    return MethodEntry(f"{_HERE}.{module}", class_name, description, needs)


METHODS: Mapping[str, MethodEntry] = {
    "stride": _entry("stride", "StrideMethod", "subset operators and sparse recovery", "model"),
    "direct": _entry(
        "stride", "DirectReadout", "influence in gate space, what recovery approaches as K grows", "model"
    ),
    "chance": _entry("chance", "Chance", "random scores", "text"),
    "tfidf": _entry("lexical", "TfIdf", "cosine of TF-IDF vectors (scikit-learn)", "text"),
    "bm25": _entry("lexical", "BM25", "BM25 (bm25s)", "text"),
    "pairs": _entry(
        "lexical", "SharedPairs", "shared pairs of neighbouring tokens, the rarer the more", "text"
    ),
    "dsir": _entry("dsir", "DSIR", "importance of hashed n-grams, query against corpus", "text"),
    "embeddings": _entry("embeddings", "Embeddings", "cosine of a sentence encoder's embeddings", "text"),
    "airrep": _entry("airrep", "AirRep", "an encoder trained for attribution", "text"),
    "rds": _entry("representations", "RDS", "cosine of the model's mean final hidden states", "model"),
    "featsim": _entry("representations", "FeatSim", "cosine of the features that predictions read", "model"),
    "graddot": _entry("gradients.graddot", "GradDot", "dot product of loss gradients", "model"),
    "tracin": _entry("gradients.graddot", "TracIn", "gradient products summed over checkpoints", "model"),
    "logra": _entry("gradients.logra", "LoGRA", "low-rank projected gradients, inverse Fisher", "model"),
    "ekfac": _entry("gradients.ekfac", "EKFAC", "influence with Kronecker-factored curvature", "model"),
    "trackstar": _entry(
        "gradients.trackstar", "TrackStar", "projected, optimizer-corrected unit gradients", "model"
    ),
    "trak": _entry("gradients.trak", "TRAK", "random projections and a linearised model", "model"),
    "less": _entry(
        "gradients.less", "LESS", "Adam's updates of a LoRA adapter after a warm-up (language)", "model"
    ),
    "source": _entry(
        "gradients.source", "Source", "training unrolled in segments (classifiers trained by SGD)", "model"
    ),
    "unrolled": _entry(
        "gradients.unrolled", "Unrolled", "fine-tuning unrolled backwards (language, by AdamW)", "model"
    ),
    "lastlayer": _entry(
        "gradients.last_layer", "LastLayerInfluence", "exact influence of the output layer", "model"
    ),
    "datamodels": _entry(
        "datamodels", "Datamodels", "sparse regression on models retrained on subsets", "truth"
    ),
    "dsdm": _entry("datamodels", "DsDm", "ridge regression on models retrained on subsets", "truth"),
}


def open_method(spec: str) -> Method:
    """The method that ``name`` or ``name:option=value,option=value`` describes, not yet fitted.

    Every method also takes ``top=K``: each query's K scores of largest magnitude stay, the rest become zero;
    and ``shrink=true``: small scores are made smaller, as STRIDE's are in pre-training.

    Parameters
    ----------
    spec : str      for example ``tfidf:ngrams=1,top=100``

    Returns
    -------
    Method          its `name` is ``spec``

    Raises
    ------
    UsageError            unknown method or option, or a value of the wrong kind; lists the known ones
    MissingExtraError     an optional dependency of the method is not installed
    """
    name, _, rest = spec.partition(":")
    entry = METHODS.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, METHODS, 1)
        guess = f" (did you mean '{near[0]}'?)" if near else ""
        raise UsageError(
            f"there is no attribution method '{name}'{guess}", fix=f"choose from {', '.join(METHODS)}"
        )
    kind = entry.load()
    known = method_options(kind)
    given: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        option, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not text:
            raise UsageError(
                f"{name}: options are written option=value, found '{part}'", fix=_listing(name, known)
            )
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            guess = f" (did you mean '{near[0]}'?)" if near else ""
            raise UsageError(f"{name} has no option '{option}'{guess}", fix=_listing(name, known))
        if option in given:
            raise UsageError(f"{name}: option '{option}' is given twice", fix="give it once")
        given[option] = _parse(name, option, text, known[option].annotation)
        if (declared := declared_options(kind).get(option)) is not None:
            declared.check(given[option], f"{name}: {option}", f"write {option}={declared.example}")
        else:
            kinds = (type(given[option]),)
            Entry(option, kinds, None, About()).check(
                given[option], f"{name}: {option}", f"give another, or leave {option} out"
            )
    own = inspect.signature(kind).parameters
    top = given.pop("top", None) if "top" not in own else None
    shrunk = given.pop("shrink", False) if "shrink" not in own else False
    try:
        method: Method = kind(**given)
    except UsageError as error:
        raise UsageError(error.message, fix=error.fix or _listing(name, known)) from None
    method.name = spec
    if top is not None or shrunk:
        from stride_cli.research.methods.truncation import Truncated

        method = Truncated(method, top, shrink=shrunk)
    return method


def method_options(kind: type) -> dict[str, inspect.Parameter]:
    """A method's options by name: its constructor's keyword arguments, and those that every method takes."""
    parameters = dict(inspect.signature(kind).parameters)
    options = {option: p for option, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    top = inspect.Parameter("top", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None")
    shrunk = inspect.Parameter("shrink", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
    return {**options, **{each.name: each for each in (top, shrunk) if each.name not in options}}


def _listing(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    return f"options of {name}: {', '.join(known)}"


def _parse(name: str, option: str, text: str, annotation: Any) -> Any:
    """A value of the kind that the constructor's annotation names; any other annotation leaves the text."""
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    kinds = {part.strip() for part in written.split("|")}
    if "None" in kinds and text.lower() == "none":
        return None
    if "bool" in kinds:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise UsageError(
                f"{name}: {option} should be true or false, found '{text}'", fix=f"write {option}=true"
            )
        return words[text.lower()]
    for kind, convert, called in (("int", int, "an integer"), ("float", float, "a number")):
        if kind in kinds:
            try:
                return convert(text)
            except ValueError:
                if "str" in kinds or (kind == "int" and "float" in kinds):
                    continue
                raise UsageError(
                    f"{name}: {option} should be {called}, found '{shortened(text, 40)}'",
                    fix=f"write {option}=1, or leave it out",
                ) from None
    return text
