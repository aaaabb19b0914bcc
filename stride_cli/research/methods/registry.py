"""Every attribution method by name. A module is imported when one of its methods is opened."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, cast

from stride_cli.characters import shortened
from stride_cli.errors import UsageError
from stride_cli.options import About, Entry

if TYPE_CHECKING:
    from stride_cli.research.methods.protocol import Method

Needs = Literal["text", "model", "truth"]


@dataclass(frozen=True)
class MethodEntry:
    """A method's place, and what it looks at.

    Attributes
    ----------
    place : str            ``package.module:Class``
    needs : str            "text": the tokens alone; "model": the model's states or gradients; "truth": models
                           retrained on subsets (`stride evaluate truth`), some of which it uses up
    description : str      one line
    """

    place: str
    needs: Needs
    description: str

    def load(self) -> type:
        """Import the class."""
        return cast(type, pkgutil.resolve_name(self.place))


_TABLE = """
stride      model  stride.StrideMethod            subset operators and sparse recovery
direct      model  stride.DirectReadout           influence in gate space, what recovery approaches as K grows
chance      text   chance.Chance                  random scores
tfidf       text   lexical.TfIdf                  cosine of TF-IDF vectors (scikit-learn)
bm25        text   lexical.BM25                   BM25 (bm25s)
pairs       text   lexical.SharedPairs            shared pairs of neighbouring tokens, the rarer the more
dsir        text   dsir.DSIR                      importance of hashed n-grams, query against corpus
embeddings  text   embeddings.Embeddings          cosine of a sentence encoder's embeddings
airrep      text   airrep.AirRep                  an encoder trained for attribution
rds         model  representations.RDS            cosine of the model's mean final hidden states
featsim     model  representations.FeatSim        cosine of the features that predictions read
graddot     model  gradients.graddot.GradDot      dot product of loss gradients
tracin      model  gradients.graddot.TracIn       gradient products summed over checkpoints
logra       model  gradients.logra.LoGRA          low-rank projected gradients, inverse Fisher
ekfac       model  gradients.ekfac.EKFAC          influence with Kronecker-factored curvature
trackstar   model  gradients.trackstar.TrackStar  projected, optimizer-corrected unit gradients
trak        model  gradients.trak.TRAK            random projections and a linearised model
less        model  gradients.less.LESS            Adam's updates of a LoRA adapter after a warm-up (language)
source      model  gradients.source.Source        training unrolled in segments (classifiers trained by SGD)
unrolled    model  gradients.unrolled.Unrolled    fine-tuning unrolled backwards (language, by AdamW)
datamodels  truth  datamodels.Datamodels          sparse regression on models retrained on subsets
dsdm        truth  datamodels.DsDm                ridge regression on models retrained on subsets
"""


def listed() -> dict[str, MethodEntry]:
    """List the methods by name: ours, and those that other packages declare as entry points."""
    found = {}
    for name, needs, place, description in (line.split(None, 3) for line in _TABLE.strip().splitlines()):
        module, _, kind = place.rpartition(".")
        own = f"stride_cli.research.methods.{module}:{kind}"
        found[name] = MethodEntry(own, cast(Needs, needs), description)
    others = entry_points(group="stride.methods")
    return {each.name: MethodEntry(each.value, "model", f"from {each.value}") for each in others} | found


METHODS: Mapping[str, MethodEntry] = listed()


def open_method(spec: str) -> Method:
    """Open the method that ``name`` or ``name:option=value,option=value`` describes, not yet fitted.

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
        raise UsageError(
            f"there is no attribution method '{name}'{_guess(name, METHODS)}",
            fix=f"choose from {', '.join(METHODS)}",
        )
    kind = entry.load()
    known = method_options(kind)
    listing = f"options of {name}: {', '.join(known)}"
    given: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        option, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not text:
            raise UsageError(f"{name}: options are written option=value, found '{part}'", fix=listing)
        if option not in known:
            raise UsageError(f"{name} has no option '{option}'{_guess(option, known)}", fix=listing)
        if option in given:
            raise UsageError(f"{name}: option '{option}' is given twice", fix="give it once")
        given[option] = _parse(name, option, text, known[option].annotation)
        if (declared := getattr(vars(kind).get("__init__"), "declared", {}).get(option)) is not None:
            declared.check(given[option], f"{name}: {option}", f"write {option}={declared.example}")
        else:
            plain = Entry(option, (type(given[option]),), None, About())
            plain.check(given[option], f"{name}: {option}", f"give another, or leave {option} out")
    own = inspect.signature(kind).parameters
    top = given.pop("top", None) if "top" not in own else None
    shrunk = given.pop("shrink", False) if "shrink" not in own else False
    try:
        method: Method = kind(**given)
    except UsageError as error:
        raise UsageError(error.message, fix=error.fix or listing) from None
    method.name = spec
    if top is not None or shrunk:
        from stride_cli.research.methods.truncation import Truncated

        method = Truncated(method, top, shrink=shrunk)
    return method


def method_options(kind: type) -> dict[str, inspect.Parameter]:
    """List a method's options: its constructor's keyword arguments, and those that every method takes."""
    parameters = inspect.signature(kind).parameters
    options = {option: p for option, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for name, default, annotation in (("top", None, "int | None"), ("shrink", False, "bool")):
        added = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        options.setdefault(name, added)
    return options


def _guess(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _parse(name: str, option: str, text: str, annotation: Any) -> Any:
    """Convert a value to the kind that the constructor's annotation names; any other stays text."""
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
