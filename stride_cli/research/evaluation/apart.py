"""One method run in a process of its own, so that its memory is its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.errors import IndexFormatError
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import StrideError, first_line
from stride_cli.research.evaluation.bench import Bench
from stride_cli.research.evaluation.scoring import Run, run_method

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def run_apart(
    where: WorkspacePath, spec: str, *, alpha: float, rows: np.ndarray, source: Path | None = None
) -> Run:
    """`run_method` on queries of the index's truth, in a process of its own, so that its memory is its own.

    Parameters
    ----------
    alpha : float               which subsets
    rows : (q,) int64           which of the truth's queries
    source : Path, optional     the file of queries: a classifier has to read it to know their inputs

    Raises
    ------
    what `run_method` raises; StrideError where the process dies
    """
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(theirs, where, spec, alpha, rows, source))
    child.daemon = True
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        child.join()
        code = child.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        raise StrideError(
            f"the process that ran '{spec}' {how}", fix="it may have run out of memory: give it fewer queries"
        ) from None
    finally:
        ours.close()
        if child.is_alive():
            child.join(timeout=5)
        if child.is_alive():
            child.terminate()
        child.join()
    if isinstance(answer, Run):
        return answer
    kind, message, fix = answer
    error = StrideError(message, fix=fix)
    error.__cause__ = RuntimeError(kind)
    raise error


def _context() -> Any:
    """Processes that start with imported libraries and nothing else.

    A fork of this one would start with all that it holds. On Linux they are forked from a process that has
    only imported, which saves seconds a method. Where a program that uses this package has started such a
    process already, it has imported what that program wanted.
    """
    import multiprocessing

    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stride_cli.preloaded"])
    return context


def _serve(
    connection: Connection,
    where: WorkspacePath,
    spec: str,
    alpha: float,
    rows: np.ndarray,
    source: Path | None,
) -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    end_with(parent)
    os.dup2(2, 1)  # stdout is the parent's data; what a library prints is talk
    try:
        bench = Bench(where, queries=source, alpha=alpha)
        if source is not None:
            assert len(bench.queries)  # read, for the model to know them
        truth, workspace = bench.truth, bench.workspace
        memory = MemoryPeak()
        run = run_method(
            workspace,
            spec,
            truth.queries.take(rows),
            masks=truth.masks,
            truth_rows=bench.truth_rows,
            describe=True,
        )
        connection.send(memory.measured(run))
    except (StrideError, IndexFormatError) as error:
        connection.send((type(error).__name__, error.message, error.fix))
    except MemoryError:
        connection.send(("MemoryError", "out of memory", "give it fewer queries"))
    except Exception as error:  # whatever a method's library raises is that method's failure, not the others'
        connection.send((type(error).__name__, f"{type(error).__name__}: {first_line(error)}", None))
    finally:
        connection.close()


def end_with(parent: Any) -> None:
    """End this process when that one has ended, however it did.

    The kernel does not: what forks is its parent there, and stays for as long as what it has forked.

    Parameters
    ----------
    parent : of `multiprocessing.parent_process`
    """

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="stride-parent", daemon=True).start()


class MemoryPeak:
    """Growth of this process's resident memory from here on, at its peak; and of CUDA memory."""

    def __init__(self) -> None:
        import gc

        gc.collect()
        with contextlib.suppress(OSError):
            # Linux: 5 resets the high-water mark; ru_maxrss cannot be, and inherits the parent's over exec
            Path("/proc/self/clear_refs").write_text("5")
        self._start = self._resident("VmRSS")
        import torch

        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._device_start = torch.cuda.memory_allocated()

    def measured(self, run: Run) -> Run:
        """The same run with the memory that has been used since."""
        from dataclasses import replace

        peak = self._resident("VmHWM")
        grown = None if peak is None or self._start is None else float(max(0, peak - self._start))
        device = None
        if self._cuda:
            import torch

            device = float(torch.cuda.max_memory_allocated() - self._device_start)
        return replace(run, memory_bytes=grown, device_bytes=device)

    @staticmethod
    def _resident(key: str) -> int | None:
        """A line of /proc/self/status in bytes; None where there is no such file."""
        try:
            text = Path("/proc/self/status").read_text()
        except OSError:
            return None
        line = next((line for line in text.splitlines() if line.startswith(f"{key}:")), None)
        return None if line is None else int(line.split()[1]) * 1024
