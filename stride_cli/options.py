"""Options declared once: a dataclass field carries default, help, range and choices.

From the field derive the flag of a command (`stride_cli.commands.options`), the key of ``stride.yaml``
(`stride_cli.config`), the option of a method's spec (`research.methods.registry`) and the check of the
value, which is made wherever it comes from: every dataclass of options is an `Options` and checks itself.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from stride_cli.errors import UsageError

_KEY = "option"
Verb = TypeVar("Verb", bound=Callable[..., Any])
MORE = "More"  # the panel of what is not asked for every day
CORPUS = "How a corpus is read"
PAPER = "The paper's fit (--fit sgd), for research"
_MOST = 2**63 - 1  # what arrays and C code hold of a whole number


@dataclass(frozen=True)
class About:
    """Properties of an option that its field declares, beside type and default.

    Attributes
    ----------
    help : str                  "": an option of the Python interface only
    flag : str                  "": --name; one that begins with --no- is a switch, and sets False; one
                                without dashes is none: a setting, and an option of methods and of Python
    short : str                 a second flag
    off : str                   of a switch that is left open where it is not given: the flag that sets False
    low, above, high : float    least and most, and what a value has to exceed
    choices : of str            the values that there are
    listed : bool               help names the choices in place of a type, and the parser refuses others
    suggest : of str            what completion offers, beside the choices; other values may do as well
    metavar, panel : str        of the help
    setting : bool              a key of stride.yaml too
    personal : bool             a setting that no stride.yaml may make, for it may have come with what is in
                                its directory: the environment and flags do
    example : a value that works, for the remedy of an error; default: a choice, the default or the least
    """

    help: str = ""
    flag: str = ""
    short: str = ""
    off: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    listed: bool = False
    suggest: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str | None = None
    setting: bool = False
    personal: bool = False
    example: Any = None


@dataclass(frozen=True)
class Entry:
    """One option: name, types that a value may have (list for sequences), default, what is said of it."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    about: About

    @property
    def flag(self) -> str:
        return self.about.flag or "--" + self.name.replace("_", "-")

    @property
    def negated(self) -> bool:
        return self.about.flag.startswith("--no-")

    @property
    def expected(self) -> str:
        """The values that there are, in words."""
        about = self.about
        if about.choices:
            *others, last = about.choices
            return f"{', '.join(others)} or {last}" if others else last
        if about.low is not None and about.high is not None:
            return f"{about.low:,} to {about.high:,}"
        if float in self.kinds and about.low is about.above is about.high is None:
            return "a finite number"
        parts = [] if about.above is None else [f"more than {about.above:,}"]
        parts += [] if about.low is None else [f"{about.low:,} or more"]
        return ", ".join([*parts, *([] if about.high is None else [f"at most {about.high:,}"])])

    @property
    def example(self) -> Any:
        for found in (self.about.example, *self.about.choices[:1], self.default, self.about.low):
            if found is not None and self._allowed(found):
                return found
        return 1

    def check(self, value: Any, called: str = "", remedy: str = "") -> None:
        """UsageError where the value is none that there is.

        Parameters
        ----------
        called : what the option is called where the value comes from; default: its flag
        remedy : default: to try the flag with another value
        """
        wanted = {int, float} & {*self.kinds} and not {str, Path, list} & {*self.kinds}
        if value is None or (self._allowed(value) and (not wanted or isinstance(value, Real))):
            return
        free = isinstance(value, str) and not self.about.choices
        raise UsageError(
            f"{called or self.flag} is {_shown(value)} (expected {self._expected_of(value)})",
            fix=remedy or (f"give {self.flag} a name" if free else f"try {self.flag} {self.example}"),
        )

    def _allowed(self, value: Any) -> bool:
        about = self.about
        if about.choices:
            return value in about.choices
        if isinstance(value, str):
            return value == self.default or (bool(value) and _names_a_file(value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if isinstance(value, int) and about.high is None and abs(value) > _MOST:
            return False
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (about.low is None or value >= about.low)
            and (about.above is None or value > about.above)
            and (about.high is None or value <= about.high)
        )

    def _expected_of(self, value: Any) -> str:
        """Describe what was expected in place of a value that is not allowed."""
        if isinstance(value, str) and not self.about.choices:
            return "characters of a name" if value else "some text"
        too_large = isinstance(value, int | float) and self.about.high is None and abs(value) > _MOST
        return ", ".join(filter(None, [self.expected, "of 64 bits" if too_large else ""]))


def _shown(value: Any) -> Any:
    """A value in an error: a text in quotes, a number that is too long to be written by its length."""
    if isinstance(value, str):
        return f"'{value}'" if value else "empty"
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    return value


def _names_a_file(text: str) -> bool:
    """True where the system takes the text as a name: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def option(default: Any, help: str = "", **about: Any) -> Any:
    """A dataclass field that declares an option; `about` are the attributes of `About`."""
    return field(default=default, metadata={_KEY: About(help, **about)})


def engine_option() -> Any:
    """The option of where work is done that several workers share: see `stride_cli.parallel`."""
    about = "Processes of this machine, or tasks of a Ray cluster."
    return option("local", about, choices=("local", "ray"), listed=True, panel=MORE)


def chat_option() -> Any:
    """The option of how prompts are put to the model: see `stride_cli.data.queries.form_of`."""
    about = (
        "Put prompts in the chat template, or as the corpus has its prompts; default: where most of the "
        "corpus is prompts with responses."
    )
    return option(None, about, off="--no-chat", setting=False)


def kinds_of(hint: Any) -> tuple[type, ...]:
    """The types of a hint: ``float | None`` → (float, NoneType); any sequence of several → list."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return tuple(kind for part in get_args(hint) for kind in kinds_of(part))
    origin = get_origin(hint) or hint
    return (list,) if origin in (list, tuple, Sequence) else (origin,)


def entries(*classes: type) -> Mapping[str, Entry]:
    """The options of dataclasses by name, in order; of one that several declare, the first."""
    return _entries(classes)


@functools.cache
def _entries(classes: tuple[type, ...]) -> Mapping[str, Entry]:
    found: dict[str, Entry] = {}
    for cls in classes:
        hints = get_type_hints(cls)
        for each in fields(cls):
            if _KEY in each.metadata:
                entry = Entry(each.name, kinds_of(hints[each.name]), each.default, each.metadata[_KEY])
                found.setdefault(each.name, entry)
    return found


class Options:
    """Base of a dataclass of options: a value that cannot be is refused, wherever it comes from."""

    def __post_init__(self) -> None:
        for name, entry in entries(type(self)).items():
            called, remedy = f"{type(self).__name__}.{name}", f"try {name}={entry.example!r}"
            entry.check(getattr(self, name), called, remedy)

    @classmethod
    def given(cls, options: Any) -> Self:
        """Return options as they were given, or those by default; UsageError for any of another kind."""
        if options is not None and not isinstance(options, cls):
            said = f"options are {type(options).__name__} (expected {cls.__name__})"
            raise UsageError(said, fix=f"api.{cls.__name__}(…)")
        return cls() if options is None else options


def at_border(example: str) -> Callable[[Verb], Verb]:
    """Refuse arguments of other types than a function's annotations name; `example` is a call that works."""

    def decorate(verb: Verb) -> Verb:
        signature, names = inspect.signature(verb), vars(builtins) | inspect.unwrap(verb).__globals__

        @functools.wraps(verb)
        def checked(*args: Any, **given: Any) -> Any:
            for name, value in signature.bind_partial(*args, **given).arguments.items():
                parameter = signature.parameters[name]
                hint, several = str(parameter.annotation), parameter.kind is parameter.VAR_KEYWORD
                if not all(_is_of(each, hint, names) for each in (value.values() if several else [value])):
                    wanted = re.sub(r"\w+", lambda word: _written(names.get(word[0]), word[0]), hint)
                    found = f"{name} is {reprlib.repr(value)} (expected {wanted})"
                    raise UsageError(f"{example.partition('(')[0]}: {found}", fix=example)
            return verb(*args, **given)

        return cast(Verb, checked)

    return decorate


def _is_of(value: Any, hint: str, names: Mapping[str, Any]) -> bool:
    """Check a value against a hint as it is written; a name that is not imported stands for any class."""
    for part in re.split(r" \| (?![^\[]*\])", hint):
        name, _, inner = part.partition("[")
        kind: Any = type(None) if name == "None" else names.get(name)
        fits = kind is Any or (isinstance(value, kind) if kind else type(value).__module__ != "builtins")
        if name == "Sequence":
            fits = fits and not isinstance(value, str) and all(_is_of(v, inner[:-1], names) for v in value)
        if fits:
            return True
    return False


def _written(kind: Any, name: str) -> str:
    """Write an alias of several types as these."""
    return " | ".join(each.__name__ for each in get_args(kind)) if isinstance(kind, UnionType) else name


def own(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Select the fields of this dataclass among values by name."""
    return {name: value for name, value in given.items() if name in entries(cls)}


def refuse_foreign(
    given: Mapping[str, Any],
    wanted: Sequence[type],
    others: Sequence[type],
    *,
    because: str,
    otherwise: str,
    called: Callable[[str, str], str] = lambda name, flag: flag,
) -> None:
    """UsageError where one of the given options is declared by `others` only: it would be dropped unseen.

    Parameters
    ----------
    given : name → value; one that is the option's default is as good as not given, and None is not given
    because : "of … , and this is …": whose option it is, and why it has no meaning here
    otherwise : what can be done beside leaving it out
    called : (name, flag) → what an option is called where it comes from
    """
    known, foreign = entries(*wanted), entries(*others)
    for name, value in given.items():
        if name in foreign and name not in known and value not in (None, foreign[name].default):
            shown = called(name, foreign[name].flag)
            raise UsageError(f"{shown} is an option {because}", fix=f"leave out {shown}, or {otherwise}")
