"""Asking a running server instead of opening an index: what `stride query` does where there is one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stride_cli import errors
from stride_cli.attribution.options import QueryOptions
from stride_cli.errors import StrideError
from stride_cli.serve.presence import Presence, ServedPlace, running
from stride_cli.serve.questions import OPTIONS

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer, Refused
    from stride_cli.attribution.session import Session
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.recovery.shrinkage import Shrinkage
    from stride_cli.schema.answer_records import AnswerRecord, AnswerSeconds

_PATIENCE = 2.0  # seconds for a server to say that it is there
_OF_A_PROMPT = {"QueryError": errors.QueryError, "NumericalError": errors.NumericalError}


class ServerGone(Exception):
    """A server that does not answer any more, or not as one."""


@dataclass(frozen=True)
class ServedAnswer:
    """An answer that a server gave: its record, and what a terminal shows of an `Answer` beside it.

    Attributes
    ----------
    record : AnswerRecord
    n_chunks : int         of the index
    """

    record: AnswerRecord
    n_chunks: int

    def to_record(self) -> AnswerRecord:
        return self.record

    @property
    def loss(self) -> float:
        return self.record["loss"]

    @property
    def verdict(self) -> str | None:
        return self.record["verdict"]

    @property
    def labels(self) -> dict[int, str]:
        return {}  # of classifiers, which are not served

    @property
    def read(self) -> int:
        return self.record["read"]

    @property
    def agreement(self) -> float | None:
        return self.record["measurement"]["agreement"]

    @property
    def coverage(self) -> float:
        return self.record["measurement"]["coverage"]

    @property
    def seconds(self) -> AnswerSeconds:
        return self.record["seconds"]

    @property
    def shrinkage(self) -> Shrinkage | None:
        from stride_cli.recovery.shrinkage import Shrinkage  # numba, which a record does without

        recovery = self.record["recovery"]
        found = Shrinkage(recovery["shrink_exponent"], recovery["shrink_opposing"])
        return None if found == Shrinkage(1.0, 1.0) else found

    @property
    def solution(self) -> Any:
        """Of the `Solution` what can be counted."""
        recovery = self.record["recovery"]
        return SimpleNamespace(
            residual=range(self.record["measurement"]["subsets"]),
            indices=range(recovery["nonzeros"]),
            n_chunks=self.n_chunks,
            lambda_ratio=recovery["lambda_ratio"],
            relative_gap=recovery["relative_gap"],
            r_squared=recovery["r_squared"],
        )


@dataclass(frozen=True)
class ServedSession:
    """What answers queries as a `Session` does, by asking a server.

    Where that is gone in the middle, the rest is answered by a session that is opened then.

    Attributes
    ----------
    presence : Presence
    place : ServedPlace
    n_chunks : int               of the index
    open_session : callable      opens the index in this process, and gives its options their judges
    """

    presence: Presence
    place: ServedPlace
    n_chunks: int
    open_session: Callable[[], tuple[Session, QueryOptions]]

    def outcomes(
        self,
        prompts: Iterable[Mapping[str, Any] | StrideError],
        options: QueryOptions | None = None,
        *,
        together: int | None = None,
        stop: bool = False,
    ) -> Iterator[Answer | ServedAnswer | Refused]:
        """See `Session.outcomes`; prompts are answered one by one."""
        from stride_cli.attribution.answer import Refused

        rest = iter(prompts)
        for prompt in rest:
            found: ServedAnswer | Refused
            if isinstance(prompt, StrideError):
                found = Refused(prompt)
            else:
                try:
                    found = self._ask(prompt, options or QueryOptions())
                except ServerGone:
                    session, judged = self.open_session()
                    arriving = chain([prompt], rest)
                    yield from session.outcomes(arriving, judged, together=together, stop=stop)
                    return
            yield found
            if stop and isinstance(found, Refused):
                return

    def _ask(self, prompt: Mapping[str, Any], options: QueryOptions) -> ServedAnswer | Refused:
        from stride_cli.attribution.answer import Refused

        values = {name: value for name, value in asdict(options).items() if name in OPTIONS}
        body = {
            **{key: value for key, value in prompt.items() if value is not None},
            **values,
            "index": self.place.name,
            "alone": True,
        }
        status, found = exchange(self.presence, "POST", "/query", body, patience=None)
        if status == 200 and found.get("schema") == "stride.answer/1":
            return ServedAnswer(found, self.n_chunks)  # type: ignore[arg-type]
        if found.get("schema") != "stride.error/1" or found.get("kind") not in _OF_A_PROMPT:
            raise ServerGone  # what is wrong with the index or the server is told by the usual way
        return Refused(_OF_A_PROMPT[found["kind"]](found["message"], fix=found["fix"]))


def find_server(place: WorkspacePath) -> tuple[Presence, ServedPlace, int] | None:
    """A server of this user that serves an index, opened in the same way, and the index's number of chunks;
    None where there is none.

    What a server left behind that does not answer any more is removed.
    """
    for presence, served in running(ServedPlace.of("", place)):
        try:
            status, found = exchange(presence, "GET", "/indexes", None, patience=_PATIENCE)
        except ServerGone:
            continue
        chunks = {each["name"]: each["chunks"] for each in found.get("indexes", [])}
        if status == 200 and served.name in chunks:
            return presence, served, chunks[served.name]
        presence.forget()  # the address is another's by now
    return None


def exchange(
    presence: Presence, method: str, path: str, body: Mapping[str, Any] | None, *, patience: float | None
) -> tuple[int, dict[str, Any]]:
    """A request, and the status and the object that come back.

    Raises
    ------
    ServerGone      nobody listens, or what comes back is none of ours; where nobody does, that is forgotten
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(presence.host, presence.host)
    connection = http.client.HTTPConnection(host, presence.port, timeout=_PATIENCE)
    try:
        try:
            connection.connect()
        except ConnectionRefusedError:
            presence.forget()
            raise
        assert connection.sock is not None
        connection.sock.settimeout(patience)
        headers = {"Authorization": f"Bearer {presence.token}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerGone from error
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise ServerGone
    return answer.status, found
