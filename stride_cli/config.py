"""Settings: built-in defaults, stride.yaml, STRIDE_* variables, flags; each value knows its source."""

from __future__ import annotations

import difflib
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

from stride_cli.attribution.options import CalibrationOptions, QueryOptions
from stride_cli.characters import shortened
from stride_cli.errors import UsageError, first_line
from stride_cli.models.spec import StreamOptions
from stride_cli.operators.options import FLAT
from stride_cli.options import MORE, Entry, Options, entries, option
from stride_cli.permissions import Permissions

FILE_NAME = "stride.yaml"
_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class GeneralSettings(Options):
    """The index and the model that commands use when none is given."""

    index: str | None = option(
        None,
        "The index; default: the only *.stride in the working directory. Only to read: a .zip or a URL.",
        metavar="<path>",
        setting=True,
    )
    model: str | None = option(
        None, "Checkpoint directory, hub id or .gguf file; default: the index's own.", setting=True
    )


@dataclass(frozen=True)
class Placement(Options):
    """Device and precision of a model."""

    device: str = option(
        "auto",
        "cpu, cuda, cuda:1 …; default: CUDA where there is one.",
        suggest=("auto", "cpu", "cuda"),
        setting=True,
        panel=MORE,
    )
    dtype: str = option(
        "auto",
        "fp32 or bf16; default: what the device does best.",
        suggest=("auto", "fp32", "bf16"),
        setting=True,
        panel=MORE,
    )


def _settings_of(*classes: type) -> dict[str, Entry]:
    return {name: entry for name, entry in entries(*classes).items() if entry.about.setting}


# device and dtype of "train" and "query" are set apart: fitting may run where queries do not
SECTIONS: dict[str, dict[str, Entry]] = {
    "general": _settings_of(GeneralSettings, StreamOptions, Permissions),
    "train": _settings_of(*FLAT, CalibrationOptions, Placement),
    "query": _settings_of(QueryOptions, Placement),
}


class Setting(TypedDict):
    """One setting as resolved."""

    schema: Literal["stride.setting/1"]
    key: Annotated[str, "section and name, such as query.top"]
    value: Annotated[str | float | bool | list[Any] | None, "null: what fits the index and model"]
    source: Annotated[str, '"default", "stride.yaml" or the name of a variable']


def resolve(section: str, flags: Mapping[str, Any]) -> Any:
    """Resolve the settings of one section.

    Parameters
    ----------
    section : "general", "train" or "query"
    flags : name → value; None is "not given", and one that is no setting passes by

    Returns
    -------
    a namespace of the section's settings

    Raises
    ------
    UsageError      an unknown key or a value of the wrong type in stride.yaml or the environment
    """
    given = {name: value for name, value in flags.items() if name in SECTIONS[section]}
    for name, value in given.items():
        SECTIONS[section][name].check(value)
    found = {name_of(setting): setting["value"] for setting in settings(section)}
    return SimpleNamespace(**found | {name: value for name, value in given.items() if value is not None})


def settings(section: str | None = None) -> list[Setting]:
    """Every setting of a section (or of all), with its source: "default", the file or the variable."""
    written = read_file(Path(FILE_NAME))
    wanted = {name: declared for name, declared in SECTIONS.items() if section in (None, name)}
    _check_variables(wanted)
    found: list[Setting] = []
    for name, declared in wanted.items():
        for entry in declared.values():
            key, variable = f"{name}.{entry.name}", _variable(name, entry.name)
            value, source = None if entry.default == () else entry.default, "default"
            if key in written:
                if entry.about.personal:
                    raise UsageError(
                        f"{FILE_NAME} sets {key}, which no file in a directory can: it may have come with it",
                        fix=f"remove it there, and say it with {entry.flag} or {variable}=true",
                    )
                value, source = _of_yaml(written[key], entry, key), FILE_NAME
                entry.check(value, f"{FILE_NAME}: {key}", f"write {entry.name}: {entry.example}")
            if variable in os.environ:
                value, source = _of_text(os.environ[variable], entry, variable), variable
                entry.check(value, variable, f"unset {variable}")
            found.append({"schema": "stride.setting/1", "key": key, "value": value, "source": source})
    return found


def name_of(setting: Setting) -> str:
    """The name of a setting in its section."""
    return setting["key"].partition(".")[2]


def _variable(section: str, name: str) -> str:
    return f"STRIDE_{section}_{name}".upper()


def _check_variables(sections: Mapping[str, Mapping[str, Entry]]) -> None:
    """Refuse a mistyped variable, as a mistyped key of the file is."""
    known = [_variable(section, name) for section, declared in sections.items() for name in declared]
    begins = tuple(f"STRIDE_{name}_".upper() for name in sections)
    for variable in sorted(os.environ):
        if variable.startswith(begins) and variable not in known:
            raise UsageError(
                f"the environment sets {variable}, and there is no such setting",
                fix=_nearest(variable, known) or f"unset {variable}; stride config show lists them",
            )


def _nearest(name: str, known: list[str]) -> str | None:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else None


def read_file(path: Path) -> dict[str, Any]:
    """``stride.yaml`` as section.key → value; empty where there is none."""
    if not path.is_file():
        return {}
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _refuse_repeated(node)
        content: Any = None if node is None else loader.construct_document(node)
    except OSError:
        raise
    except Exception as error:  # of what kind depends on what is written: "!!bool x" is a KeyError to PyYAML
        deep = isinstance(error, RecursionError)
        first = "it is nested too deeply" if deep else first_line(error).partition("; use sys.")[0]
        raise UsageError(f"{path} is not YAML: {first}", fix="write it so: query: {top: 20}") from error
    found: dict[str, Any] = {}
    for section, values in content.items() if isinstance(content, dict) else [(content, None)]:
        known_section = isinstance(section, str) and section in SECTIONS
        if content is None or (known_section and values is None):
            continue  # nothing stands there
        if not known_section:
            shown = section if isinstance(section, str) else reprlib.repr(section)
            near = difflib.get_close_matches(shown, SECTIONS, 1) or [", ".join(SECTIONS)]
            raise UsageError(
                f"{path}: expected sections of settings, found '{shortened(shown, 60)}'",
                fix=f"a section is {near[0]}",
            )
        if not isinstance(values, dict):
            raise UsageError(
                f"{path}: expected settings under '{section}', found {reprlib.repr(values)}",
                fix="write it so: query: {top: 20}",
            )
        for name, value in values.items():
            if name not in SECTIONS[section]:
                known = [f"{each}.{name}" for each, declared in SECTIONS.items() for name in declared]
                raise UsageError(
                    f"{path}: there is no setting '{section}.{name}'",
                    fix=_nearest(f"{section}.{name}", known) or "stride config show lists them",
                )
            found[f"{section}.{name}"] = value
    return found


def _refuse_repeated(node: Any) -> None:
    """Raise ValueError for a key that stands in a mapping twice: PyYAML would take the last."""
    seen = set()
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        name = str(key.value)
        if name in seen:
            line = key.start_mark.line + 1
            raise ValueError(f"'{shortened(name, 60)}' stands there twice, again in line {line}")
        seen.add(name)
        _refuse_repeated(value)


def _kinds(entry: Entry) -> tuple[type, ...]:
    """The types of a setting; None, "not set", is one where that is the default."""
    return (*entry.kinds, NoneType) if entry.default in (None, ()) else entry.kinds


def _of_yaml(value: Any, entry: Entry, key: str) -> Any:
    """A value of the file as the setting's type."""
    kinds = _kinds(entry)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 10**300 else math.inf  # which no option allows
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise UsageError(
            f"{FILE_NAME}: {key} is {reprlib.repr(value)} (expected a list of texts)",
            fix=f"write {entry.name}: [a, b]",
        )
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    names = " or ".join(dict.fromkeys("null" if kind is NoneType else kind.__name__ for kind in kinds))
    raise UsageError(
        f"{FILE_NAME}: {key} is {reprlib.repr(value)} (expected {names})", fix=f"write {key} as {names}"
    )


def _of_text(text: str, entry: Entry, variable: str) -> Any:
    """A variable's text as the setting's type."""
    kinds = _kinds(entry)
    if NoneType in kinds and text.lower() in ("", "null", "none"):
        return None
    try:
        if bool in kinds:
            return _WORDS[text.lower()]
        for kind in (int, float):
            if kind in kinds:
                return kind(text)
    except (KeyError, ValueError):
        names = " or ".join(kind.__name__ for kind in entry.kinds if kind is not NoneType)
        raise UsageError(
            f"{variable} is {reprlib.repr(text)} (expected {names})", fix=f"unset {variable}"
        ) from None
    return text.split(os.pathsep) if list in kinds else text
