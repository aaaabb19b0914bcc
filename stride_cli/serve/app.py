"""Route requests: questions go to the worker, records come back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexFormatError
from stride_cli.attribution.options import QueryOptions
from stride_cli.errors import StrideError, UsageError, require_extra
from stride_cli.options import entries
from stride_cli.output import to_json
from stride_cli.parallel import worker_context
from stride_cli.prove.options import HitOptions, HitQuestion
from stride_cli.report.drawing import asset, verdict_style
from stride_cli.report.explanation import answer_record
from stride_cli.schema.answer_records import UNJUDGED, VERDICTS
from stride_cli.serve.guard import Address, Guard
from stride_cli.serve.indexes import ServedIndex, Shelf
from stride_cli.serve.options import LARGEST_BODY
from stride_cli.serve.questions import Question, option_value, parse_json, parse_question, text_value
from stride_cli.serve.refusals import Refusal, error_record, status_of
from stride_cli.serve.verification import Verifications
from stride_cli.serve.views import FORMATS, document_record, exported, passages_record, tokens_record
from stride_cli.serve.worker import Ask, Worker
from stride_cli.version import __version__

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise require_extra("starlette", "serve") from None

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.schema.answer_records import BadInputRecord
    from stride_cli.schema.serve_records import ServedIndexesRecord, TrainingTimeRecord

_STATIC = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
CHECKS = ("seeds", "random", "effect")  # of `HitOptions`, that a request may give
_AHEAD = 64  # prompts of one request that wait for the model at once


@dataclass
class Service:
    """State that the routes share: `defaults` are of options that requests do not give."""

    shelf: Shelf
    defaults: QueryOptions = field(default_factory=QueryOptions)
    worker: Worker = field(default_factory=Worker)
    verifications: Verifications = field(default_factory=Verifications)

    async def indexes(self, request: Request) -> Response:
        """List what is served."""
        records = [await self._run(partial(one.record, self.defaults)) for one in self.shelf.indexes.values()]
        found: ServedIndexesRecord = {
            "schema": "stride.indexes/1",
            "version": __version__,
            "indexes": records,
        }
        return _json(found)

    async def query(self, request: Request) -> Response:
        """Answer one prompt by a record, or several by one a line."""
        question = parse_question(await _body(request), self.defaults)
        index = self.shelf.find(question.index)
        if question.many:
            return StreamingResponse(self._lines(index, question), media_type="application/x-ndjson")
        asked = self.worker.ask(Ask(index, question.single(), question.options))
        answer = await asyncio.wrap_future(asked)
        return _json(answer_record(answer, name=question.ids[0], verbose=question.explain))

    async def detail(self, record: Callable[..., Any], request: Request) -> Response:
        """Give a further record of an answer: its passages, or its tokens."""
        index, prompt, options, _ = await self._about(request)
        return _json(await self._run(partial(record, index, prompt, options)))

    async def document(self, request: Request) -> Response:
        """Show a whole document beside an answer: what they share, and what of it moves that."""
        index, prompt, options, rest = await self._about(request, "document")
        name = text_value(rest, "document")
        return _json(await self._run(partial(document_record, index, name, prompt, options)))

    async def export(self, request: Request) -> Response:
        """Give an answer as a file: html, csv or json."""
        index, prompt, options, rest = await self._about(request, "format")
        form = text_value(rest, "format")
        if form not in FORMATS:
            raise UsageError(f"'format' is '{form}' (expected html, csv or json)", fix='{"format": "html"}')
        written = await self._run(partial(exported, index, prompt, options, form))
        name = {"Content-Disposition": f'attachment; filename="answer.{form}"'}
        return Response(written, media_type=f"{FORMATS[form]}; charset=utf-8", headers=name)

    async def estimate(self, request: Request) -> Response:
        """Say how long training the model once again takes."""
        index = self.shelf.find(request.query_params.get("index"))
        worker_context(1)  # who asks that may begin one next, and to import takes seconds
        seconds = await self._run(index.seconds_of_training)
        found: TrainingTimeRecord = {"schema": "stride.training_time/1", "seconds": seconds}
        return _json(found)

    async def verify(self, request: Request) -> Response:
        """Begin to train without the documents of an answer: did it depend on them?"""
        index, prompt, options, rest = await self._about(request, "documents", *CHECKS)
        documents = rest.get("documents")
        listed = isinstance(documents, list) and all(isinstance(each, str) for each in documents)
        if documents is not None and not (listed and documents):
            raise UsageError("'documents' is no list of ids", fix='{"documents": ["doc-1"]}')
        declared = entries(HitOptions)
        check = HitOptions(
            **{name: option_value(declared[name], rest[name]) for name in CHECKS if name in rest}
        )
        if documents:
            await self._run(partial(index.numbers, documents))
        question = HitQuestion(**prompt, documents=documents)
        job = self.verifications.begin((index.place, question, options, check))
        return _json(job.to_record(), 202)

    async def verification(self, request: Request) -> Response:
        """Follow a verification, as events; of a DELETE: end it."""
        job = self.verifications.find(request.path_params["id"])
        if request.method == "DELETE":
            await job.cancel()
            return _json(job.to_record())

        async def lines() -> AsyncIterator[str]:
            async for kind, record in job.events():
                yield f"event: {kind}\ndata: {to_json(record)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def close(self) -> None:
        """End what is under way."""
        await self.verifications.close()
        await asyncio.to_thread(self.worker.close)

    async def _about(
        self, request: Request, *also: str
    ) -> tuple[ServedIndex, Mapping[str, str], QueryOptions, Mapping[str, Any]]:
        """Read which answer a request is about, and what else it says."""
        question = parse_question(await _body(request), self.defaults, also=also)
        index = self.shelf.find(question.index)
        return index, question.single(), question.options, question.rest

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Run a function where models run."""
        return await asyncio.wrap_future(self.worker.call(function))

    async def _lines(self, index: ServedIndex, question: Question) -> AsyncIterator[str]:
        """Give the record of each prompt, in order, as soon as those before it are there."""
        waiting: deque[Future[Answer] | StrideError] = deque()
        rest = iter(question.prompts)
        try:
            for line, name in enumerate(question.ids, 1):
                while len(waiting) < _AHEAD and (prompt := next(rest, None)) is not None:
                    if isinstance(prompt, StrideError):
                        waiting.append(prompt)
                    else:
                        waiting.append(self.worker.ask(Ask(index, prompt, question.options)))
                found = waiting.popleft()
                try:
                    if isinstance(found, StrideError):
                        raise found
                    answer = await asyncio.wrap_future(found)
                    record: Mapping[str, Any] = answer_record(answer, name=name, verbose=question.explain)
                except Exception as error:
                    record = _bad_input(error, line, name)
                yield to_json(record) + "\n"
        finally:
            for each in waiting:  # who asked has left
                if isinstance(each, Future):
                    each.cancel()


def build_app(service: Service, address: Address) -> Guard:
    """Build the ASGI application."""
    routes = [Route(path, _page(*file), methods=["GET"]) for path, file in _STATIC.items()]
    routes += [
        Route("/indexes", service.indexes),
        Route("/query", service.query, methods=["POST"]),
        Route("/passages", partial(service.detail, passages_record), methods=["POST"]),
        Route("/tokens", partial(service.detail, tokens_record), methods=["POST"]),
        Route("/document", service.document, methods=["POST"]),
        Route("/export", service.export, methods=["POST"]),
        Route("/verify", service.estimate, methods=["GET"]),
        Route("/verify", service.verify, methods=["POST"]),
        Route("/verify/{id}", service.verification, methods=["GET", "DELETE"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()

    async def refused(request: Request, error: Exception) -> Response:
        return _json(error_record(error), status_of(error))

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(f"{'|'.join(sorted(each.methods or ()))} {each.path}" for each in routes)
        what = {404: "there is no such address", 405: "there is no such method here"}
        refusal = Refusal(error.status_code, what.get(error.status_code, error.detail), fix=f"one of {known}")
        return await refused(request, refusal)

    handlers: Any = {HTTPException: no_route}
    handlers |= dict.fromkeys((StrideError, IndexFormatError, Exception), refused)
    return Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), address)


def _bad_input(error: Exception, line: int, name: str | None) -> BadInputRecord:
    """Tell, in the place of an answer, why there is none."""
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
    """Read the object that a request holds.

    Raises
    ------
    Refusal         it is sent as anything but JSON, or is too large
    UsageError      as of `parse_json`
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the body is not sent as JSON", fix="Content-Type: application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            message = f"the body has more than {LARGEST_BODY:,} bytes (expected at most {LARGEST_BODY:,})"
            raise Refusal(413, message, fix="ask for less at once")
    return parse_json(body)


def _json(record: Mapping[str, Any], status: int = 200) -> Response:
    return Response(to_json(record) + "\n", status, media_type="application/json")


def _page(name: str, kind: str) -> Any:
    """Make the response, which Starlette takes for an application, that gives a file of the package."""
    text = files("stride_cli.serve").joinpath("page", name).read_text(encoding="utf-8")
    if name == "page.css":
        text = asset("style.css") + asset("answers.css") + text + verdict_style()
    looks = {word: look._asdict() for word, look in {**VERDICTS, "": UNJUDGED}.items()}
    text = text.replace("LOOKS", to_json(looks), 1)
    return Response(text, media_type=f"{kind}; charset=utf-8")
