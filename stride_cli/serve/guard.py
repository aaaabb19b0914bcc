"""Let ask who may: holders of the secret, from the page itself or from no page, at the served address.

A page of any other site can make a browser send requests here. What it cannot do is know the secret, have the
browser send the cookie that holds it, forge the headers Origin and Sec-Fetch-Site, or, where its own name is
made to lead to this address (DNS rebinding), have the browser send another Host than that name.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stride_cli.output import note, to_json
from stride_cli.serve.refusals import Refusal, error_record

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# of the package, the same for everybody: no secret is asked
OPEN = ("/", "/page.css", "/page.js", "/icon.svg")
_LASTS = 365 * 86400  # seconds of the cookie
_ONCE = ("host", "origin", "authorization")  # headers of which a second could say something else
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


@dataclass(frozen=True)
class Address:
    """Address that a server is bound to, and the secret that its requests have to know.

    A program sends the secret as Authorization: Bearer. A browser has it as a cookie, which a link sets that
    works once; so the page's own address holds no secret, and can be given away.
    """

    host: str
    port: int
    token: str
    _codes: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        """URL of the page."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers send one host's cookies to all of its ports."""
        return f"stride-{self.port}"

    def link(self) -> str:
        """Make a URL that lets one browser in, once."""
        code = secrets.token_urlsafe(24)
        self._codes.add(code)
        return f"{self.url}?once={code}"

    def let_in(self, scope: Scope) -> bool:
        """True where a request follows such a link, which is used up by that."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("once", [""])[0]
        known = scope["method"] == "GET" and scope["path"] == "/" and given in self._codes
        self._codes.discard(given if known else "")
        return known

    @property
    def local(self) -> bool:
        """True where this machine alone can reach it."""
        bound = _address(self.host)
        return self.host == "localhost" if bound is None else bound.is_loopback

    def is_own(self, host: str) -> bool:
        """True where a header Host names this address.

        Where that is every address of the machine, or this machine alone, so do all names of these that no
        other machine can give out.
        """
        parts = urlsplit(f"//{host}")
        try:
            name, port = (parts.hostname or ""), parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.netloc != host or "@" in host:
            return False
        if name == self.host.lower():
            return True
        bound = _address(self.host)
        if bound is None:
            return False
        everywhere = bound.is_unspecified and _address(name) is not None
        return everywhere or (name == "localhost" and (bound.is_loopback or bound.is_unspecified))


class Guard:
    """An ASGI application around another: lets through what may pass, and adds `HEADERS` to its answers."""

    def __init__(self, app: Any, address: Address) -> None:
        self._app, self._address = app, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":  # no WebSockets here
            return

        async def protected(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            check(scope, self._address)
        except Refusal as refusal:
            body = to_json(error_record(refusal)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            if refusal.status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await protected({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await protected({"type": "http.response.body", "body": body})
        else:
            if not self._address.let_in(scope):
                await self._app(scope, receive, protected)
                return
            note(f"a browser was let in; for another one: {self._address.link()}")
            cookie = f"{self._address.cookie}={self._address.token}; Path=/; HttpOnly; SameSite=Strict"
            added = {"location": "/", "set-cookie": f"{cookie}; Max-Age={_LASTS}"}
            headers = [(name.encode(), value.encode()) for name, value in added.items()]
            await protected({"type": "http.response.start", "status": 303, "headers": headers})
            await protected({"type": "http.response.body", "body": b""})


def check(scope: Scope, address: Address) -> None:
    """Raise a `Refusal` where a request may not pass."""
    given = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    names, headers = [name for name, _ in given], dict(given)
    for name in _ONCE:
        if names.count(name) > 1:
            raise Refusal(400, f"the header {name} is given twice", fix="give it once")
    host, path = headers.get("host", ""), scope["path"]
    if not address.is_own(host):
        fix = f"ask {address.host}:{address.port}"
        raise Refusal(421, "the header Host is not the address that is served", fix=fix)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # a link to the page may be followed from elsewhere
    opened = scope["method"] == "GET" and path == "/" and headers.get("sec-fetch-dest") == "document"
    foreign = site not in (None, "same-origin", "none") and not opened
    if origin not in (None, f"http://{host}") or foreign:
        raise Refusal(403, "the request comes from a page of another origin", fix="open the page itself")
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        token = {name: value for name, _, value in cookies}.get(address.cookie, "")
    known = hmac.compare_digest(token.strip().encode("utf-8", "replace"), address.token.encode())
    if not known and path not in OPEN:
        fix = "open the link that stride serve told last (once); programs send Authorization: Bearer"
        raise Refusal(401, "this browser, or program, has not been let in", fix=fix)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
