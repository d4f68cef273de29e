"""Requests that are refused, as OpenAI's API shapes errors: by host, key and size, malformed ones, failed ones."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvatlas.core import KvatlasError
from kvatlas.server.answers import error
from kvatlas.service import BusyError, ClosedError
from kvatlas.service.request_validation import LengthError

#: Bytes of a body.
MAX_BYTES = 4 * 2**20
#: What is left of a body is not read: the connection ends with the answer.
_CLOSE = {"Connection": "close"}
#: Seconds after which a refused client is advised to try again.
_RETRY = {"Retry-After": "1"}
_TOO_LARGE = f"The body is larger than {MAX_BYTES:,} bytes, the most that is read."


class Gate:
    """The application behind its limits. `hosts` are the names by which clients may call it, all if it is empty.

    A server on a loopback address without a key answers under its own names alone: a web page whose name was made to
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
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BYTES:
                raise HTTPException(413, _TOO_LARGE, _CLOSE)
            return message

        await (refused or self.app)(scope, limited, send)

    def _host(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not self.hosts or _name(host) in self.hosts:
            return None
        names = ", ".join(self.hosts)
        return JSONResponse(error(f"The Host header is {host!r}; valid without an API key are {names}."), 403, _CLOSE)

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
    length = headers.get("content-length", "0")
    # A body without a length is measured while it is read.
    large = length.isdecimal() and (len(length) > 12 or int(length) > MAX_BYTES)
    return JSONResponse(error(_TOO_LARGE), 413, _CLOSE) if large else None


def answer_errors_as_openai_does(app: FastAPI) -> None:
    """Register the answers to malformed, refused and failed requests."""

    def answer(status: int, body: Any, headers: Any = None) -> JSONResponse:
        return JSONResponse(body, status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, refusal: RequestValidationError) -> JSONResponse:
        first = refusal.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "value_error":
            sentence = str(first["msg"]).removeprefix("Value error, ") + "."
            name = sentence.partition(" ")[0]
        elif first["type"] == "extra_forbidden":
            sentence = f"{name} is not known."
        else:
            sentence = f"{name or 'The body'}: {first['msg']}."
        return answer(400, error(sentence, param=name or None))

    @app.exception_handler(KvatlasError)
    async def refused(_: Request, refusal: KvatlasError) -> JSONResponse:
        if isinstance(refusal, BusyError):
            return answer(429, error(str(refusal), "rate_limit_error", code="rate_limit_exceeded"), _RETRY)
        if isinstance(refusal, ClosedError):
            return answer(503, error(str(refusal), "server_error"), _RETRY)
        long = isinstance(refusal, LengthError)
        return answer(400, error(str(refusal), code="context_length_exceeded" if long else None))

    @app.exception_handler(HTTPException)
    async def failed(_: Request, refusal: HTTPException) -> JSONResponse:
        kinds = {404: "not_found_error", 503: "server_error"}
        body = error(str(refusal.detail), kinds.get(refusal.status_code, "invalid_request_error"))
        return answer(refusal.status_code, body, refusal.headers)
