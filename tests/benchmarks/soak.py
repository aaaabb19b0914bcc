"""A day's work over and over, killed at random moments and on full disks: is anything lost?

A small corpus is trained on, indexed, fitted, calibrated, asked about, appended to, fitted again, and asked
about again, by commands; once without interruption, and then for `--minutes` with kill -9 at random moments
of every command that writes (the same command goes on), and, where a small tmpfs can be mounted, disks that
are full meanwhile. After each interruption what is there must verify, and a query of it gives the old answer
or the new one, or says what to run. At the end of each loop bytes and answers are those of the steps without
interruption, and no file is left over. Beside that one process, `stride query -`, answers the same prompt
from the beginning to the end: its memory stays flat.

One record; exit code 1 where anything was wrong. ``resumes`` are commands that end what an interrupted one
has begun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from index_format.errors import IndexFormatError
from index_format.reader import Index
from index_format.verify import verify
from stride_cli.output import emit
from tests.benchmarks._machine import machine, resident
from tests.prepared import Prepared
from tests.same_fit import assert_same_fit

CORPUS = Path(__file__).parents[2] / "stride_cli" / "demo" / "corpus.jsonl"
PROMPT = "The French Revolution began in"
KILLS = 4  # of one step, at most
_SLACK = 120.0  # seconds after which a command hangs that takes two
_WARM = 10  # answers, after which a process's memory should be flat
_TOLD = 10
_DISK = 256 << 20  # bytes of the file system that is filled
_SMALL = (
    "--layers 2 --width 32 --heads 2 --vocab 512 --context 64 --batch-tokens 256 --device cpu --dtype fp32"
)


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes
    ----------
    over : what the command may say, with exit code 2, where it was killed when it was done
    leaves : what is there afterwards
    """

    name: str
    line: str
    over: tuple[str, ...]
    leaves: str


STEPS = (
    Step("model", f"model train corpus.jsonl --out model --epochs 0.7 {_SMALL}", ("exists",), "model"),
    Step("build", "index build corpus.jsonl --model model --commit-seconds 0", ("exists",), "run.stride"),
    Step(
        "train",
        "train --save-seconds 0 --no-calibration --device cpu --dtype fp32",
        ("has operators already",),
        "run.stride/operators",
    ),
    Step("calibrate", "calibrate --nulls 20 --device cpu --dtype fp32", (), "run.stride/calibration"),
    Step("query", "", (), ""),
    Step(
        "append",
        "index append more.jsonl",
        ("already", "first at the index that is appended to"),
        "run.stride",
    ),
    Step(
        "train again",
        "train --save-seconds 0 --no-calibration --overwrite --device cpu --dtype fp32",
        (),
        "run.stride/operators",
    ),
    Step("calibrate again", "calibrate --nulls 20 --device cpu --dtype fp32", (), "run.stride/calibration"),
    Step("query again", "", (), ""),
)


@dataclass
class Undisturbed:
    """What the steps give without interruption: times, answers and sizes by step."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # None: it says what to run
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of the directory


class Soak:
    """Commands in one directory, and what is wrong with what they leave."""

    def __init__(self, home: Path, prepared: Prepared, seed: int) -> None:
        self.home, self._prepared, self._random = home, prepared, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.temporary = home / "temporary"
        for name in ("temporary", "cache", "state"):
            (home / name).mkdir()
        from stride_cli.startup import kernel_cache

        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_STATE_HOME": str(home / "state"),
            "NUMBA_CACHE_DIR": str(kernel_cache() or ""),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "STRIDE_NO_PROGRESS": "1",
        }

    # ---- steps ----

    def undisturbed(self) -> Undisturbed:
        whole = Undisturbed(self._fill(self.home / "whole"))
        for step in STEPS:
            began = time.monotonic()
            before = set(self.temporary.rglob("*"))
            if step.line:
                code, said = self._finish(self._start(step.line, whole.folder), step.name)
                assert code == 0, f"{step.name}: {said}"
            whole.seconds[step.name] = time.monotonic() - began
            whole.sizes[step.name] = _size(whole.folder)
            if step.name != "model":
                whole.answers[step.name] = self.ask(whole.folder)
            if step.name in ("build", "append"):
                shutil.copytree(
                    whole.folder / "run.stride",
                    self.home / step.name,
                    ignore=shutil.ignore_patterns("operators", "calibration"),
                )
            if left := set(self.temporary.rglob("*")) - before:
                self._wrong("leftovers", f"{step.name} leaves {sorted(map(str, left))[:3]}")
        return whole

    def loop(self, number: int, whole: Undisturbed, *, until: float) -> bool:
        """All steps, disturbed; whether they were done before the time was over."""
        folder = self.home / "loop"
        folder.mkdir()
        with _small_disk(folder) as disk:
            self._fill(folder)
            earlier: dict[str, Any] | None = None
            for step in STEPS:
                if time.monotonic() > until:
                    return False
                if step.line:
                    self._disturb(step, folder, whole, disk, earlier)
                if step.name != "model":
                    expected = whole.answers[step.name]
                    if not _same(self.ask(folder), expected):
                        self._wrong("wrong_answers", f"loop {number}: another answer after {step.name}")
                    self._verify(folder, f"loop {number}, after {step.name}")
                    earlier = expected
                if step.name in ("build", "append"):
                    self._compare(
                        folder / "run.stride", self.home / step.name, step.name, ("operators", "calibration")
                    )
            self._compare_all(folder, whole.folder, number)
        shutil.rmtree(folder)
        self.counts["loops"] += 1
        return True

    def _disturb(
        self, step: Step, folder: Path, whole: Undisturbed, disk: _Disk, earlier: dict[str, Any] | None
    ) -> None:
        """Run a command to its end, killed and with a full disk on the way."""
        killed = refused = 0
        if disk.mounted and self._random.random() < 0.3:
            growth = max(0, whole.sizes[step.name] - whole.sizes.get(_before(step), 0))
            with disk.full(int(self._random.uniform(0, 1.2) * growth)):
                code, said = self._finish(self._start(step.line, folder), step.name)
            if code == 0:
                return
            self.counts["full_disks"] += 1
            if code != 2 or "fix: " not in said:
                self._wrong("refusals", f"{step.name} with a full disk ends with {code}: {said}")
            self._look(step, folder, whole, earlier)
            refused = 1
        while killed < KILLS and self._random.random() < 0.75:
            process = self._start(step.line, folder)
            # mostly while it works, sometimes at its very end
            moment = time.monotonic() + self._random.uniform(0.02, 1.1) * whole.seconds[step.name]
            while time.monotonic() < moment and process[0].poll() is None:
                time.sleep(0.002)
            if process[0].poll() is not None:
                code, said = self._finish(process, step.name)
                self._check_end(step, code, said, folder, resumed=killed + refused > 0)
                return
            process[0].send_signal(9)
            self._finish(process, step.name)
            killed += 1
            self.counts["kills"] += 1
            self._look(step, folder, whole, earlier)
        code, said = self._finish(self._start(step.line, folder), step.name)
        self._check_end(step, code, said, folder, resumed=killed + refused > 0)

    def _check_end(self, step: Step, code: int, said: str, folder: Path, *, resumed: bool) -> None:
        if resumed:
            self.counts["resumes"] += 1
        over = resumed and code == 2 and any(words in said for words in step.over)
        if not (code == 0 or over) or not (folder / step.leaves).exists():
            self._wrong("refusals", f"{step.name} ends with {code}: {said}")

    def _look(self, step: Step, folder: Path, whole: Undisturbed, earlier: dict[str, Any] | None) -> None:
        """After an interruption: what is there is whole, and gives the old answer or the new one, or none."""
        if not (folder / "run.stride").exists():
            return
        self._verify(folder, f"after {step.name} was interrupted")
        found = self.ask(folder)
        if not any(_same(found, each) for each in (earlier, whole.answers.get(step.name))):
            self._wrong("wrong_answers", f"another answer where {step.name} was interrupted: {found}")

    # ---- looks ----

    def ask(self, folder: Path) -> dict[str, Any] | None:
        """What a query in the directory gives; None where it says that a stage is missing."""
        code, said, out = self._finish_all(
            self._start(f'query "{PROMPT}" --json --device cpu --dtype fp32', folder), "query"
        )
        if code == 2 and "stride train" in said and "fix: " in said:
            return None
        if code:
            self._wrong("wrong_answers", f"a query ends with {code}: {said}")
            return {"failed": said}
        return answer_of(json.loads(out))

    def _verify(self, folder: Path, when: str) -> None:
        try:
            problems = [problem.message for problem in verify(folder / "run.stride")]
            Index.open(folder / "run.stride").check_bounds()
        except IndexFormatError as error:
            problems = [str(error)]
        if problems:
            self._wrong("verify_failures", f"{when}: {problems[:3]}")

    def _compare(self, found: Path, expected: Path, name: str, ignored: Sequence[str] = ()) -> None:
        """Two directories have the same files with the same bytes."""
        ours, theirs = _contents(found, ignored), _contents(expected, ignored)
        differing = [each for each in ours.keys() & theirs.keys() if ours[each] != theirs[each]]
        if differing:
            self._wrong("differing_bytes", f"{name}: {differing[:3]}")
        if missing := sorted(theirs.keys() - ours.keys()):
            self._wrong("differing_bytes", f"{name}: {missing[:3]} missing")
        if left := sorted(ours.keys() - theirs.keys()):
            self._wrong("leftovers", f"{name}: {left[:3]}")

    def _compare_all(self, folder: Path, whole: Path, number: int) -> None:
        """All files; those of stages whose numbers come from torch's forward pass, by their numbers."""
        measured = ("operators", "calibration")
        self._compare(folder, whole, f"loop {number}", measured)
        try:
            assert_same_fit(folder / "run.stride/operators", whole / "run.stride/operators")
        except AssertionError as error:
            self._wrong("differing_bytes", f"loop {number}: operators: {str(error)[:300]}")
        ours, theirs = (Index.open(each / "run.stride") for each in (folder, whole))
        if ours.names("calibration") != theirs.names("calibration"):
            self._wrong("differing_bytes", f"loop {number}: arrays of calibration")
        for name in theirs.names("calibration"):
            if not np.allclose(ours.array(name), theirs.array(name), rtol=1e-4, atol=1e-5, equal_nan=True):
                self._wrong("differing_bytes", f"loop {number}: {name}")

    def _wrong(self, kind: str, told: str) -> None:
        self.counts[kind] += 1
        self.failures.append(f"{kind}: {told}")
        print(f"soak: {kind}: {told}", file=sys.stderr, flush=True)

    # ---- processes ----

    def _fill(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()[:80]]
        for name, chosen in (("corpus", rows[:60]), ("more", rows[60:])):
            lines = (json.dumps({"id": row["id"], "text": row["text"][:160]}) + "\n" for row in chosen)
            (folder / f"{name}.jsonl").write_text("".join(lines))
        return folder

    def _start(self, line: str, folder: Path, **streams: Any) -> tuple[Any, Any, Any]:
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115  (both are closed when the command has ended)
        err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        given = {"stdout": out, "stderr": err} | streams
        process = self._prepared.start(
            ["stride", *shlex.split(line)], cwd=folder, env=self.environment, **given
        )
        return process, out, err

    def _finish(self, started: tuple[Any, Any, Any], name: str) -> tuple[int, str]:
        return self._finish_all(started, name)[:2]

    def _finish_all(self, started: tuple[Any, Any, Any], name: str) -> tuple[int, str, str]:
        """Exit code, the end of stderr, and stdout; a command that does not end is killed."""
        process, out, err = started
        late = time.monotonic() + _SLACK
        while process.poll() is None:
            if time.monotonic() > late:
                self._wrong("hangs", f"{name} does not end")
                process.send_signal(9)
                process.wait()
                break
            time.sleep(0.005)
        with out, err:
            out.seek(0)
            err.seek(0)
            said = err.read()
            if "Traceback" in said:
                self._wrong("tracebacks", f"{name}: {said[-600:]}")
            return process.returncode, said[-1000:], out.read()


class Service:
    """`stride query -`: one process that answers from the beginning to the end."""

    def __init__(self, soak: Soak, folder: Path, expected: dict[str, Any] | None) -> None:
        ours, self._write = os.pipe()
        self._read, theirs = os.pipe()
        self._process, _, self._err = soak._start(
            "query - --json --device cpu --dtype fp32", folder, stdin=ours, stdout=theirs
        )
        os.close(ours)
        os.close(theirs)
        self._answers = os.fdopen(self._read, encoding="utf-8")
        self._soak, self._expected = soak, expected
        self.count = 0
        self.memory: list[dict[str, int]] = []
        for _ in range(_WARM):
            self.ask()

    def ask(self) -> None:
        os.write(self._write, f"{PROMPT}\n".encode())
        if not _same(answer_of(json.loads(self._answers.readline())), self._expected):
            self._soak._wrong("wrong_answers", "of the process that goes on answering")
        self.count += 1
        self.memory.append(resident(self._process.pid))

    def close(self) -> dict[str, Any]:
        os.close(self._write)
        code = self._process.wait()
        self._answers.close()
        if code:
            self._soak._wrong("refusals", f"the process that goes on answering ends with {code}")
        first, last = (self.memory[place]["anonymous"] for place in (_WARM - 1, -1))
        return {"answers": self.count, "first_bytes": first, "last_bytes": last, "ratio": last / first}


class _Disk:
    """A file system of its own whose size can be changed, where it could be mounted."""

    def __init__(self, at: Path, mounted: bool) -> None:
        self._at, self.mounted = at, mounted

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Within, there is room for so many bytes."""
        used = shutil.disk_usage(self._at).used
        self._resize(used + max(4096, left))
        try:
            yield
        finally:
            self._resize(_DISK)

    def _resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self._at)], check=True)


@contextlib.contextmanager
def _small_disk(at: Path) -> Iterator[_Disk]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(at)]
    mounted = (
        shutil.which("mount") and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    try:
        yield _Disk(at, bool(mounted))
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(at)], check=False)  # files may still be mapped


def answer_of(record: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, without what depends on when it was asked."""
    return {
        "response": record["response"],
        "verdict": record["verdict"],
        "hits": [(hit["document"], hit["passage"]) for hit in record["hits"]],
        "influences": [hit["influence"] for hit in record["hits"]],
    }


def _same(found: dict[str, Any] | None, expected: dict[str, Any] | None) -> bool:
    if found is None or expected is None or "failed" in found:
        return found is expected
    exact = ("response", "verdict", "hits")
    return all(found[key] == expected[key] for key in exact) and np.allclose(
        found["influences"], expected["influences"], rtol=1e-3, atol=1e-9
    )


def _before(step: Step) -> str:
    names = [each.name for each in STEPS]
    return names[names.index(step.name) - 1] if step.name != names[0] else ""


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _contents(folder: Path, ignored: Sequence[str]) -> dict[str, bytes | None]:
    """Every file, and every empty directory, but for those below what is ignored."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not set(path.relative_to(folder).parts) & set(ignored)
        and (path.is_file() or not any(path.iterdir()))
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    record = run(given.minutes, given.seed)
    emit(record)
    return 1 if record["failures"] else 0


def run(minutes: float, seed: int) -> dict[str, Any]:
    """One soak's record."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stride-soak-") as folder:
        home = Path(folder)
        prepared = Prepared(home / "tools")
        try:
            soak = Soak(home, prepared, seed)
            whole = soak.undisturbed()
            service = Service(soak, whole.folder, whole.answers["query again"])
            until = began + 60 * minutes
            number = 0
            while soak.loop(number, whole, until=until):
                number += 1
                service.ask()
            growth = service.close()
        finally:
            prepared.close()
        counts = (
            "loops", "kills", "resumes", "full_disks", "verify_failures", "wrong_answers", "differing_bytes",
            "leftovers", "refusals", "tracebacks", "hangs",
        )  # fmt: skip
        return {
            "benchmark": "soak",
            "command": f"python -m tests.benchmarks soak --minutes {minutes:g} --seed {seed}",
            "minutes": round((time.monotonic() - began) / 60, 2),
            "seed": seed,
            **{name: soak.counts[name] for name in counts},
            "rss_growth": growth,
            "steps": {name: round(seconds, 2) for name, seconds in whole.seconds.items()},
            "failures": len(soak.failures),
            "failed": soak.failures[:_TOLD],
        } | machine("torch", "transformers", "numpy", "zarr")
