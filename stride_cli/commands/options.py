"""Flags of commands, made of the options that dataclasses declare; and which index and model they name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from index_format.location import Location, locate
from stride_cli.attribution.options import CalibrationOptions, QueryOptions
from stride_cli.commands.completion import (
    complete_index,
    complete_method,
    complete_methods,
    complete_spaces,
    one_of,
)
from stride_cli.config import GeneralSettings, Placement, resolve
from stride_cli.corpus.readers import Fields, ReadOptions
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import UsageError
from stride_cli.models.spec import ModelSpec, StreamOptions
from stride_cli.options import CORPUS, MORE, Entry, Options, entries, option
from stride_cli.permissions import Permissions

FIELD = "--field "  # what begins the flags of names of fields
# how a prompt is asked, for every day; the other options of a query are settings, and a method's
ASKED = ("top", "bottom", "chat", "lambda_ratio", "read", "verbose")
_COMPLETERS = {
    "index": complete_index,
    "method": complete_method,
    "methods": complete_methods,
    "space": complete_spaces,
}
# of stride.yaml, whose settings these are
_SECTIONS: dict[Any, str] = {QueryOptions: "query", CalibrationOptions: "train", StreamOptions: "general"}


@dataclass(frozen=True)
class InputOptions(Options):
    """Options for a prompt, or an item, that cannot be answered: its record is ``stride.bad_input/1``."""

    on_bad: str = option(
        "error",
        "On a bad input: abort (error), warn and go on (skip), or write a record of it (record). With the "
        "last two the exit code is 2.",
        choices=("error", "skip", "record"),
        listed=True,
        panel=MORE,
    )


@dataclass(frozen=True)
class AnswerOptions(InputOptions):
    """Options of how answers are put together and shown; `format` None: ``stride.answer/1`` a line, or text
    on a terminal."""

    pool: bool = option(
        False,
        "Answer all prompts of FILE or stdin as one: which documents taught what they share?",
        panel=MORE,
    )
    format: str | None = option(
        None,
        "jsonl: a record a line, as --json; json: one array; csv: one row a hit.",
        choices=("json", "jsonl", "csv"),
        listed=True,
    )
    json: bool | None = option(None, "JSON Lines, or text. [text: a terminal]", off="--text")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "csv" and (self.json or self.on_bad == "record"):
            said = f"{'--json' if self.json else '--on-bad record'} writes JSON, and the format is csv"
            raise UsageError(said, fix="drop one of them, or give --format jsonl")


class Flags:
    """The flags of options that a command takes, as an annotation of the parameter that receives them.

    ``Annotated[QueryOptions, Flags(QueryOptions)]`` receives the dataclass, settings of stride.yaml included;
    ``Annotated[dict, Flags(…)]`` the values that were given, by name. Options whose flag is ``--field KEY=``
    share one flag, which may be repeated.

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
            if entry.about.help and entry.flag.startswith("--") and not entry.flag.startswith(FIELD)
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
        kind = self._kind(entry)
        about = flag_of(entry, **{key: changed[key] for key in ("help", "panel") if key in changed})
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
        """True where an option that is not given is open: stride.yaml may say, or its default differs."""
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
        """Take what is of this annotation out of a command's values, and return what was given of it.

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
                entry.check(found[name])  # names the flag; in Python an option is called by its name
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
    """Declare an option for typer."""
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


class Where:
    """The flags that name an index, its model and where it runs: an annotation of a `WorkspacePath`.

    Parameters
    ----------
    section : of stride.yaml, which may set device and dtype, "query" or "train"
    index : whether there is --index; without it the path has none, and the command fills it in
    """

    def __init__(self, section: str = "query", *, index: bool = True) -> None:
        self._section, self._index = section, index
        self.parameters = {
            **Flags(GeneralSettings, leave_out=() if index else ("index",)).parameters,
            "adapter": inspect.Parameter(
                "adapter", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=AdapterPath
            ),
            **Flags(Placement).parameters,
            **HELD.parameters,
        }

    def take(self, values: dict[str, Any]) -> WorkspacePath:
        """Take the named index and model, and how it is held, out of a command's values."""
        own = {name: values.pop(name) for name in self.parameters if name not in HELD.parameters}
        model = named_model(own["model"], own["adapter"], **HELD.given(values))
        if model.adapter is None:
            model = replace(model, path=resolve("general", {"model": own["model"]}).model)
        chosen = resolve(self._section, {"device": own["device"], "dtype": own["dtype"]})
        model = replace(model, device=chosen.device, dtype=chosen.dtype)
        return WorkspacePath(find_index(own["index"]) if self._index else Path(), model)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of its parameters that are annotated with `Flags` or `Where`."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, Flags | Where]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        annotated = get_origin(parameter.annotation) is Annotated
        kind, *found = get_args(parameter.annotation) if annotated else (None,)
        if found and isinstance(found[0], Flags | Where):
            groups[name] = kind, found[0]
            parameters += found[0].parameters.values()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {
            name: _built(kind, flags.given(values))
            for name, (kind, flags) in groups.items()
            if isinstance(flags, Flags)
        }
        # an option's value is looked at before any file is
        for name, (_, where) in groups.items():
            if isinstance(where, Where):
                given[name] = where.take(values)
        command(**values, **given)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _built(kind: Any, given: dict[str, Any]) -> Any:
    """The options that a parameter of this type receives: a dataclass of options, or the values by name."""
    if kind is ReadOptions:
        return ReadOptions.of(given)
    if kind in _SECTIONS:
        return settled(kind, given)
    return given if get_origin(kind) is dict else kind(**given)


def settled(cls: Any, given: Mapping[str, Any]) -> Any:
    """The options of a dataclass: flags that were given, else the settings of its section of stride.yaml."""
    chosen = resolve(_SECTIONS[cls], given)
    found = {name: getattr(chosen, name) for name in entries(cls) if hasattr(chosen, name)}
    return cls(**found | {name: value for name, value in given.items() if name not in found})


READING = (Fields, ReadOptions)
Reading = Annotated[ReadOptions, Flags(*READING)]
Json = Annotated[bool | None, typer.Option("--json/--text", help="JSON Lines, or text. [text: a terminal]")]
Device = Annotated[str | None, flag(Placement, "device")]
IndexPath = Annotated[str | None, flag(GeneralSettings, "index")]
ModelPath = Annotated[str | None, flag(GeneralSettings, "model")]
NewModel = typer.Option("--model", metavar="MODEL", help="Checkpoint directory, .gguf file or hub id.")
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help='JSON Lines of {"prompt", "response"?, "span"?, "instead"?, "id"?}, or a prompt a line. Of a '
        "classifier: examples.",
    ),
]
HELD = Flags(StreamOptions, Permissions, only=("stream", "trust_code"))
AdapterPath = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter that PEFT saved, on --model; without --model, on the base model that it names.",
        rich_help_panel=MORE,
    ),
]
Asked = Annotated[WorkspacePath, Where("query")]  # the index that is asked
Held = Annotated[WorkspacePath, Where(index=False)]  # a model whose index is named otherwise
Fitted = Annotated[WorkspacePath, Where("train")]  # the index that is fitted


def named_model(path: str | None, adapter: str | None = None, **given: Any) -> ModelSpec:
    """Name a model as flags do; `given` are those of how it is held and what is permitted.

    Raises
    ------
    UsageError      the adapter is none
    """
    chosen = resolve("general", given)
    allowed = Permissions(**{name: getattr(chosen, name) for name in entries(Permissions)})
    if adapter is not None:
        from stride_cli.models.configuration import is_adapter

        if not is_adapter(adapter):
            raise UsageError(
                f"--adapter {adapter} is no adapter (expected a directory with adapter_config.json)",
                fix="give the directory that peft's save_pretrained wrote; a whole model is a --model",
            )
    return ModelSpec(path, adapter, stream=chosen.stream, permissions=allowed)


def find_index(given: str | None) -> Location:
    """The index to use: the one given, else the one that the settings name, else the only ``*.stride`` here.

    Raises
    ------
    UsageError      none is given, and there is none here or more than one
    """
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
