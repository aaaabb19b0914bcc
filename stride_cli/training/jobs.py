"""Jobs of retraining (a subset of the chunks and a seed), their outcomes, and where these are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from index_format.durable import DirectoryLock, make_directory, replace_file, sync_directory
from stride_cli.output import note

_SCHEMA = "stride.outcome/1"
_SUFFIX = ".outcome"
_GROUP = ".group"


@dataclass(frozen=True, eq=False)
class Job:
    """One model to train: on these chunks, from this seed.

    Attributes
    ----------
    mask : (n,) bool
    seed : int      of initial weights and order
    """

    mask: np.ndarray
    seed: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """A retrained model's losses on the queries.

    Attributes
    ----------
    losses : (Q,) float64              mean nats per scored token
    margins : (Q,) float64 or None     classifiers: logit of the label − logsumexp of the others
    """

    losses: np.ndarray
    margins: np.ndarray | None = None


class Trainer(Protocol):
    """Trains models on subsets of a task's chunks; can be pickled, for it is sent to worker processes.

    Attributes
    ----------
    digest : str        SHA-256 in hex of all that decides an outcome besides mask and seed: recipe, corpus,
                        queries
    n_chunks : int      n
    at_once : int       how many jobs are trained together
    peak_bytes : int    about what that takes in memory; 0 = not known
    device : str        where a job is trained
    on_one_gpu : int    most groups of jobs that are trained side by side on a GPU, each in a process
    """

    digest: str
    at_once: int
    peak_bytes: int
    on_one_gpu: int

    @property
    def n_chunks(self) -> int: ...

    @property
    def device(self) -> str: ...

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Train one model per job, on one thread.

        A job's outcome depends on the jobs beside it to rounding only; the same jobs in the same order give
        the same bits.
        """
        ...


def job_key(digest: str, job: Job) -> str:
    """Hash a trainer's digest, the job's packed mask and its seed (SHA-256, hex)."""
    key = hashlib.sha256(digest.encode())
    key.update(np.int64(len(job.mask)).tobytes())
    key.update(np.packbits(np.asarray(job.mask, bool)).tobytes())
    key.update(np.int64(job.seed).tobytes())
    return key.hexdigest()


class OutcomeStore:
    """A directory of outcomes, held by one process at a time.

    A file is a line of JSON (schema, key, number of queries, whether there are margins, SHA-256 of the rest)
    and the losses, then the margins, as little-endian float64. A file that is not what it says is treated as
    absent. Jobs that are trained together are stored together: first in one file, which is then taken apart,
    so that a kill leaves all of them or none, and a resumed run forms the same groups.

    Parameters
    ----------
    directory : Path      made where missing

    Raises
    ------
    IndexBusy      another process is retraining there
    StorageFull    no space left
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        make_directory(self.directory)
        self._lock = DirectoryLock(self.directory)
        for group in sorted(self.directory.glob(f"*{_GROUP}")):
            self._take_apart(group)

    def read(self, key: str) -> Outcome | None:
        """Read the outcome of a job; None where there is none, or where its file is damaged."""
        path = self.directory / (key + _SUFFIX)
        if not path.is_file():
            return None
        outcome = _decode(key, path.read_bytes())
        if outcome is None:
            note(f"{path} is damaged: that model is trained again")
        return outcome

    def add(self, keys: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one group of jobs, all of them in one step."""
        files = [_encode(key, outcome) for key, outcome in zip(keys, outcomes, strict=True)]
        if len(files) == 1:
            replace_file(self.directory / (keys[0] + _SUFFIX), files[0])
        else:
            header = json.dumps([[key, len(data)] for key, data in zip(keys, files, strict=True)])
            group = self.directory / (hashlib.sha256("".join(keys).encode()).hexdigest() + _GROUP)
            replace_file(group, header.encode() + b"\n" + b"".join(files))
            self._take_apart(group)
        sync_directory(self.directory)

    def __enter__(self) -> OutcomeStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _take_apart(self, group: Path) -> None:
        header, _, rest = group.read_bytes().partition(b"\n")
        try:
            parts = json.loads(header)
            for key, length in parts:
                replace_file(self.directory / (key + _SUFFIX), rest[:length])
                rest = rest[length:]
        except (ValueError, TypeError):
            note(f"{group} is damaged: its models are trained again")
        sync_directory(self.directory)
        group.unlink()


def _encode(key: str, outcome: Outcome) -> bytes:
    rows = [outcome.losses] if outcome.margins is None else [outcome.losses, outcome.margins]
    data = np.stack(rows).astype("<f8").tobytes()
    header = {
        "schema": _SCHEMA,
        "key": key,
        "queries": len(outcome.losses),
        "margins": outcome.margins is not None,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return json.dumps(header).encode() + b"\n" + data


def _decode(key: str, content: bytes) -> Outcome | None:
    head, _, data = content.partition(b"\n")
    try:
        header = json.loads(head)
        shape = (2 if header["margins"] else 1, int(header["queries"]))
        whole = header["schema"] == _SCHEMA and header["key"] == key
        if not whole or header["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        rows = np.frombuffer(data, "<f8").reshape(shape).astype(np.float64)
    except (ValueError, KeyError, TypeError):
        return None
    return Outcome(rows[0], rows[1] if len(rows) == 2 else None)
