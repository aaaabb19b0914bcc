"""Flags of commands, made of the options that dataclasses declare, and what goes with them everywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from index_format.location import Location, local_directory, locate
from stride_cli.attribution.options import QueryOptions
from stride_cli.commands.completion import (
    complete_index,
    complete_method,
    complete_methods,
    complete_spaces,
    one_of,
)
from stride_cli.config import GeneralSettings, Placement
from stride_cli.corpus.readers import Fields, ReadOptions
from stride_cli.errors import UsageError
from stride_cli.models.stream_choice import StreamOptions, streaming
from stride_cli.options import CORPUS, MORE, Entry, entries
from stride_cli.permissions import Permissions, permitted

if TYPE_CHECKING:
    pass

FIELD = "--field "  # what begins the flags of names of fields
# how a prompt is asked, for every day; the other options of a query are settings, and a method's
ASKED = ("top", "bottom", "chat", "lambda_ratio", "nonneg", "read", "check")
_COMPLETERS = {
    "index": complete_index,
    "method": complete_method,
    "methods": complete_methods,
    "space": complete_spaces,
}


class Flags:
    """The flags of options that a command takes: an annotation of a parameter that receives, by name, those
    that were given.

    Options whose flag is ``--field KEY=`` share one flag, which may be repeated.

    Parameters
    ----------
    classes : dataclasses that declare the options
    only, leave_out : names
    first : names of those that help lists before the others
    changed : name → ``default``, ``help`` and ``panel`` that this command has instead
    """

    def __init__(
        self,
        *classes: type,
        only: tuple[str, ...] = (),
        leave_out: tuple[str, ...] = (),
        first: tuple[str, ...] = (),
        **changed: Mapping[str, Any],
    ) -> None:
        self._classes, self._changed = classes, changed
        declared = entries(*classes)
        ordered = {**{name: declared[name] for name in first}, **declared}
        wanted = {
            name: entry
            for name, entry in ordered.items()
            if (not only or name in only) and name not in leave_out
        }
        self._fields = {e.flag.removeprefix(FIELD): e for e in wanted.values() if e.flag.startswith(FIELD)}
        self._entries = {
            name: entry
            for name, entry in wanted.items()
            if entry.about.help and not entry.flag.startswith(FIELD)
        }
        self.parameters = {name: self._parameter(entry) for name, entry in self._entries.items()}
        if self._fields:
            self.parameters["field"] = self._field()

    def _parameter(self, entry: Entry) -> inspect.Parameter:
        changed = self._changed.get(entry.name, {})
        default = None if self._left_open(entry) else entry.default
        if entry.negated:
            default = False
        default = changed.get("default", default)
        kind, about = (
            self._kind(entry),
            flag_of(entry, **{key: changed[key] for key in ("help", "panel") if key in changed}),
        )
        return inspect.Parameter(
            entry.flag.strip("-").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind if default is not None else kind | None, about],
        )

    def _field(self) -> inspect.Parameter:
        keys = ", ".join(key.rstrip("=") for key in self._fields)
        about = typer.Option(
            "--field",
            metavar="KEY=NAME",
            help=f"Name a field of the corpus ({keys}); an empty name switches it off. May be repeated.",
            rich_help_panel=CORPUS,
        )
        annotation = Annotated[list[str] | None, about]
        return inspect.Parameter("field", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _left_open(self, entry: Entry) -> bool:
        """Whether not giving an option says no value: stride.yaml may have one, or its default differs."""
        defaults = [entries(cls)[entry.name].default for cls in self._classes if entry.name in entries(cls)]
        return entry.about.setting or entry.default == () or any(each != defaults[0] for each in defaults)

    def _kind(self, entry: Entry) -> Any:
        if entry.about.choices and entry.about.listed:
            choices = [
                choice
                for cls in self._classes
                if entry.name in entries(cls)
                for choice in entries(cls)[entry.name].about.choices
            ]
            return Literal[tuple(dict.fromkeys(choices))]
        kind = next(kind for kind in entry.kinds if kind is not NoneType)
        return list[str] if kind is list else kind

    def given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Takes what is of this annotation out of a command's values, and returns what was given of it.

        Raises
        ------
        UsageError      a ``--field`` that is no KEY=NAME
        """
        found = self._named(values.pop("field") or ()) if self._fields else {}
        for name, entry in self._entries.items():
            parameter = self.parameters[name]
            value = values.pop(parameter.name)
            own_default = "default" in self._changed.get(name, {})
            if value is not None and (own_default or value != parameter.default):
                found[name] = False if entry.negated else value
        return found

    def _named(self, texts: Sequence[str]) -> dict[str, Any]:
        """The options that ``--field`` gives."""
        found: dict[str, Any] = {}
        for text in texts:
            key, sep, name = text.partition("=")
            entry = self._fields.get(key + sep)
            if entry is None:
                keys = ", ".join(each.rstrip("=") for each in self._fields)
                raise UsageError(
                    f"--field is '{text}' (expected KEY=NAME, KEY one of {keys})", fix="try --field id=name"
                )
            found[entry.name] = [*found.get(entry.name, ()), name] if list in entry.kinds else name
        return found


def flag_of(entry: Entry, help: str | None = None, panel: str | None = None) -> Any:
    """What typer is to know of an option."""
    about, offered = entry.about, (*entry.about.choices, *entry.about.suggest)
    return typer.Option(
        f"{entry.flag}/{about.off}" if about.off else entry.flag,
        *([about.short] if about.short else []),
        help=help or about.help,
        show_default=not about.off,
        metavar=about.metavar,
        rich_help_panel=panel or about.panel,
        autocompletion=_COMPLETERS.get(entry.name)
        or (one_of(*offered) if offered and not about.listed else None),
    )


def flag(cls: type, name: str) -> Any:
    """The flag of one option, for an annotation."""
    return flag_of(entries(cls)[name])


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of its parameters that are annotated with `Flags`.

    One that opens the model of an index, and so has a parameter annotated with `ModelPath`, gets the flags of
    `StreamOptions` and `Permissions` as well, and runs with those that are given; and `--adapter`, which it
    sees as its model.
    """
    signature = inspect.signature(command, eval_str=True)
    opens_model = any(parameter.annotation == ModelPath for parameter in signature.parameters.values())
    groups: dict[str, Flags] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        found = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
        if found and isinstance(found[0], Flags):
            groups[name] = found[0]
            parameters += found[0].parameters.values()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    if opens_model:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("adapter", kind, default=None, annotation=AdapterPath))
        parameters += [*STREAM.parameters.values(), *PERMISSIONS.parameters.values()]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        allowed, held = Permissions(), StreamOptions()
        if opens_model:
            held = streamed(STREAM.given(values))
            allowed = permissions(PERMISSIONS.given(values))
        given = {name: flags.given(values) for name, flags in groups.items()}
        with permitted(allowed), streaming(held), adapted(values):
            command(**values, **given)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


READING = (Fields, ReadOptions)
Reading = Annotated[dict[str, Any], Flags(*READING)]
Json = Annotated[bool, typer.Option("--json", help="JSON Lines on stdout, also on a terminal.")]
Device = Annotated[str | None, flag(Placement, "device")]
Dtype = Annotated[str | None, flag(Placement, "dtype")]
IndexPath = Annotated[str | None, flag(GeneralSettings, "index")]
ModelPath = Annotated[str | None, flag(GeneralSettings, "model")]
PERMISSIONS = Flags(Permissions, only=("trust_code",))
STREAM = Flags(StreamOptions)
AdapterPath = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter that PEFT saved, on --model; without --model, on the base model that it names.",
        rich_help_panel=MORE,
    ),
]


@contextmanager
def adapted(values: dict[str, Any]) -> Iterator[None]:
    """Takes ``adapter`` out of a command's values: where one is given, it becomes the ``model``, on that."""
    adapter = values.pop("adapter", None)
    if adapter is None:
        yield
        return
    from stride_cli.corpus.adapter_base import based_on, is_adapter

    if not is_adapter(adapter):
        raise UsageError(
            f"--adapter {adapter} is no adapter (expected a directory with adapter_config.json)",
            fix="give the directory that peft's save_pretrained wrote; a whole model is a --model",
        )
    base, values["model"] = values["model"], adapter
    with based_on(adapter, base):
        yield


def permissions(given: Mapping[str, Any]) -> Permissions:
    """What is allowed, by flags or by settings."""
    from stride_cli.config import resolve

    general = resolve("general", given)
    return Permissions(**{name: getattr(general, name) for name in entries(Permissions)})


def streamed(given: Mapping[str, Any]) -> StreamOptions:
    """How models are held, by flags or by settings."""
    from stride_cli.config import resolve

    return StreamOptions(stream=resolve("general", given).stream)


def query_options(chosen: Any, given: Mapping[str, Any]) -> QueryOptions:
    """How a query is answered: settings of the group "query", and flags that are no settings.

    Raises
    ------
    UsageError      a value that cannot be
    """
    names = entries(QueryOptions)
    shared = {name: getattr(chosen, name) for name in names if hasattr(chosen, name)}
    return QueryOptions(**shared | {name: value for name, value in given.items() if name not in shared})


def find_index(given: str | None) -> Location:
    """The index to use: the one given, else the one that the settings name, else the only ``*.stride`` here.

    Raises
    ------
    UsageError      none is given, and there is none here or more than one
    """
    from stride_cli.config import resolve

    wanted = resolve("general", {"index": given}).index
    if wanted is not None:
        return locate(wanted)
    found = sorted(path for path in Path().glob("*.stride") if path.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            "no index given, and there is no *.stride in the working directory",
            fix="give one with --index PATH, or build one: stride index build corpus.jsonl --model MODEL",
        )
    raise UsageError(
        f"no index given, and there are {len(found)} in the working directory: "
        + ", ".join(path.name for path in found),
        fix=f"give one with --index, for example --index {found[0].name}",
    )


def writable_index(given: str | None) -> Path:
    """`find_index`, for a command that writes; IndexReadOnly where it is a URL or a zip file."""
    where = find_index(given)
    local_directory(where)
    return Path(str(where))
