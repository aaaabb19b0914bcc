"""Where work runs: in this process, in processes of this machine, or as tasks of a Ray cluster.

Work is a `Trainer` with groups of jobs, or whatever else has its `prepare`, `run` and `peak_bytes`: what
builds ranges of a corpus, say.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexFormatError
from stride_cli.errors import StrideError, UsageError, first_line, out_of_memory, require_extra
from stride_cli.free_memory import available_bytes
from stride_cli.output import note
from stride_cli.permissions import Permissions, permitted, variable

if TYPE_CHECKING:
    from stride_cli.training.jobs import Job, Outcome, Trainer

Groups = Sequence[Sequence["Job"]]
Engine = Callable[["Trainer", Groups, int | None], Generator[tuple[int, "list[Outcome]"], None, None]]

_ATTEMPTS = 3  # of one group whose worker dies
_RAY_RETRIES = 10
_LARGE = 2 << 30  # bytes of training
_PR_SET_PDEATHSIG = 1
_FORKS = sys.platform == "linux"
_SERVE = "import sys; from stride_cli.training.engines import serve; serve(*map(int, sys.argv[1:]))"
# glibc gives large blocks back at once, and asking for them again costs a page fault for every 4 KiB. Of a
# large model, whose matrix products take longer than that, what is kept falls to pieces: 10 GB, not 7
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


def open_engine(name: str) -> Engine:
    """A function (trainer, groups of jobs, workers) → (number of the group, its outcomes), as they finish.

    Raises
    ------
    UsageError           no such engine
    MissingExtraError    "ray" without the package
    """
    if name == "local":
        return run_local
    if name == "ray":
        try:
            import ray  # noqa: F401
        except ImportError:
            raise require_extra("ray", "ray") from None
        return run_ray
    raise UsageError(f"--engine {name} is unknown", fix="one of local, ray")


def run_local(
    trainer: Trainer, groups: Groups, workers: int | None = None
) -> Generator[tuple[int, list[Outcome]], None, None]:
    """Train groups in `workers` processes of one thread each; in this one where a single worker is enough.

    A worker that dies (out of memory, say) is replaced and its group trained again, up to three times. The
    workers end when this process ends, however it ends.

    Who takes the outcomes may append to a list of groups meanwhile: work that needs what they say.

    Raises
    ------
    StrideError      what training raised in a worker, or a group whose workers died
    """
    count = min(workers or default_workers(trainer), len(groups))
    if count <= 1:
        for place, group in enumerate(groups):
            with one_thread():
                outcomes = trainer.run(group)
            yield place, outcomes
        return
    payload = pickle.dumps(trainer)
    given = 0  # groups that a worker has been sent
    attempts: Counter[int] = Counter()
    kept = {} if trainer.peak_bytes > _LARGE else KEEP_MEMORY
    spawners: list[_Spawner] = []

    def start(slot: int) -> _Worker:
        if not (_FORKS and spawners and spawners[-1].alive()):
            spawners.append(_Spawner(payload, _device_kind(trainer), kept))
        return spawners[-1].start(slot)

    pool: list[_Worker] = []
    try:
        pool.extend(start(slot) for slot in range(count))
        while True:
            for worker in pool:
                if worker.group is None and given < len(groups):
                    worker.send(given, groups)
                    given += 1
            if all(worker.group is None for worker in pool):
                break
            for ready in wait([worker.connection for worker in pool if worker.group is not None]):
                worker = next(worker for worker in pool if worker.connection is ready)
                number = worker.group
                assert number is not None
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    attempts[number] += 1
                    status = worker.stop()
                    if attempts[number] == _ATTEMPTS:
                        raise StrideError(
                            f"a worker died {_ATTEMPTS} times over the same work (last status {status})",
                            fix="out of memory? use fewer --workers; what is finished is kept",
                        ) from None
                    note(f"a worker died (status {status}); its work is done again")
                    pool[pool.index(worker)] = fresh = start(worker.slot)
                    fresh.send(number, groups)
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                worker.group = None
                if given < len(groups):
                    worker.send(given, groups)
                    given += 1
                yield number, answer
    finally:
        for worker in pool:
            worker.stop()
        for spawner in spawners:
            spawner.close()


def default_workers(trainer: Trainer) -> int:
    """One a processor that this process may use, as far as memory takes the trainer's `peak_bytes`; where its
    device is a GPU, one on each, or as many as the trainer says and the GPU has room for."""
    if _device_kind(trainer) == "cuda":
        return _gpu_count() * _on_one_gpu(trainer)
    count = available_cores()
    need, free = trainer.peak_bytes, available_bytes()
    if not need or free is None or count * need <= free:
        return count
    fewer = max(1, free // need)
    doing = getattr(trainer, "doing", "training one")
    note(
        f"{fewer} at a time: {doing} takes about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are available "
        "(--workers changes that)"
    )
    return fewer


def _on_one_gpu(trainer: Trainer) -> int:
    most, need = getattr(trainer, "on_one_gpu", 1), trainer.peak_bytes
    if most == 1 or not need:
        return 1
    import torch

    from stride_cli.operators.device_memory import free_bytes

    room = free_bytes(torch.device("cuda")) or 0
    return max(1, min(most, available_cores() // _gpu_count(), room // need))


def _gpu_count() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def available_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within: torch computes on one thread, so that sums are taken in the same order wherever it runs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it is gone (Linux; elsewhere nothing)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Spawner:
    """A process that has imported what training needs, holds the trainer, and forks the workers.

    So that libraries and chunks are read once and stand in memory once, however many workers there are. Where
    forking is not safe (everywhere but on Linux) each worker is such a process itself.
    """

    def __init__(self, payload: bytes, device: str, variables: dict[str, str]) -> None:
        self._device = device
        ours, theirs = socket.socketpair()
        environment = {
            **variables,
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "STRIDE_NO_PROGRESS": "1",  # the bar is this process's
            variable("trust_code"): "1",  # what the trainer runs was let run here, or it would not be here
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        # an interpreter of its own rather than multiprocessing's: it never runs the caller's main module
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._line = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it is already gone: the first worker will say so
            self._line.send_bytes(payload)

    def start(self, slot: int) -> _Worker:
        """A worker; one that could not be started has ended already."""
        ours, theirs = socket.socketpair()
        visible = None
        if self._device == "cuda":
            given = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            visible = given[slot % len(given)] if given else str(slot % _gpu_count())
        number = None
        with contextlib.suppress(OSError, EOFError):
            self._line.send(("start", visible))
            send_handle(self._line, theirs.fileno(), self._process.pid)
            number = self._line.recv()
        theirs.close()
        return _Worker(self, slot, Connection(ours.detach()), number)

    def end(self, number: int | None) -> int:
        """Kill a worker; its exit status, negative: the signal. The spawner's own where there is none."""
        with contextlib.suppress(OSError, EOFError):
            if number is not None and _FORKS:
                self._line.send(("end", number))
                return int(self._line.recv())
        return self.close()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """End it, and with it all workers; its exit status."""
        self._line.close()
        try:
            return self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(eq=False)
class _Worker:
    """A process that trains the groups it is sent, one after the other."""

    spawner: _Spawner
    slot: int
    connection: Connection
    number: int | None  # of the process
    group: int | None = None

    def send(self, number: int, groups: Groups) -> None:
        self.group = number
        with contextlib.suppress(OSError):  # it is already gone: the first answer will say so
            self.connection.send(list(groups[number]))

    def stop(self) -> int:
        """End the process, whatever it is doing; nothing of it is lost but the group at hand."""
        self.connection.close()
        return self.spawner.end(self.number)


def serve(descriptor: int, parent: int) -> None:
    """The spawner's side: a trainer comes in, then what to do."""
    die_with_parent()
    if os.getppid() != parent:  # it went before we could ask to be told
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    line = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        payload = line.recv_bytes()  # before anything slow: the parent waits for it to be taken
        trainer: Any
        try:
            trainer = pickle.loads(payload)
            trainer.prepare()
        except (ImportError, AttributeError) as error:
            trainer = error
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        del payload
        while True:
            what, value = line.recv()
            if what == "end":
                os.kill(value, signal.SIGKILL)
                line.send(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1]))
                continue
            handle = recv_handle(line)
            own = os.getpid()
            if not _FORKS:
                line.send(own)
                _work(Connection(handle), trainer)
                return
            number = os.fork()
            if number == 0:
                die_with_parent()
                if os.getppid() != own:
                    os._exit(0)
                line.close()
                if value is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = value
                _work(Connection(handle), trainer)
                os._exit(0)
            os.close(handle)
            line.send(number)


def _work(connection: Connection, trainer: Any) -> None:
    """The worker's side: groups of jobs come in; outcomes, or an error, go back."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs = connection.recv()
            try:
                answer: Any = _portable(trainer) if isinstance(trainer, Exception) else trainer.run(jobs)
            except Exception as error:
                answer = _portable(error)
            connection.send(answer)


def run_ray(
    trainer: Trainer, groups: Groups, workers: int | None = None
) -> Generator[tuple[int, list[Outcome]], None, None]:
    """Train groups as Ray tasks, of one CPU or, where the trainer's device is one, one GPU each.

    Connects to the cluster of RAY_ADDRESS, or the one running here; else starts one on this machine. Its
    nodes need stride-attribution, and the base model of a fine-tuning under the same path. A task whose
    worker or node dies is run again elsewhere; finished ones are not. Groups may grow, as `run_local`'s.
    """
    tasks = _on_ray(trainer, groups, workers)
    try:
        while True:
            # what Ray says of its nodes it prints, and stdout is for the data of who takes the outcomes
            with contextlib.redirect_stdout(sys.stderr):
                found = next(tasks, None)
            if found is None:
                return
            yield found
    finally:
        with contextlib.redirect_stdout(sys.stderr):
            tasks.close()


def _on_ray(
    trainer: Trainer, groups: Groups, workers: int | None
) -> Generator[tuple[int, list[Outcome]], None, None]:
    """`run_ray`, with what it says."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    try:
        yield from _ray_tasks(trainer, groups, workers)
    finally:
        if started:
            ray.shutdown()


def _ray_tasks(
    trainer: Trainer, groups: Groups, workers: int | None
) -> Generator[tuple[int, list[Outcome]], None, None]:
    import ray

    gpu = _device_kind(trainer) == "cuda"
    task = ray.remote(num_cpus=0 if gpu else 1, num_gpus=1 if gpu else 0, max_retries=_RAY_RETRIES)(
        _run_on_ray
    )
    shared = ray.put(trainer)
    total = ray.cluster_resources().get("GPU" if gpu else "CPU", 1)
    # twice as many as there is room for: no worker waits for this process
    limit = workers or max(1, int(2 * total))
    given = 0  # groups that are tasks by now
    running: dict[Any, int] = {}
    try:
        while given < len(groups) or running:
            while given < len(groups) and len(running) < limit:
                running[task.remote(shared, list(groups[given]))] = given
                given += 1
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                number = running.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise StrideError(
                        f"Ray could not do a part of the work: {str(error).splitlines()[0]}",
                        fix="look at the cluster with `ray status`, and rerun: what is finished is kept",
                    ) from error
                if isinstance(answer, BaseException):
                    raise answer
                yield number, answer
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _run_on_ray(trainer: Trainer, jobs: list[Job]) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["STRIDE_NO_PROGRESS"] = "1"
    try:
        # what the trainer runs was let run where it was made
        with one_thread(), permitted(Permissions(trust_code=True)):
            return trainer.run(jobs)
    except Exception as error:
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """An error that can be sent to another process and says there what it said here."""
    if isinstance(error, StrideError | IndexFormatError):
        return error.with_traceback(None)
    if out_of_memory(error):
        return StrideError(
            f"a worker has no memory left: {first_line(error)}",
            fix="use fewer --workers; what is finished is kept",
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return RuntimeError(f"work failed in a worker:\n{trace}")


def _device_kind(trainer: Trainer) -> str:
    """ "cpu" or "cuda": where the trainer computes."""
    return str(getattr(trainer, "device", "cpu")).partition(":")[0]
