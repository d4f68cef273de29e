"""What is looked at before a request's body is parsed: the host it names, its key, the size of its body, its time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvatlas.server.answers import error

#: Bytes of a body, and seconds in which all of it must have come.
MOST_BYTES, BODY_SECONDS = 4 * 2**20, 30.0


class Gate:
    """The application behind the limits. `hosts` are the names by which clients may call it; none means any.

    A server on a loopback address without a key is asked under its own names alone: a web page whose name was made to
    lead there names its own host, and is refused.
    """

    def __init__(self, app: ASGIApp, api_key: str | None = None, hosts: Collection[str] = ()) -> None:
        self.app, self.api_key, self.hosts = app, api_key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._host(headers) or self._key(headers, scope["path"]) or _length(headers)
        body = b""
        if not refused:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    received = await _body(receive)
            except TimeoutError:
                refused = _refusal(408, f"The body did not come within {BODY_SECONDS:g} s.")
            else:
                body, refused = received or b"", None if received is not None else _too_large()
        if refused:
            await refused(scope, receive, send)
        else:
            await self.app(scope, _again(body, receive), send)

    def _host(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not self.hosts or _name(host) in self.hosts:
            return None
        return _refusal(403, f"The Host header is {host!r}; valid without an API key are {', '.join(self.hosts)}.")

    def _key(self, headers: Headers, path: str) -> JSONResponse | None:
        given = headers.get("authorization", "")
        guarded = self.api_key and path.startswith("/v1")
        if not guarded or hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            return None
        body = error("The API key is missing or wrong.", "authentication_error")
        return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


def _name(host: str) -> str:
    """The host without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _length(headers: Headers) -> JSONResponse | None:
    said = headers.get("content-length", "0")
    # Whoever says no number is measured as the body comes.
    return _too_large() if said.isdecimal() and (len(said) > 12 or int(said) > MOST_BYTES) else None


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None as soon as it is too large."""
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        pieces.append(message.get("body", b""))
        size, more = size + len(pieces[-1]), message.get("more_body", False)
        if size > MOST_BYTES:
            return None
    return b"".join(pieces)


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, then whatever comes behind it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def _too_large() -> JSONResponse:
    return _refusal(413, f"The body is larger than {MOST_BYTES:,} bytes, the most that is read.")


def _refusal(status: int, sentence: str) -> JSONResponse:
    # What is left of the body is not read: the connection ends with the answer.
    return JSONResponse(error(sentence), status, {"Connection": "close"})
