"""Share work out to processes of this machine (`concurrent.futures`) or to tasks of a Ray cluster.

How to use it. The work is a function of one task that can be pickled (of an imported module, a method of a
dataclass, or a `functools.partial`). Tasks are any iterable, which is read as workers get free:

    with Workers(builder.build, count, engine="local") as workers:
        for number, built in workers.as_done(ranges):     # (number of the task, result)
            bar.advance()
        for answer in workers.in_order(prompts):          # the same workers, results in the tasks' order
            ...

At the end of the block, on an error and on Ctrl-C all workers end at once. One local worker is this process
itself, unless it is to be `apart`; it takes as many threads as a worker would, so the bits are the same. A
model or an index is opened by `opened_once` in `work`. What a task raises is raised here. A worker that is
killed is replaced and its task done again, three times at most. `default_workers` counts what memory and GPUs
have room for. Workers write to stderr only, and may do what this process may (environment, permissions).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from multiprocessing import connection, util
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from index_format.errors import IndexFormatError
from stride_cli.errors import StrideError, first_line, out_of_memory, require_extra
from stride_cli.output import note

Opened = TypeVar("Opened")

_ATTEMPTS = 3  # of one task whose worker is killed
_RAY_RETRIES = 10
_LARGE = 2 << 30  # bytes of a worker
# read before processes are forked, so that workers share it: no kernels of ours, nothing that asks a device
IMPORTS = ("torch", "safetensors.torch", "scipy.linalg", "torch._dynamo", "transformers.modeling_utils")


class Workers:
    """Processes or tasks of Ray that do `work` on tasks; see the head of this module.

    Parameters
    ----------
    work : callable           of one task; pickled, and sent to each worker once
    count : int, optional     at the same time; default: one a processor, or what a cluster has room for
    engine : "local" or "ray"
    threads : int             of torch and other libraries in each worker
    device : str              "cpu", or "cuda": every worker sees one GPU only
    peak_bytes : int          memory of one worker; 0: not known
    apart : bool              one local worker is a process of its own too

    Raises
    ------
    UsageError           an unknown engine
    MissingExtraError    "ray" without the package
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        count: int | None = None,
        *,
        engine: str = "local",
        threads: int = 1,
        device: str = "cpu",
        peak_bytes: int = 0,
        apart: bool = False,
    ) -> None:
        check_engine(engine)
        self._work, self._threads = work, threads
        self._pool: _Processes | _Ray | None = None
        self._closed, self._closing = False, threading.Lock()
        on_gpu = device.partition(":")[0] == "cuda"
        if engine == "ray":
            self._pool = _Ray(work, count, threads, on_gpu)
        elif apart or (count or available_cores()) > 1:
            count, keeps = count or available_cores(), peak_bytes <= _LARGE
            self._pool = _Processes(work, count, threads, on_gpu, keeps)
        _open.add(self)

    def as_done(self, tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (number of the task, its result) as tasks are done.

        Raises
        ------
        StrideError      a worker has no memory left, or was killed over the same task again and again
        and what `work` raises
        """
        arriving = enumerate(tasks)
        if self._pool is None:
            for number, task in arriving:
                with torch_threads(self._threads):
                    result = self._work(task)
                yield number, result
            return
        waiting: deque[tuple[int, Any]] = deque()
        running: dict[Any, tuple[int, Any]] = {}
        attempts: Counter[int] = Counter()
        while True:
            waiting.extend(islice(arriving, max(0, self._pool.ahead - len(running) - len(waiting))))
            try:
                while waiting:
                    handle = self._pool.submit(waiting[0][1])
                    running[handle] = waiting.popleft()
                if not running:
                    return
                done = self._pool.first(running)
                result = self._pool.result(done)
            except BrokenProcessPool:  # which takes all running tasks with it: any of them may be the cause
                if self._closed:
                    raise
                attempts.update(number for number, _ in running.values())
                if max(attempts.values(), default=_ATTEMPTS) >= _ATTEMPTS:
                    raise StrideError(
                        f"a worker was killed {_ATTEMPTS} times over the same work, or could not start",
                        fix="out of memory? use fewer --workers; what is finished is kept",
                    ) from None
                note("a worker was killed (out of memory?); its work is done again")
                waiting.extendleft(reversed(running.values()))
                running.clear()
                assert isinstance(self._pool, _Processes)
                self._pool.restart()
                continue
            if isinstance(result, _Failed):
                raise result.error
            yield running.pop(done)[0], result

    def in_order(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of tasks in their order; raises as `as_done`."""
        early: dict[int, Any] = {}
        following = 0
        for number, result in self.as_done(tasks):
            early[number] = result
            while following in early:
                yield early.pop(following)
                following += 1

    def close(self) -> None:
        """End all workers at once, whatever they are doing; let go of what was opened in this process.

        May be called by another thread than the one that waits for results, to which an error is raised.
        """
        global _last
        _open.discard(self)
        with self._closing:
            if self._pool is not None and not self._closed:
                self._closed = True
                self._pool.close()
        _last = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_open: weakref.WeakSet[Workers] = weakref.WeakSet()


def close_all() -> None:
    """End workers whose block has not ended: an error that is being handled may hold it suspended."""
    for workers in list(_open):
        workers.close()


def check_engine(name: str) -> None:
    """MissingExtraError for "ray" without its package."""
    if name != "local" and find_spec("ray") is None:
        raise require_extra("ray", "ray")


def default_workers(
    *, device: str = "cpu", peak_bytes: int = 0, most_on_gpu: int = 1, doing: str = "one"
) -> int:
    """Count the workers for which this machine has room.

    Parameters
    ----------
    device : str          "cuda": one on each GPU, or as many as it has memory for
    peak_bytes : int      memory of one worker; 0: not known
    most_on_gpu : int     most workers of one GPU
    doing : str           names the work in a message, for example "training one"
    """
    cores = available_cores()
    if device.partition(":")[0] == "cuda":
        gpus = _gpu_count()
        if most_on_gpu == 1 or not peak_bytes:
            return gpus
        import torch

        return gpus * max(1, min(most_on_gpu, cores // gpus, torch.cuda.mem_get_info()[0] // peak_bytes))
    free = available_bytes()
    if not peak_bytes or free is None or cores * peak_bytes <= free:
        return cores
    fewer = max(1, free // peak_bytes)
    note(
        f"{fewer} at a time: {doing} takes about {peak_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
        "available (--workers changes that)"
    )
    return fewer


def available_cores() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within: torch computes on so many threads. The same number gives the same order of sums, so the same
    bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_last: tuple[Hashable, Any] | None = None  # what this process opened last, and its key


def opened_once(key: Hashable, opener: Callable[[], Opened]) -> Opened:
    """Return what this process opened last if the key is the same; else open it, in place of the last.

    A task of Ray gets `work` anew, in a process that stays.
    """
    global _last
    if _last is None or _last[0] != key:
        _last = None  # freed before the next is opened
        _last = key, opener()
    opened: Opened = _last[1]
    return opened


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is gone (Linux; elsewhere nothing)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class _Processes:
    """A `ProcessPoolExecutor` whose workers end when told, or when this process ends, however it does.

    The executor waits for tasks that run, and its workers outlive a parent that is killed. So each worker
    watches a pipe of which this process holds the other end, and leaves when that is closed.
    """

    def __init__(
        self, work: Callable[[Any], Any], count: int, threads: int, on_gpu: bool, keeps_memory: bool
    ) -> None:
        self.ahead = 2 * count
        self._count, self._threads, self._keeps_memory = count, threads, keeps_memory
        self._work, self._context = pickle.dumps(work), worker_context(threads)
        self._gpus = _visible_gpus() if on_gpu else []
        self.restart()

    def restart(self) -> None:
        if hasattr(self, "_pool"):
            self.close()
        self._watched, self._held = self._context.Pipe(duplex=False)
        environment = dict(os.environ) | {
            "TOKENIZERS_PARALLELISM": "false",
            "STRIDE_NO_PROGRESS": "1",  # the bar is this process's
        }
        self._pool = ProcessPoolExecutor(
            self._count,
            self._context,
            initializer=_begin,
            initargs=(self._watched, environment, self._gpus, self._threads, self._keeps_memory, self._work),
        )

    def submit(self, task: Any) -> Future[Any]:
        try:
            with _without_main():  # which starts processes
                return self._pool.submit(_do, task)
        except OSError as error:  # "handle is closed", without a number: a worker died meanwhile
            if error.errno:
                raise
            raise BrokenProcessPool from error

    def first(self, running: Iterable[Future[Any]]) -> Future[Any]:
        return next(iter(wait(running, return_when=FIRST_COMPLETED).done))

    def result(self, handle: Future[Any]) -> Any:
        return handle.result()

    def close(self) -> None:
        self._held.close()
        self._watched.close()
        self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Within: processes that are started do not run this program's main module, which may have no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def worker_context(threads: int) -> Any:
    """On Linux processes are forked from one that has only imported; elsewhere each imports by itself.

    The first call decides how many threads libraries have that read it from the environment.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stride_cli.fork_server", *IMPORTS])
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


_work: Any = None  # of this worker: a function, or bytes that it is made of


def _begin(
    watched: connection.Connection,
    environment: dict[str, str],
    gpus: Sequence[str],
    threads: int,
    keeps_memory: bool,
    work: bytes,
) -> None:
    """Prepare a new worker process."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_leave_with, args=(watched,), daemon=True).start()
    os.dup2(2, 1)  # stdout is the parent's data; what a library prints is talk
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "numba" not in sys.modules:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)
    if gpus:  # in turn: processes are numbered as they are started
        number = int(multiprocessing.current_process().name.rpartition("-")[2])
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    if keeps_memory:
        keep_freed_memory()
    _work = work


def _leave_with(watched: connection.Connection) -> None:
    """End this process when the other end of a pipe is closed, by the parent or by its death."""
    with contextlib.suppress(EOFError, OSError):
        watched.recv_bytes()
    with contextlib.suppress(Exception):  # locks of numba and tqdm are semaphores, which would be left behind
        util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(1)


def keep_freed_memory() -> None:
    """Have glibc keep large blocks: asking the system for them again costs a page fault for every 4 KiB.

    Of a large model, whose matrix products take longer than that, what is kept falls to pieces: 10 GB, not 7.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def return_freed_memory() -> None:
    """Have glibc return what is free between blocks that are held: a stage left gigabytes that the next one,
    with blocks of another size, would not use."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _do(task: Any) -> Any:
    """Do one task in a worker process."""
    global _work
    try:
        if isinstance(_work, bytes):  # not before: what goes wrong here is a task's error
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            _work = pickle.loads(_work)
        return _work(task)
    except Exception as error:
        return _Failed.of(error)


@dataclass
class _Failed:
    """An error that was raised in a worker, and can be sent."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> _Failed:
        if isinstance(error, StrideError | IndexFormatError):
            return cls(error.with_traceback(None))
        if out_of_memory(error):
            fix = "use fewer --workers; what is finished is kept"
            return cls(StrideError(f"a worker has no memory left: {first_line(error)}", fix=fix))
        trace = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(RuntimeError(f"work failed in a worker:\n{trace}"))
        error.add_note(f"In a worker:\n{trace}")
        return cls(error.with_traceback(None))


class _Ray:
    """Does each task as one of Ray's, on the cluster of this process or on one that is started here."""

    def __init__(self, work: Callable[[Any], Any], count: int | None, threads: int, on_gpu: bool) -> None:
        import ray

        with contextlib.redirect_stdout(sys.stderr):
            self._ray, self._started = ray, not ray.is_initialized()
            try:
                if self._started:
                    ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
            except Exception as error:  # of many classes, which say what failed and not what helps
                fix = "start a cluster (ray start --head) and rerun, or leave out --engine ray"
                raise StrideError(f"Ray did not start: {first_line(error)}", fix=fix) from error
            kind = "GPU" if on_gpu else "CPU"
            # twice as many as there is room for: no worker waits for this process
            self.ahead = count or max(1, int(2 * ray.cluster_resources().get(kind, 1)))
            self._task = ray.remote(
                num_cpus=0 if on_gpu else 1, num_gpus=1 if on_gpu else 0, max_retries=_RAY_RETRIES
            )(_run_on_ray)
            self._work, self._threads = ray.put(work), threads
        self._running: set[Any] = set()

    def submit(self, task: Any) -> Any:
        handle = self._task.remote(self._work, task, self._threads)
        self._running.add(handle)
        return handle

    def first(self, running: Iterable[Any]) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return self._ray.wait(list(running), num_returns=1)[0][0]

    def result(self, handle: Any) -> Any:
        try:
            answer = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            raise StrideError(
                f"Ray could not do a part of the work: {first_line(error)}",
                fix="look at the cluster with `ray status`, and rerun: what is finished is kept",
            ) from error
        self._running.discard(handle)
        return answer

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            for handle in self._running:
                self._ray.cancel(handle, force=True)
            if self._started:
                self._ray.shutdown()


def _run_on_ray(work: Callable[[Any], Any], task: Any, threads: int) -> Any:
    """Do one task of Ray."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["STRIDE_NO_PROGRESS"] = "1"
    try:
        with torch_threads(threads):
            return work(task)
    except Exception as error:  # returned, for Ray would change its class
        return _Failed.of(error)


def _gpu_count() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _visible_gpus() -> Sequence[str]:
    """Names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    given = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return given or [str(number) for number in range(_gpu_count())]


def available_bytes(root: Path = Path("/")) -> int | None:
    """Measure the bytes that this process and its container (control group) can have without swapping.

    None where the system does not say.
    """
    free = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    left = [] if free is None else [free]
    for folder, limit, used in _memory_groups(root):
        with contextlib.suppress(OSError, ValueError):
            allowed = (folder / limit).read_text().strip()  # "max", or a huge number: none
            if allowed != "max":
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(cached.get("inactive_file", 0))
                left.append(max(0, int(allowed) - taken))
    return min(left, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Find this process's control groups and those above: folder, file of the limit, file of the use."""
    second, first = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, *(first if controllers else second)
            if folder == top:
                break
