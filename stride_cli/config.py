"""Settings: built-in defaults, stride.yaml, STRIDE_* variables, flags; each value knows its source."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from stride_cli.attribution.options import CalibrationOptions, QueryOptions
from stride_cli.characters import shortened
from stride_cli.errors import UsageError, first_line
from stride_cli.models.stream_choice import StreamOptions
from stride_cli.operators.options import FLAT
from stride_cli.options import MORE, Entry, Options, entries, option
from stride_cli.permissions import Permissions

FILE_NAME = "stride.yaml"


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
    """Where a model runs, and in which precision."""

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


def _section(name: str, *classes: type) -> type:
    """A dataclass of the options that are keys of stride.yaml."""
    made = [
        (entry.name, _hint(entry), None if entry.default == () else entry.default)
        for entry in entries(*classes).values()
        if entry.about.setting
    ]
    keys = [(key, hint, field(default=default)) for key, hint, default in made]
    return make_dataclass(name, keys, frozen=True)


def _hint(entry: Entry) -> Any:
    kinds = entry.kinds if entry.default is not None and entry.default != () else {*entry.kinds, NoneType}
    return functools.reduce(operator.or_, sorted(kinds, key=lambda kind: kind is NoneType))


# device and dtype of "train" and "query" are set apart: fitting may run where queries do not
SECTIONS: dict[str, type] = {
    "general": _section("GeneralSettings", GeneralSettings, StreamOptions, Permissions),
    "train": _section("TrainSettings", *FLAT, CalibrationOptions, Placement),
    "query": _section("QuerySettings", QueryOptions, Placement),
}
_DECLARED = {
    "general": entries(GeneralSettings, StreamOptions, Permissions),
    "train": entries(*FLAT, CalibrationOptions, Placement),
    "query": entries(QueryOptions, Placement),
}


@dataclass(frozen=True)
class Setting:
    """One setting as resolved: its key ("query.top"), its value, and where the value comes from."""

    key: str
    value: Any
    source: str

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]


def resolve(section: str, flags: Mapping[str, Any]) -> Any:
    """The settings of one section; flags whose value is None are "not given", and those that are no setting
    pass by.

    Parameters
    ----------
    section : "general", "train" or "query"
    flags : name → value

    Returns
    -------
    the section's frozen dataclass

    Raises
    ------
    UsageError      an unknown key or a value of the wrong type in stride.yaml or the environment
    """
    for name, value in flags.items():
        if name in _DECLARED[section]:
            _DECLARED[section][name].check(value)
    found = {setting.name: setting.value for setting in settings(section)}
    found.update({name: value for name, value in flags.items() if value is not None and name in found})
    return SECTIONS[section](**found)


def settings(section: str | None = None) -> list[Setting]:
    """Every setting of a section (or of all), with its source: "default", the file or the variable."""
    written = _read_file(Path(FILE_NAME))
    _check_variables(section)
    result = []
    for name, cls in SECTIONS.items():
        if section is not None and name != section:
            continue
        hints, declared = get_type_hints(cls), _DECLARED[name]
        for entry in fields(cls):
            key, variable = f"{name}.{entry.name}", f"STRIDE_{name}_{entry.name}".upper()
            value, source = entry.default, "default"
            if key in written and declared[entry.name].about.personal:
                raise UsageError(
                    f"{FILE_NAME} sets {key}, which no file in a directory can: it may have come with it",
                    fix=f"remove it there, and say it with {declared[entry.name].flag} or {variable}=true",
                )
            if key in written:
                value, source = _check(written[key], hints[entry.name], key, FILE_NAME), FILE_NAME
                declared[entry.name].check(value, f"{FILE_NAME}: {key}", f"write {_example(key, declared)}")
            if variable in os.environ:
                value = _parse(os.environ[variable], hints[entry.name], variable)
                declared[entry.name].check(value, variable, f"unset {variable}")
                source = variable
            result.append(Setting(key, value, source))
    return result


def _check_variables(section: str | None) -> None:
    """A mistyped variable is told, as a mistyped key of the file is."""
    known = [f"STRIDE_{key.replace('.', '_')}".upper() for key in _known()]
    of = tuple(f"STRIDE_{name}_".upper() for name in SECTIONS if section in (None, name))
    for variable in sorted(os.environ):
        if variable.startswith(of) and variable not in known:
            near = difflib.get_close_matches(variable, known, 1)
            raise UsageError(
                f"the environment sets {variable}, and there is no such setting",
                fix=f"did you mean {near[0]}?"
                if near
                else f"unset {variable}; stride config show lists them",
            )


def kernel_cache_setting() -> Setting:
    """Where compiled kernels are kept: no setting of stride.yaml, but a place that users look for."""
    from stride_cli.startup import kernel_cache

    place = kernel_cache()
    source = "NUMBA_CACHE_DIR" if os.environ.get("NUMBA_CACHE_DIR") else "default"
    return Setting("kernels.directory", None if place is None else str(place), source)


def with_settings(text: str, updates: Mapping[str, Any]) -> str:
    """The text of a stride.yaml with some settings changed or added; comments and all else stay.

    Parameters
    ----------
    text : str                  of the file; "" for a new one
    updates : key → value       for example ``{"train.layer": 8}``

    Raises
    ------
    UsageError      the file is written in a way that cannot be changed line by line (``train: {layer: 8}``)
    """
    import yaml

    lines = text.splitlines()
    for key, value in updates.items():
        section, _, name = key.partition(".")
        written = yaml.safe_dump(value).splitlines()[0]
        head = next(
            (at for at, line in enumerate(lines) if re.match(rf"{section}\s*:\s*(#.*)?$", line)), None
        )
        if head is None:
            lines += [*([""] if lines and lines[-1].strip() else []), f"{section}:", f"  {name}: {written}"]
            continue
        body = head + 1
        while body < len(lines) and (not lines[body].strip() or lines[body][0] in " \t#"):
            body += 1
        own = range(head + 1, body)
        found = next((at for at in own if re.match(rf"\s+{name}\s*:", lines[at])), None)
        if found is not None:
            match = re.match(r"(\s+[^:]+:)([^#]*?)(\s+#.*)?$", lines[found])
            lines[found] = f"{match[1]} {written}{match[3] or ''}" if match else lines[found]
        else:
            first = next((lines[at] for at in own if re.match(r"\s+\w", lines[at])), "  ")
            indent = first[: len(first) - len(first.lstrip())] or "  "
            lines.insert(head + 1, f"{indent}{name}: {written}")
    changed = "\n".join(lines) + "\n"
    before = yaml.safe_load(text) or {}
    wanted = {section: dict(values or {}) for section, values in before.items()}
    for key, value in updates.items():
        section, _, name = key.partition(".")
        wanted.setdefault(section, {})[name] = value
    once = all(sum(bool(re.match(rf"{name}\s*:", line)) for line in lines) <= 1 for name in SECTIONS)
    try:
        agrees = once and yaml.safe_load(changed) == wanted
    except yaml.YAMLError:
        agrees = False
    if not agrees:
        listed = ", ".join(f"{key} = {value}" for key, value in updates.items())
        raise UsageError(
            f"{FILE_NAME} is written in a way that cannot be changed line by line", fix=f"set there: {listed}"
        )
    return changed


def write_settings(updates: Mapping[str, Any]) -> Path:
    """Change settings in the working directory's stride.yaml, whole or not at all; made where missing.

    Raises
    ------
    UsageError      the file is no valid stride.yaml, or cannot be changed line by line
    """
    from index_format.durable import replace_file

    path = Path(FILE_NAME)
    _read_file(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = with_settings(text, updates)
    if changed != text:
        replace_file(path.resolve(), changed.encode())  # a link stays one
    return path


def _example(key: str, declared: Mapping[str, Entry]) -> str:
    name = key.partition(".")[2]
    return f"{name}: {declared[name].example}"


def _known() -> list[str]:
    return [f"{name}.{entry.name}" for name, cls in SECTIONS.items() for entry in fields(cls)]


def _read_file(path: Path) -> dict[str, Any]:
    """``stride.yaml`` as section.key → value; empty where there is none."""
    if not path.is_file():
        return {}
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _once())
    except OSError:
        raise
    except Exception as error:  # of what kind depends on what is written: "!!bool x" is a KeyError to PyYAML
        deep = isinstance(error, RecursionError)
        first = "it is nested too deeply" if deep else first_line(error).partition("; use sys.")[0]
        raise UsageError(f"{path} is not YAML: {first}", fix="write it so: query: {top: 20}") from error
    if content is None:
        return {}
    known = _known()
    found: dict[str, Any] = {}
    for section, values in content.items() if isinstance(content, dict) else [(content, None)]:
        if isinstance(section, str) and section in SECTIONS and values is None:
            continue  # nothing stands under it
        if isinstance(section, str) and section in SECTIONS and not isinstance(values, dict):
            raise UsageError(
                f"{path}: expected settings under '{section}', found {reprlib.repr(values)}",
                fix="write it so: query: {top: 20}",
            )
        if not isinstance(section, str) or section not in SECTIONS or not isinstance(values, dict):
            near = difflib.get_close_matches(reprlib.repr(section), SECTIONS, 1) or [", ".join(SECTIONS)]
            shown = section if isinstance(section, str) else reprlib.repr(section)
            raise UsageError(
                f"{path}: expected sections of settings, found '{shortened(shown, 60)}'",
                fix=f"a section is {near[0]}",
            )
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise UsageError(
                    f"{path}: there is no setting '{key}'",
                    fix=f"did you mean {near[0]}?" if near else "stride config show lists them",
                )
            found[key] = value
    return found


def _once() -> Any:
    """PyYAML's safe loader, to which a key that a mapping has twice is an error: it would take the last."""
    import yaml

    class Once(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in seen:
                        line = key.start_mark.line + 1
                        raise yaml.YAMLError(
                            f"'{shortened(key.value, 60)}' stands there twice, again in line {line}"
                        )
                    seen.add(key.value)
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Once


def _kinds(hint: Any) -> tuple[type, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _check(value: Any, hint: Any, key: str, where: str) -> Any:
    kinds = _kinds(hint)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 10**300 else math.inf  # which no option allows
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise UsageError(
            f"{where}: {key} is {reprlib.repr(value)} (expected a list of texts)",
            fix=f"write {key.partition('.')[2]}: [a, b]",
        )
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
    raise UsageError(
        f"{where}: {key} is {reprlib.repr(value)} (expected {names})", fix=f"write {key} as {names}"
    )


def _parse(text: str, hint: Any, variable: str) -> Any:
    """A variable's text as the setting's type."""
    kinds = _kinds(hint)
    if NoneType in kinds and text.lower() in ("", "null", "none"):
        return None
    try:
        if bool in kinds:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        for kind in (int, float):
            if kind in kinds:
                return kind(text)
        if list in kinds:
            return text.split(os.pathsep)
    except (KeyError, ValueError):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise UsageError(
            f"{variable} is {reprlib.repr(text)} (expected {names})", fix=f"unset {variable}"
        ) from None
    return text
