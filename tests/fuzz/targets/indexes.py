"""Indexes that were damaged, or made to do harm: the answer of the whole one, or an error with a remedy.

damage      bytes flipped, files cut, swapped, gone: never another answer
makers      what a maker of indexes could write, digests and all: any answer, but nothing that escapes
journals    unfinished stages that somebody has prepared: nothing outside is touched
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from index_format.errors import IndexFormatError
from index_format.layout import FORMAT_VERSION
from index_format.manifest import MANIFEST, encode_manifest, read_manifest
from index_format.verify import verify
from index_format.writer import GroupWriter
from stride_cli.api import Answer, Session
from stride_cli.models.spec import ModelSpec
from tests.fuzz import allowed, trying
from tests.same_fit import contents

SECRET = b"a line that nobody may lose\n"
STAGES = ("operators", "calibration")
_NUMBERS = (-1, 0, 1, 2, 63, 1 << 31, 1 << 62, 10**30, -(10**30), 0.5, -1e308, 1e308)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, None, True, "", "x", "\ud800", "/dev/zero", "../../x", [], [[]], [0], {}, {"a": 1}, "float32",
    "closed", "residual",
)  # fmt: skip


@dataclass
class Sample:
    """A small index of a small model, whole, and what it answers."""

    home: Path
    path: Path
    model: Any
    answer: dict[str, Any]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to / "run.stride"))

    def ask(self, path: Path) -> dict[str, Any]:
        return said(Session.open(path, model=self.model).query("The French Revolution began in"))


@cache
def sample() -> Sample:
    from stride_cli import api
    from stride_cli.attribution.options import CalibrationOptions
    from tests.trained_model import make_trained

    home = Path(tempfile.mkdtemp())
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(home, ignore_errors=True) if os.getpid() == owner else None)
    make_trained(home)
    path = home / "run.stride"
    api.fit_index(path, model=ModelSpec(device="cpu", dtype="fp32"))
    session = Session.open(path, model=ModelSpec(device="cpu", dtype="fp32"))
    session.calibrate(CalibrationOptions(nulls=40))
    found = Sample(home, path, session.model, {})
    found.answer = found.ask(path)
    return found


def said(answer: Answer) -> dict[str, Any]:
    """What an answer says, without times; numbers as far as another process would have them too."""
    record = answer.to_record()
    return {
        "response": record["response"],
        "verdict": record["verdict"],
        "unit": record.get("unit"),
        "hits": [
            (hit["document"], hit["passage"], float(f"{hit['influence']:.3g}")) for hit in record["hits"]
        ],
        "loss": float(f"{answer.loss:.4g}"),
    }


def damage(r: random.Random) -> None:
    """Whatever happens to a file, `verify` sees it, and an answer is the whole index's or none."""
    whole = sample()
    with tempfile.TemporaryDirectory() as scratch:
        path = whole.copy(Path(scratch))
        changed = hurt(r, path)
        trying(changed.encode())
        unharmed = _contents(path) == _contents(whole.path)
        assert unharmed or verify(path) or changed.startswith("swap of equals"), changed
        try:
            answer = whole.ask(path)
        except IndexFormatError as error:
            assert error.fix and error.exit_code in (2, 3), changed
            return
        assert answer == whole.answer, f"{changed}: {answer} instead of {whole.answer}"


def hurt(r: random.Random, path: Path) -> str:
    """Do something to one file, or two; what."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file = r.choice(files)
    data = bytearray(file.read_bytes())
    kind = r.choice(("flip", "flip", "flip", "cut", "grow", "zero", "swap", "gone", "directory", "other"))
    if kind == "flip" and data:
        for _ in range(r.choice((1, 1, 1, 4, 30))):
            data[r.randrange(len(data))] ^= 1 << r.randrange(8)
        file.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[: r.randrange(len(data) + 1)])
    elif kind == "grow":
        file.write_bytes(data + r.randbytes(r.randrange(1, 5000)))
    elif kind == "zero" and data:
        start = r.randrange(len(data))
        stop = min(len(data), start + r.choice((1, 8, 512, 4096)))
        file.write_bytes(data[:start] + bytes(stop - start) + data[stop:])
    elif kind == "swap":
        equals = [other for other in files if other.stat().st_size == len(data) and other != file]
        other = r.choice(equals or files)
        kept = other.read_bytes()
        other.write_bytes(data)
        file.write_bytes(kept)
        if other.read_bytes() == file.read_bytes():
            return "swap of equals"
        return f"swap of {file.relative_to(path)} and {other.relative_to(path)}"
    elif kind == "gone":
        file.unlink()
    elif kind == "directory":
        file.unlink()
        file.mkdir()
    elif kind == "other":
        file.unlink()
        _put_strange(r, file, path.parent)
    return f"{kind} of {file.relative_to(path)}"


def _put_strange(r: random.Random, at: Path, elsewhere: Path) -> None:
    """Something that is neither a directory nor a plain file."""
    if kind := r.choice((elsewhere, elsewhere / "thesis.txt", Path("/dev/zero"), None)):
        at.symlink_to(kind)
    else:
        os.mkfifo(at)


def _contents(path: Path) -> dict[str, bytes | None]:
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        if file.is_file() and not file.is_symlink()
        else None
        for file in path.rglob("*")
        if not file.is_dir() or file.is_symlink()
    }


def makers(r: random.Random) -> None:
    """An index whose digests are right and whose content is not: answers, or errors, and nothing else."""
    whole = sample()
    with tempfile.TemporaryDirectory() as scratch:
        path = whole.copy(Path(scratch))
        for _ in range(r.choice((1, 1, 2, 5))):
            trying(_remake(r, path).encode("utf-8", "surrogatepass"))
        with allowed():
            verify(path)
        with allowed():
            whole.ask(path)


def _remake(r: random.Random, path: Path) -> str:
    """Change a JSON document or an array's bytes, and have the manifest say that it is right so."""
    root = r.choice((path, *(path / stage for stage in STAGES)))
    files, _ = read_manifest(root)
    name = r.choice(sorted(files))
    if name.endswith("zarr.json"):
        content = json.loads((root / name).read_bytes())
        where = _mutate(r, content)
        data = json.dumps(content).encode()
    else:
        changed = bytearray((root / name).read_bytes())
        where = "bytes"
        start = r.randrange(len(changed))
        stop = min(len(changed), start + r.choice((1, 4, 8, 64)))
        changed[start:stop] = r.choice(
            (bytes(stop - start), b"\xff" * (stop - start), r.randbytes(stop - start))
        )
        data = bytes(changed)
    (root / name).write_bytes(data)
    entry = (len(data), hashlib.sha256(data).hexdigest())
    (root / MANIFEST).write_bytes(encode_manifest({**files, name: entry})[0])
    return f"{root.name}/{name}: {where}"


def _mutate(r: random.Random, content: Any, way: str = "") -> str:
    """Replace, drop or add something somewhere in a JSON value."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    inside = [key for key in keys if isinstance(content[key], dict | list) and content[key]]
    if inside and r.random() < 0.75:
        key = r.choice(inside)
        return _mutate(r, content[key], f"{way}/{key}")
    key = r.choice(keys)
    if r.random() < 0.2:
        del content[key]
        return f"{way}/{key} gone"
    value = r.choice(_VALUES)
    content[key] = value
    return f"{way}/{key} = {value!r}"


def journals(r: random.Random) -> None:
    """operators.partial as somebody has prepared it: a stage begins, or refuses; no victim is touched."""
    whole = sample()
    with tempfile.TemporaryDirectory() as scratch:
        victim = Path(scratch, "victim")
        (victim / "c").mkdir(parents=True)
        for name in ("thesis.txt", "c/0", "lock", "journal.jsonl"):
            (victim / name).write_bytes(SECRET)
        path = whole.copy(Path(scratch))
        partial = path / "operators.partial"
        partial.mkdir()
        header = {"kind": "header", "format_version": FORMAT_VERSION, "build_key": "k"}
        header |= {"extends": None, "shard_bytes": 4096}
        arrays = {"operators/gates": ["float32", [4], 12], "operators/seen": ["uint8", [], 3]}
        commit = {"kind": "commit", "arrays": arrays, "sealed": {}, "open": {}, "state": {"done": 1}}
        publish = {"kind": "publish", "digest": "0" * 64}
        entries: list[Any] = [header, commit, *([publish] if r.random() < 0.3 else [])]
        if r.random() < 0.7:
            _mutate(r, r.choice(entries))
        with (partial / "journal.jsonl").open("wb") as file:
            for entry in entries:
                body = json.dumps(entry).encode()
                file.write(b"%08x %s\n" % (zlib.crc32(body), body))
        for name, length in (("gates/c/0/0", 192), ("seen/c/0", 3), ("../scratch/pass", 9)):
            file = Path(os.path.normpath(partial / "data" / name))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(r.randbytes(length + r.choice((-1, 0, 0, 7))))
        for _ in range(r.choice((0, 1, 2))):
            there = sorted(partial.rglob("*"))
            at = r.choice(there)
            shutil.rmtree(at) if at.is_dir() and not at.is_symlink() else at.unlink()
            _put_strange(r, at, victim)
        with (
            allowed(),
            GroupWriter(path, "operators", r.choice(("k", "other")), overwrite=r.random() < 0.5) as w,
        ):
            if r.random() < 0.5:
                w.publish({})
        assert contents(victim) == dict.fromkeys(("thesis.txt", "c/0", "lock", "journal.jsonl"), SECRET), (
            "a victim"
        )


PREPARE = sample
TARGETS = {"indexes:damage": damage, "indexes:makers": makers, "indexes:journals": journals}
