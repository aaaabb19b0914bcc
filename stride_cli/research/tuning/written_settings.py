"""Settings that a search chose, written to stride.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stride_cli.config import FILE_NAME


def write_settings(updates: Mapping[str, Any]) -> Path | None:
    """Write the working directory's stride.yaml; a file that is there is its owner's, and stays: None.

    Parameters
    ----------
    updates : key → value       for example ``{"train.layer": 8}``
    """
    import yaml

    from index_format.durable import replace_file

    path = Path(FILE_NAME)
    if path.exists():
        return None
    sections: dict[str, dict[str, Any]] = {}
    for key, value in updates.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    replace_file(path, yaml.safe_dump(sections, sort_keys=False).encode())
    return path
