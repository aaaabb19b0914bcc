"""Settings that a search chose, written to stride.yaml; its comments and all else stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stride_cli.config import FILE_NAME, SECTIONS, read_file
from stride_cli.errors import UsageError


def with_settings(text: str, updates: Mapping[str, Any]) -> str:
    """Change or add settings in the text of a stride.yaml; comments and all else stay.

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
    read_file(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = with_settings(text, updates)
    if changed != text:
        replace_file(path.resolve(), changed.encode())  # a link stays one
    return path
