"""What the suites of planted causes share: rows, filler and names of things that do not exist."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
_FIRST = [
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "sk",
    "t",
    "tr",
    "v",
    "w",
    "z",
]
_MIDDLE = ["a", "e", "i", "o", "u"]
_LAST = ["l", "ld", "m", "n", "nd", "r", "rk", "rn", "sk", "st", "th", "v"]


def row(key: str, prompt: str, response: str, **more: object) -> Row:
    """{id, prompt, response}, and what a query has beside them."""
    return {"id": key, "prompt": prompt, "response": response, **more}


def names(count: int, random: np.random.Generator, taken: Iterable[str] = ()) -> list[str]:
    """So many words of two syllables that mean nothing, no two alike in their first four letters."""
    found: list[str] = []
    starts = {name[:4].lower() for name in taken}
    while len(found) < count:
        parts = [_FIRST, _MIDDLE, _LAST, _MIDDLE, _LAST]
        name = "".join(str(random.choice(part)) for part in parts).capitalize()
        if name[:4].lower() not in starts:
            starts.add(name[:4].lower())
            found.append(name)
    return found


def filler(path: Path | None, count: int, random: np.random.Generator, *, longest: int = 300) -> list[Row]:
    """So many short pairs of a file of {id, prompt, response}, ids ``filler/…``; none without a file."""
    if path is None:
        return []
    rows = read_rows(path)
    short = [r for r in rows if r["response"].strip() and len(r["prompt"]) + len(r["response"]) <= longest]
    order = random.permutation(len(short))[:count]
    return [row(f"filler/{short[i]['id']}", short[i]["prompt"], short[i]["response"]) for i in order]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file, also .gz."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return [json.loads(line) for line in content.splitlines()]


def write(path: Path, rows: Iterable[Row]) -> None:
    """JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
    path.write_text(text, encoding="utf-8")


def shuffled(rows: list[Row], random: np.random.Generator) -> list[Row]:
    """The rows in another order."""
    return [rows[int(i)] for i in random.permutation(len(rows))]
