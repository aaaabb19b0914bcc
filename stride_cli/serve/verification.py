"""Verifications: `verify-hit` in a process of its own, told as it goes on, and ended where that is asked for.

The process reads what it is to do from stdin and tells, in lines of JSON on stdout, what becomes of it:

    python -m stride_cli.serve.verification

Models that were trained when it is ended are kept beside the index: to verify the same again goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from stride_cli.errors import EXIT_DONE, EXIT_USAGE
from stride_cli.serve.refusals import Refusal, error_record

if TYPE_CHECKING:
    from stride_cli.schema.serve_records import VerificationRecord

_KEPT, _AT_ONCE = 32, 1  # jobs that are remembered; that run side by side
_ALIVE = 2.0  # seconds after which who listens is told that it goes on, though nothing new is known
_PATIENCE = 5.0  # seconds between asking the process to end, and ending it


class Verification:
    """One job, as far as it has come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "running"
        self.done, self.total, self.message = 0.0, None, "starting"
        self.result: dict[str, Any] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    def to_record(self) -> VerificationRecord:
        return {
            "schema": "stride.verification/1",
            "id": self.name,
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "message": self.message,
        }

    async def begin(self, wanted: Mapping[str, Any]) -> None:
        """Start the process that does what is wanted (see `verify_as_told`)."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stride_cli.serve.verification"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # with all that it starts, it is ended as one
            limit=1 << 26,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode())
        self._process.stdin.close()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            async with self._changed:
                self.done, self.total = told.get("done", self.done), told.get("total", self.total)
                self.message = told.get("message", self.message)
                self.result = told.get("result", self.result)
                self._changed.notify_all()
        code = await self._process.wait()
        async with self._changed:
            if self.state == "running":
                self.state = "done" if code == EXIT_DONE and self.result is not None else "failed"
            if self.result is None and self.state == "failed":
                lost = Refusal(500, f"the process that verified ended with {code}", fix="verify again")
                self.result = dict(error_record(lost))
            if self.state == "failed" and self.result is not None:
                self.message = str(self.result.get("message", self.message))
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """What becomes of it: "progress" whenever it goes on, then "result" or "error", then "end"."""
        told: Any = None
        while True:
            record = self.to_record()
            if record != told:
                told = record
                yield "progress", record
            if self.state != "running":
                break
            async with self._changed:
                if self.to_record() == told:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _ALIVE)
            if self.to_record() == told:
                yield "alive", {}
        if self.result is not None:
            yield ("result" if self.state == "done" else "error"), self.result
        yield "end", self.to_record()

    async def cancel(self) -> None:
        """End it, as Ctrl-C would; what was trained is kept."""
        if self.state != "running" or self._process is None:
            return
        self.state, self.message = "cancelled", "cancelled: what was trained is kept, verify again to go on"
        self._signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _PATIENCE)
        self._signal(signal.SIGKILL)
        if self._task is not None:
            await self._task

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Verifications:
    """All jobs, by name."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Verification] = OrderedDict()

    async def begin(self, wanted: Mapping[str, Any]) -> Verification:
        """A new job; a `Refusal` where one runs already: training takes all cores."""
        if sum(job.state == "running" for job in self._jobs.values()) >= _AT_ONCE:
            raise Refusal(409, "a verification is running already", fix="wait for its end, or cancel it")
        job = Verification(secrets.token_hex(8))
        self._jobs[job.name] = job
        while len(self._jobs) > _KEPT:
            oldest = next(name for name, each in self._jobs.items() if each.state != "running")
            del self._jobs[oldest]
        await job.begin(wanted)
        return job

    def find(self, name: str) -> Verification:
        if name not in self._jobs:
            raise Refusal(404, "there is no such verification", fix="POST /verify begins one")
        return self._jobs[name]

    async def close(self) -> None:
        for job in self._jobs.values():
            await job.cancel()


def verify_as_told() -> int:
    """What the process does: reads an object from stdin, and tells lines of JSON on stdout.

    The object has "index", "model", "device" and "dtype", what `HitQuestion` has, and "options" and "check",
    values of `QueryOptions` and `HitOptions`. Lines have "done", "total" and "message", the last "result".
    """
    from index_format.location import locate
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.output import progress_told_to, to_json
    from stride_cli.prove.hit_record import verify_hit
    from stride_cli.prove.options import HitOptions, HitQuestion

    wanted = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # what libraries and trainers print is not for who reads these lines

        def tell(record: Mapping[str, Any]) -> None:
            lines.write(to_json(record) + "\n")
            lines.flush()

        def listen(description: str, done: float, total: float | None) -> None:
            told = {"done": done, "total": total} if description == "retraining" else {}
            tell({**told, "message": description})

        place = WorkspacePath(locate(wanted["index"]), wanted["model"], wanted["device"], wanted["dtype"])
        question = HitQuestion(**{key: wanted[key] for key in ("prompt", "response", "span", "documents")})
        try:
            with progress_told_to(listen):
                found = verify_hit(
                    place, question, QueryOptions(**wanted["options"]), HitOptions(**wanted["check"])
                )
        except Exception as error:
            tell({"result": error_record(error)})
            return EXIT_USAGE
        tell({"result": found, "message": found["sentence"]})
    return EXIT_DONE


if __name__ == "__main__":
    from stride_cli.startup import own_process, share_cores

    own_process()
    share_cores()
    sys.exit(verify_as_told())
