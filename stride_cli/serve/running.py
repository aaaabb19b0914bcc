"""Open indexes, listen at an address, and answer until told to end."""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.options import QueryOptions
from stride_cli.errors import UsageError, first_line, required
from stride_cli.remembered import recall, remember
from stride_cli.serve.app import Service, build_app
from stride_cli.serve.guard import Address
from stride_cli.serve.indexes import Shelf
from stride_cli.serve.options import PORT, ServeOptions

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,256}")
_BACKLOG = 128


class Server:
    """A server that is bound, and whose indexes are open: `run` answers, until it is told to end.

    Parameters
    ----------
    places : one or more indexes with their models
    options : ServeOptions
    defaults : QueryOptions, optional      of options that requests do not give

    Raises
    ------
    MissingExtraError       uvicorn is not installed
    UsageError              the address cannot be listened at, or the token is none
    and what `Session.open` raises
    """

    def __init__(
        self,
        places: Sequence[WorkspacePath],
        options: ServeOptions | None = None,
        defaults: QueryOptions | None = None,
    ) -> None:
        uvicorn = required("uvicorn", "serve")
        options = options or ServeOptions()
        if options.token is not None and not _TOKEN.fullmatch(options.token):
            raise UsageError(
                "--token is too short, or has other characters than a URL's (expected 16 letters, digits, - "
                "or _ at least)",
                fix="leave it out: a random one is made",
            )
        shelf = Shelf(places)
        self._socket = bind(options.host, options.port)
        try:
            port = self._socket.getsockname()[1]
            self.address = Address(options.host, port, options.token or kept_secret())
            self.service = Service(shelf, defaults or QueryOptions())
            self.app = build_app(self.service, self.address)
            for index in shelf.indexes.values():
                index.session()  # here, where Ctrl-C may end what only imports
                self.service.worker.call(index.warm)
        except BaseException:
            self._socket.close()
            raise
        quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        limits: dict[str, Any] = {"timeout_graceful_shutdown": 2, "backlog": _BACKLOG}
        config = uvicorn.Config(self.app, ws="none", lifespan="on", **quiet, **limits)
        self._uvicorn = uvicorn.Server(config)

    def run(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Answer until `stop`, Ctrl-C (which raises KeyboardInterrupt afterwards) or SIGTERM.

        Parameters
        ----------
        started : callable      called when requests are about to be answered
        """
        try:
            started()
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Let `run`, in another thread, come to its end."""
        self._uvicorn.should_exit = True


def kept_secret() -> str:
    """Return the user's own secret, made at first: browsers that were let in stay so over a restart."""
    name = hashlib.sha256(b"stride serve").hexdigest()
    found = recall("secrets", name)
    if found is None or not _TOKEN.fullmatch(found):
        found = secrets.token_urlsafe(24)
        remember("secrets", name, found)
    return found


def bind(host: str, port: int | None) -> socket.socket:
    """Listen at an address; where no port is given, at `PORT` or another that is free.

    Raises
    ------
    UsageError      that cannot be
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        try:
            listening = socket.create_server((host, PORT if port is None else port), family=family)
        except OSError:
            if port is not None:
                raise
            listening = socket.create_server((host, 0), family=family)
    except OSError as error:
        where = host if port is None else f"{host}:{port}"
        raise UsageError(
            f"nothing can listen at {where}: {error.strerror or first_line(error)}",
            fix="leave --host and --port out, or give others",
        ) from None
    # its connections are so too: else an answer's body waits 40 ms for its head to be acknowledged
    # (asyncio does so only of sockets that name their protocol, which these do not)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
