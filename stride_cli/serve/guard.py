"""Who may ask: the holder of the token, from the page itself or from no page, at the address that is served.

A page of any other site can make a browser send requests here. What it cannot do is know the token, forge the
headers Origin and Sec-Fetch-Site, or, where its own name is made to lead to this address (DNS rebinding),
have the browser send another Host than that name.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stride_cli.serve.options import LARGEST_BODY
from stride_cli.serve.refusals import Refusal, error_record

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN = ("/page.css", "/page.js", "/icon.svg")  # of the package, the same for everybody: no token is asked
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """An ASGI application around another: lets through what may pass, within limits, and adds `HEADERS`.

    Parameters
    ----------
    app : ASGI application
    token : str
    host, port : what the server is bound to
    largest : int      bytes of a body, at most
    """

    def __init__(self, app: Any, *, token: str, host: str, port: int, largest: int = LARGEST_BODY) -> None:
        self._app, self._token, self._largest = app, token.encode(), largest
        self._host, self._port = host, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSockets here
            return
        began, taken = False, 0

        async def protected(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                given = {name.lower() for name, _ in message["headers"]}
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                own = [pair for pair in own if pair[0] not in given]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        async def limited() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._largest:
                    raise self._too_large(f"more than {self._largest:,} bytes")
            return message

        try:
            self._check(scope)
            await self._app(scope, limited, protected)
        except Refusal as refusal:
            if began:
                raise
            await _refuse(refusal, protected)

    def _check(self, scope: Scope) -> None:
        """A `Refusal` where the request may not pass."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            if key in headers and key in ("host", "origin", "authorization", "content-length"):
                raise Refusal(400, f"the header {key} is given twice", fix="give it once")
            headers[key] = value.decode("latin-1")
        host = headers.get("host", "")
        if not self._is_own(host):
            raise Refusal(
                421, "the header Host is not the address that is served", fix=f"ask {self._host}:{self._port}"
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        opened = scope["method"] == "GET" and headers.get("sec-fetch-dest") == "document"
        foreign = site not in (None, "same-origin", "none") and not (opened and scope["path"] == "/")
        if (origin is not None and origin != f"http://{host}") or foreign:
            raise Refusal(403, "the request comes from a page of another origin", fix="open the page itself")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._largest:
            raise self._too_large(f"{length[:20]!r}")
        if scope["path"] not in OPEN and not self._knows(scope, headers):
            raise Refusal(
                401,
                "the token is missing or wrong",
                fix="open the URL that stride serve told, or send Authorization: Bearer TOKEN",
            )

    def _is_own(self, host: str) -> bool:
        """Whether a Host is what the server was bound to. Where that is every address of the machine, or
        this machine alone, all names of these that no other machine can give out."""
        parts = urlsplit(f"//{host}")
        try:
            name, port = (parts.hostname or ""), parts.port or 80
        except ValueError:
            return False
        if port != self._port or parts.netloc != host or "@" in host:
            return False
        if name == self._host.lower():
            return True
        bound = _address(self._host)
        if bound is None or bound.is_loopback:
            return name == "localhost" if bound is not None else False
        return bound.is_unspecified and (name == "localhost" or _address(name) is not None)

    def _knows(self, scope: Scope, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            # only the page itself is opened by its URL; what it asks for comes with a header
            query = parse_qs(scope["query_string"].decode("latin-1")) if scope["path"] == "/" else {}
            given = query.get("token", [""])[0]
        return hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)

    def _too_large(self, found: str) -> Refusal:
        return Refusal(
            413,
            f"the body has {found} bytes (expected at most {self._largest:,})",
            fix="ask for less at once",
        )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = json.dumps(error_record(refusal)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
