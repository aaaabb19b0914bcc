"""Commands that start at once: an interpreter that has imported what they import, and forks for each.

Most of a short command is the import of torch and transformers. Tests that start many commands (the scripts
of examples/, the README's blocks) or kill one again and again start them here: each is a process of its own,
with its own arguments, environment, directory, streams, signals and exit status, and only its imports are
older than it is. That commands start by themselves, from nothing, is what test_app.py and
test_installation.py are for. The fork server of a command's workers (`parallel`) is forked here, too.

    python -m tests.prepared SOCKET         listens there; ends when its stdin is closed
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
_LENGTH = 8
# words of commands that start workers by default, or are told to; scripts may
_WITH_WORKERS = {"--workers", "compare", "truth", "removal", "loo", "selection", "verify-hit", "tune"}
# beside what `startup.preload` imports: what most commands import once they know what they are to do; no
# kernels of ours, which ask the environment at once where they are kept
_OFTEN = (
    *("numba.experimental", "numba.stencils.stencil", "scipy.stats", "zoneinfo", "html"),
    *("stride_cli.api", "stride_cli.models.loading", "stride_cli.training.pretraining"),
    *("stride_cli.research.evaluation.bench", "stride_cli.data.query_set", "index_format.writer"),
    *("stride_cli.training.jobs", "stride_cli.training.retraining"),
)

# what a shell script starts as `stride` or `python`: asks for a process, and ends as that one does
_SHIM = """#!{python} -IS
import json, os, signal, socket, sys
line = {program!r} + sys.argv[1:]
asked = json.dumps({{"line": line, "directory": os.getcwd(), "environment": dict(os.environ)}}).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(asked).to_bytes({length}, "little")], [0, 1, 2])
    server.sendall(asked)
    answers = server.makefile()
    process = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(process, number))
    status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Process:
    """A command that runs; as much of `subprocess.Popen` as tests need."""

    def __init__(self, connection: socket.socket, line: Sequence[str]) -> None:
        self._connection, self._answers, self.args = connection, connection.makefile(), list(line)
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status (negative: the signal), or None while it runs."""
        if self.returncode is None:
            self._connection.setblocking(False)
            try:
                ended = bool(self._connection.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                ended = False
            finally:
                self._connection.setblocking(True)
            if ended:
                self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit status."""
        if self.returncode is None:
            if timeout is not None and not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To this process, unless it has ended: its number may be somebody else's by then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Prepared:
    """The interpreter that forks, on Linux. To be closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # addresses of sockets are short
        self._home = tempfile.TemporaryDirectory(prefix="prepared-")
        self.address = str(Path(self._home.name, "socket"))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.prepared", self.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n", "the prepared interpreter did not start"

    def close(self) -> None:
        """End it; what it has started goes on."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._home.cleanup()

    def start(
        self,
        line: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | int = subprocess.DEVNULL,
        stdout: IO[Any] | int = subprocess.DEVNULL,
        stderr: IO[Any] | int = subprocess.DEVNULL,
        new_session: bool = False,
    ) -> Process:
        """Start ``stride …``, ``-c CODE …`` or ``SCRIPT.py …``; streams are files, or nothing."""
        request = {"line": [str(word) for word in line], "directory": str(cwd or Path.cwd())}
        request |= {"environment": dict(os.environ if env is None else env), "new_session": new_session}
        asked = json.dumps(request).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with Path(os.devnull).open("r+b") as nothing:
            streams = [nothing if each == subprocess.DEVNULL else each for each in (stdin, stdout, stderr)]
            numbers = [each if isinstance(each, int) else each.fileno() for each in streams]
            socket.send_fds(connection, [len(asked).to_bytes(_LENGTH, "little")], numbers)
        connection.sendall(asked)
        return Process(connection, line)

    def run(
        self,
        line: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = self.start(line, cwd=cwd, env=env, stdout=out, stderr=err).wait()
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(list(line), code, out.read(), err.read())
        assert not check or code == 0, done.stderr
        return done

    def tools(self) -> Path:
        """A directory for the front of a PATH: its `stride` and `python` are forked from here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, program in (("stride", ["stride"]), ("python", [])):
            text = _SHIM.format(python=sys.executable, program=program, address=self.address, length=_LENGTH)
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        return self.folder

    def script(
        self, words: Sequence[str], place: Any = None, code: int = 0, stdin: str = "", **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a directory, with these `stride` and `python`; it has to end with this code."""
        paths = {"PATH": f"{self.tools()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        how: Any = {"cwd": place, "input": stdin, "env": {**os.environ, **paths, **settings}}
        done = subprocess.run(words, **how, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done


# --- the interpreter itself ---------------------------------------------------------------------------------


def _prepare() -> None:
    """Import what is slow to import; compute nothing, so that there are no threads that a fork would lose."""
    from stride_cli.startup import keep_imported, own_process, share_cores

    share_cores()
    from stride_cli.commands.app import command_line
    from stride_cli.parallel import IMPORTS

    command_line()

    for name in (*IMPORTS, *_OFTEN):
        importlib.import_module(name)
    transformers: Any = sys.modules["transformers"]
    for name in ("AutoModelForCausalLM", "NanoChatForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)  # imported when first asked for
    os.fsync = lambda fd: None  # a killed process loses nothing that it has written: only a dead machine does
    own_process()
    keep_imported()


def _serve(address: str) -> dict[str, Any]:
    """Fork for every request; returns in the children only, with what is asked for."""
    import selectors

    running: dict[int, socket.socket] = {}
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(address)
        listening.listen(64)
        for source in (listening, wake, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    os._exit(0)
                if key.fileobj is wake:
                    wake.recv(4096)
                    while running:
                        number, status = os.waitpid(-1, os.WNOHANG)
                        if not number:
                            break
                        _tell(running.pop(number), os.waitstatus_to_exitcode(status), last=True)
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    head, streams, _, _ = socket.recv_fds(connection, _LENGTH, 3)
                    with connection.makefile("rb") as asked:
                        request = json.loads(asked.read(int.from_bytes(head, "little")))
                    number = os.fork()
                    if number == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for other in (connection, wake, woken, *running.values()):
                            other.close()
                        return {**request, "streams": streams, "address": address}
                    for stream in streams:
                        os.close(stream)
                    running[number] = connection
                    _tell(connection, number, last=False)


def _tell(connection: socket.socket, number: int, *, last: bool) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except OSError:
        pass  # who asked is gone
    finally:
        if last:
            connection.close()


def _become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for, up to its end.

    It ends as an interpreter does but for the last step: freeing, one by one, the millions of objects that
    were imported takes a second and more, and they go with the process anyway.
    """
    import atexit
    import threading

    try:
        _run(request)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and for executors' work
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120  # as the interpreter says it
    os._exit(code & 0xFF)


def _run(request: Mapping[str, Any]) -> None:
    """What was asked for, in this process."""
    import random
    import runpy

    if request.get("new_session"):
        os.setsid()
    for place, stream in enumerate(request["streams"]):
        os.dup2(stream, place)
        os.close(stream)
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if place == 0 else "w"
        # as the interpreter opens them: what is left in a buffer of the parent's must not be written twice
        stream = os.fdopen(place, mode, encoding="utf-8", closefd=False, buffering=1)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores interrupts
    random.seed()
    if request["line"][0] != "stride" or _WITH_WORKERS & set(request["line"]):
        _stand_by()
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    program, *rest = request["line"]
    if program == "stride":
        from stride_cli.__main__ import main

        sys.argv = ["stride", *rest]
        main()
    elif program == "-":
        sys.argv = ["-", *rest]
        sys.path.insert(0, "")
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
    elif program == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [program, *rest]
        sys.path.insert(0, str(Path(program).parent.absolute()))
        runpy.run_path(program, run_name="__main__")


def _stand_by() -> None:
    """Have a process ready in which multiprocessing starts its fork server: it need not import either."""
    import fcntl
    from multiprocessing import util

    ours, theirs = socket.socketpair()
    number = os.fork()
    if number:
        theirs.close()
        start = util.spawnv_passfds

        def by_us(path: Any, line: Sequence[str], passed: Sequence[int]) -> int:
            if "forkserver" not in line[-1] or ours.fileno() < 0:
                return int(start(path, line, passed))
            asked = json.dumps({"code": line[-1], "numbers": [int(place) for place in passed]}).encode()
            socket.send_fds(ours, [len(asked).to_bytes(_LENGTH, "little")], [int(place) for place in passed])
            ours.sendall(asked)
            ours.close()
            return number

        util.spawnv_passfds = by_us
        return
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command's to handle, until the server sets its own
    head, passed, _, _ = socket.recv_fds(theirs, _LENGTH, 16)
    if not head:
        os._exit(0)  # the command has ended without
    with theirs.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(head, "little")))
    # out of each other's way first
    aside = [fcntl.fcntl(place, fcntl.F_DUPFD, 500) for place in passed]
    for place in passed:
        os.close(place)
    for place, wanted in zip(aside, request["numbers"], strict=True):
        os.dup2(place, wanted)
        os.close(place)
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    os._exit(0)


if __name__ == "__main__":
    _prepare()
    _become(_serve(sys.argv[1]))
