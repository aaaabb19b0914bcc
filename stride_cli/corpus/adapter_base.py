"""Find the base model of a LoRA adapter that PEFT saved; nothing of either is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stride_cli.errors import ModelError
from stride_cli.remembered import recall, remember

ADAPTER_CONFIG = "adapter_config.json"
# a variable, so that processes that are started know it too
_BASE_OF_ADAPTER = "STRIDE_BASE_OF_ADAPTER"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def names_hub(given: str) -> bool:
    """Tell whether a string can be a model of the hub, and no path."""
    looks_local = given.startswith((".", "/", "~")) or given.endswith(".gguf")
    return not looks_local and _HUB_ID.fullmatch(given) is not None


def is_adapter(path_or_id: str | Path) -> bool:
    """Tell whether a path is that of an adapter without its base model."""
    path = Path(path_or_id).expanduser()
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


@contextmanager
def based_on(adapter: str, base: str | None) -> Iterator[None]:
    """Put the adapter at a path on a base model, within and in processes that are started.

    Afterwards it is remembered, for where the adapter names a base that is not on this machine. None: the
    base that it names.
    """
    before = os.environ.get(_BASE_OF_ADAPTER)
    if base is not None:
        known = Path(base).expanduser()
        base = str(known.absolute()) if known.exists() else base
        place = _place(Path(adapter))
        os.environ[_BASE_OF_ADAPTER] = json.dumps([place, base])
    try:
        yield
        if base is not None:
            remember("bases", hashlib.sha256(place.encode()).hexdigest(), base)
    finally:
        if base is not None and before is None:
            del os.environ[_BASE_OF_ADAPTER]
        elif before is not None:
            os.environ[_BASE_OF_ADAPTER] = before


def _place(adapter: Path) -> str:
    return str(adapter.expanduser().resolve())


def adapter_config(given: str, path: Path) -> dict[str, Any]:
    """Read the configuration of the adapter at `path`; ModelError, naming `given`, where it is damaged."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{ADAPTER_CONFIG} of adapter '{given}' cannot be read: {error}", fix="copy it again"
        ) from None
    return config


def base_name(adapter: Path) -> tuple[str | None, bool]:
    """Find the path or hub id of an adapter's base model, or None; and whether the user has given it.

    The one that was given with it; the one that it names, there or beside the adapter; the one that it was
    last given with.
    """
    place = _place(adapter)
    given = os.environ.get(_BASE_OF_ADAPTER)
    if given is not None and json.loads(given)[0] == place:
        return str(json.loads(given)[1]), True
    named = adapter_config(str(adapter), adapter).get("base_model_name_or_path")
    if isinstance(named, str) and named:
        path = Path(named).expanduser()
        for found in (path, adapter.parent / path, adapter.parent / path.name):
            if found.exists() and _place(found) != place:
                return str(found), False
    known = recall("bases", hashlib.sha256(place.encode()).hexdigest())
    if known is not None and (Path(known).exists() or names_hub(known)):
        return known, True
    return (named if isinstance(named, str) and names_hub(named) else None), False
