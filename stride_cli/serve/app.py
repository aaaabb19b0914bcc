"""The routes: what is asked goes to the worker, what comes back is a record."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexFormatError
from stride_cli import __version__
from stride_cli.attribution.options import QueryOptions
from stride_cli.errors import StrideError, UsageError, require_extra
from stride_cli.output import to_json
from stride_cli.serve.guard import Guard
from stride_cli.serve.indexes import ServedIndex, Shelf
from stride_cli.serve.openapi import CHECKS, describe
from stride_cli.serve.questions import Question, option_value, parse_json, parse_question, text_value
from stride_cli.serve.refusals import Refusal, error_record, status_of
from stride_cli.serve.verification import Verifications
from stride_cli.serve.views import (
    FORMATS,
    answer_record,
    document_record,
    exported,
    passages_record,
    tokens_record,
)
from stride_cli.serve.worker import Ask, Worker

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from stride_cli.attribution.answer import Answer
    from stride_cli.schema.input_records import BadInputRecord
    from stride_cli.schema.serve_records import ServedIndexesRecord

_STATIC = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_AHEAD = 64  # prompts of one request that wait for the model at once
# path → method → what it does; the routes and the description of the interface are both of this
ROUTES: dict[str, dict[str, str]] = {
    "/": {"get": "The page."},
    "/page.css": {"get": "Its style."},
    "/page.js": {"get": "Its script."},
    "/icon.svg": {"get": "Its icon."},
    "/indexes": {"get": "What is served."},
    "/query": {"post": "Which documents made the model say this? One record, or one a line."},
    "/passages": {"post": "The sentences of an answer's documents that carry their influence."},
    "/tokens": {"post": "Which document for which part of the response: influences on each token."},
    "/document": {
        "get": "A whole document.",
        "post": "A whole document beside an answer: what they share, and what of it moves the answer.",
    },
    "/export": {"post": "An answer as a file: html, csv or json."},
    "/verify": {"post": "Begin to train without the documents of an answer: did it depend on them?"},
    "/verify/{id}": {"get": "How a verification goes on, as events.", "delete": "End a verification."},
    "/openapi.json": {"get": "This interface."},
}


@dataclass(frozen=True)
class Address:
    """What a server is bound to, and the secret that its requests have to know."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """Of the page."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"


@dataclass
class Service:
    """What the routes share.

    Attributes
    ----------
    shelf : Shelf              the indexes
    defaults : QueryOptions    of options that requests do not give
    worker : Worker            whose thread runs the models
    verifications : Verifications
    on_end : callable          called once, when the server ends
    """

    shelf: Shelf
    defaults: QueryOptions = field(default_factory=QueryOptions)
    worker: Worker = field(default_factory=Worker)
    verifications: Verifications = field(default_factory=Verifications)
    on_end: Callable[[], None] = lambda: None

    async def indexes(self, request: Request) -> Response:
        records = [await self._run(index.record) for index in self.shelf.indexes.values()]
        found: ServedIndexesRecord = {
            "schema": "stride.indexes/1",
            "version": __version__,
            "indexes": records,
        }
        return _json(found)

    async def query(self, request: Request) -> Response:
        question = parse_question(await _body(request), self.defaults)
        index = self.shelf.find(question.index)
        options = question.options
        if question.many:
            return _stream("application/x-ndjson", self._lines(index, question, options))
        answer = await asyncio.wrap_future(self._ask(index, question.single(), options, question.alone))
        return _json(answer_record(answer, name=question.ids[0], explain=question.explain))

    async def passages(self, request: Request) -> Response:
        index, prompt, options, _ = await self._about(request)
        return _json(await self._run(partial(passages_record, index, prompt, options)))

    async def tokens(self, request: Request) -> Response:
        index, prompt, options, _ = await self._about(request)
        return _json(await self._run(partial(tokens_record, index, prompt, options)))

    async def document(self, request: Request) -> Response:
        if request.method == "GET":
            given = dict(request.query_params)
            index = self.shelf.find(given.get("index"))
            return _json(await self._run(partial(document_record, index, text_value(given, "id"), None)))
        index, prompt, options, rest = await self._about(request, "document")
        name = text_value(rest, "document")
        return _json(await self._run(partial(document_record, index, name, (prompt, options))))

    async def export(self, request: Request) -> Response:
        from starlette.responses import Response

        index, prompt, options, rest = await self._about(request, "format")
        form = text_value(rest, "format")
        if form not in FORMATS:
            raise UsageError(f"'format' is '{form}' (expected html, csv or json)", fix='{"format": "html"}')

        def write() -> str:
            answer = index.answer(prompt, options, carried=True)
            return exported(index.session(), answer, form, title=f"Attribution: {index.name}")

        written = await self._run(write)
        name = {"Content-Disposition": f'attachment; filename="answer.{form}"'}
        return Response(written, media_type=f"{FORMATS[form]}; charset=utf-8", headers=name)

    async def verify(self, request: Request) -> Response:
        from stride_cli.options import entries
        from stride_cli.prove.options import HitOptions

        index, prompt, options, rest = await self._about(request, "documents", *CHECKS)
        documents = rest.get("documents")
        listed = isinstance(documents, list) and all(isinstance(each, str) for each in documents)
        if documents is not None and not (listed and documents):
            raise UsageError("'documents' is no list of ids", fix='{"documents": ["doc-1"]}')
        declared = entries(HitOptions)
        check = {name: option_value(declared[name], rest[name]) for name in CHECKS if name in rest}
        HitOptions(**check)
        for name in documents or ():
            await self._run(partial(index.number, name))
        if prompt.get("instead") is not None:
            raise UsageError(
                "a comparison is not put to the test: models are trained again for the loss of a response",
                fix="leave out 'instead'",
            )
        place = index.place
        job = await self.verifications.begin(
            {
                "index": getattr(place.index, "url", str(place.index)),
                "model": place.model,
                "device": place.device,
                "dtype": place.dtype,
                **{key: prompt.get(key) for key in ("prompt", "response", "span")},
                "documents": documents,
                "options": asdict(options),
                "check": check,
            }
        )
        return _json(job.to_record(), 202)

    async def verification(self, request: Request) -> Response:
        job = self.verifications.find(request.path_params["id"])
        if request.method == "DELETE":
            await job.cancel()
            return _json(job.to_record())

        async def lines() -> AsyncIterator[str]:
            async for kind, record in job.events():
                yield f"event: {kind}\ndata: {to_json(record)}\n\n"

        return _stream("text/event-stream", lines())

    async def openapi(self, request: Request) -> Response:
        return _json(describe(ROUTES))

    async def _about(
        self, request: Request, *also: str
    ) -> tuple[ServedIndex, Mapping[str, str], QueryOptions, Mapping[str, Any]]:
        """The answer that a request is about, and what else it says."""
        question = parse_question(await _body(request), self.defaults, also=also)
        index = self.shelf.find(question.index)
        return index, question.single(), question.options, question.rest

    async def _run(self, function: Callable[[], Any]) -> Any:
        """What a function returns that has to run where models do."""
        return await asyncio.wrap_future(self.worker.call(function))

    def _ask(
        self, index: ServedIndex, prompt: Mapping[str, str], options: QueryOptions, alone: bool
    ) -> Future[Answer]:
        future = self.worker.submit(Ask(index, prompt, options, alone))

        def keep(done: Future[Answer]) -> None:
            if not done.cancelled() and done.exception() is None:
                index.keep(prompt, options, done.result())

        future.add_done_callback(keep)
        return future

    async def _lines(
        self, index: ServedIndex, question: Question, options: QueryOptions
    ) -> AsyncIterator[str]:
        """The record of each prompt, in order, as soon as those before it are there."""
        waiting: deque[Future[Answer] | StrideError] = deque()
        rest = iter(question.prompts)
        try:
            for line, name in enumerate(question.ids, 1):
                while len(waiting) < _AHEAD and (prompt := next(rest, None)) is not None:
                    if isinstance(prompt, StrideError):
                        waiting.append(prompt)
                    else:
                        waiting.append(self._ask(index, prompt, options, question.alone))
                found = waiting.popleft()
                try:
                    if isinstance(found, StrideError):
                        raise found
                    answer = await asyncio.wrap_future(found)
                    record: Mapping[str, Any] = answer_record(answer, name=name, explain=question.explain)
                except Exception as error:
                    record = _bad_input(error, line, name)
                yield to_json(record) + "\n"
        finally:
            for each in waiting:  # who asked has left
                if isinstance(each, Future):
                    each.cancel()


def build_app(service: Service, address: Address) -> Guard:
    """The ASGI application.

    Raises
    ------
    MissingExtraError      Starlette is not installed
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route
    except ImportError:
        raise require_extra("starlette", "serve") from None

    static = {path: _page(name, kind) for path, (name, kind) in _STATIC.items()}
    handlers: dict[str, Callable[..., Any]] = {
        **static,
        "/indexes": service.indexes,
        "/query": service.query,
        "/passages": service.passages,
        "/tokens": service.tokens,
        "/document": service.document,
        "/export": service.export,
        "/verify": service.verify,
        "/verify/{id}": service.verification,
        "/openapi.json": service.openapi,
    }
    routes = [
        Route(path, handlers[path], methods=[method.upper() for method in methods])
        for path, methods in ROUTES.items()
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.on_end()
            await service.verifications.close()
            await asyncio.to_thread(service.worker.close)

    async def refused(request: Request, error: Exception) -> Response:
        return _json(error_record(error), status_of(error))

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(f"{method.upper()} {path}" for path, each in ROUTES.items() for method in each)
        what = {404: "there is no such address", 405: "there is no such method here"}
        refusal = Refusal(error.status_code, what.get(error.status_code, error.detail), fix=f"one of {known}")
        return _json(error_record(refusal), error.status_code)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: no_route,
            StrideError: refused,
            IndexFormatError: refused,
            Exception: refused,
        },
    )
    return Guard(app, token=address.token, host=address.host, port=address.port)


def _bad_input(error: Exception, line: int, name: str | None) -> BadInputRecord:
    """What stands in the place of an answer, where there is none."""
    told = error_record(error)
    record: BadInputRecord = {
        "schema": "stride.bad_input/1",
        "source": "request",
        "line": line,
        "message": told["message"],
        "fix": told["fix"],
    }
    if name is not None:
        record["id"] = name
    return record


async def _body(request: Request) -> dict[str, Any]:
    """The object that a request holds; a `Refusal` where it is sent as anything but JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the body is not sent as JSON", fix="Content-Type: application/json")
    return parse_json(await request.body())


def _json(record: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(to_json(record) + "\n", status, media_type="application/json")


def _stream(kind: str, lines: AsyncIterator[str]) -> Response:
    from starlette.responses import StreamingResponse

    return StreamingResponse(lines, media_type=kind)


def _page(name: str, kind: str) -> Callable[..., Any]:
    """A handler that answers with a file of the package."""
    text = files("stride_cli.serve").joinpath("page", name).read_bytes()

    async def handler(request: Request) -> Response:
        from starlette.responses import Response

        return Response(text, media_type=f"{kind}; charset=utf-8")

    return handler
