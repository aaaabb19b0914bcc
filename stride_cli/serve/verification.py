"""Run `verify_hit` in a process of its own, tell how it goes on, and end it where that is asked for.

Models that were trained when it is ended are kept beside the index: to verify the same again goes on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.options import QueryOptions
from stride_cli.parallel import Workers, worker_context
from stride_cli.prove.options import HitOptions, HitQuestion
from stride_cli.serve.refusals import Refusal, error_record

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.schema.serve_records import VerificationRecord

_LOOK = 1.0  # seconds between two looks at how far it is
Wanted = tuple["WorkspacePath", HitQuestion, QueryOptions, HitOptions]  # as `verify_hit` takes them


class Verification:
    """One job, from its begin on.

    Attributes:
        name: str
        state: "running", "done", "failed" or "cancelled"
        result: a ``stride.verify_hit/1``, or a ``stride.error/1``; None as long as there is neither
    """

    def __init__(self, name: str, wanted: Wanted, told: Path) -> None:
        self.name, self.state, self.message = name, "running", ""
        self.result: Mapping[str, Any] | None = None
        self._told = told
        self._workers = Workers(partial(_verify, told=told), 1, apart=True)
        self._task = asyncio.create_task(asyncio.to_thread(self._run, wanted))

    def to_record(self) -> VerificationRecord:
        found = json.loads(self._told.read_text()) if self._told.exists() else {}
        return {
            "schema": "stride.verification/1",
            "id": self.name,
            "state": self.state,
            "done": found.get("done", 0.0),
            "total": found.get("total"),
            "message": self.message or found.get("message", "starting"),
        }

    async def events(self) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Tell what becomes of it: "progress" whenever it goes on, "alive" while it does not, then "result"
        or "error", then "end"."""
        told = None
        while True:
            record = self.to_record()
            yield ("alive", {}) if record == told else ("progress", record)
            told = record
            if self._task.done():
                break
            await asyncio.wait({self._task}, timeout=_LOOK)
        if self.result is not None:
            yield ("result" if self.state == "done" else "error"), self.result
        yield "end", self.to_record()

    async def cancel(self) -> None:
        """End it at once; what was trained is kept."""
        if self.state == "running":
            self.state = "cancelled"
            self.message = "cancelled: what was trained is kept, verify again to go on"
            await asyncio.to_thread(self._workers.close)
            await self._task

    def _run(self, wanted: Wanted) -> None:
        """Follow the process, in a thread."""
        try:
            with self._workers:
                (found,) = self._workers.in_order([wanted])
        except Exception as error:
            if self.state == "running":
                self.result = error_record(error)
                self.state, self.message = "failed", self.result["message"]
        else:
            self.state, self.message, self.result = "done", found["sentence"], found


class Verifications:
    """All jobs, by name."""

    def __init__(self) -> None:
        self._jobs: dict[str, Verification] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="stride-verify-", ignore_cleanup_errors=True)

    def begin(self, wanted: Wanted) -> Verification:
        """Begin a job; a `Refusal` where one runs already: training takes all cores."""
        if any(job.state == "running" for job in self._jobs.values()):
            raise Refusal(409, "a verification is running already", fix="wait for its end, or cancel it")
        name = secrets.token_hex(8)
        self._jobs[name] = Verification(name, wanted, Path(self._folder.name, name))
        return self._jobs[name]

    def find(self, name: str) -> Verification:
        if name not in self._jobs:
            raise Refusal(404, "there is no such verification", fix="POST /verify begins one")
        return self._jobs[name]

    async def close(self) -> None:
        for job in self._jobs.values():
            await job.cancel()
        self._folder.cleanup()


def _verify(wanted: Wanted, told: Path) -> Any:
    """Verify, in a process of its own; writes how far it is to a file, which is replaced as a whole."""
    worker_context(1)  # what trains is forked from it: it imports while the model is opened here
    from stride_cli.output import progress_told_to
    from stride_cli.prove.hit_record import verify_hit

    state: dict[str, Any] = {}

    def listen(description: str, done: float, total: float | None) -> None:
        counted = {"done": done, "total": total} if description == "retraining" else {}
        state.update(counted, message=description)
        fresh = told.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(told)

    with progress_told_to(listen):
        return verify_hit(*wanted)
