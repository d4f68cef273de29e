"""The server around the application: refusals by host, key and size, errors as OpenAI's API shapes them, and running it
until a signal ends it."""

from __future__ import annotations

import hmac
import sys
import threading
from collections.abc import Collection
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvatlas.core import KvatlasError
from kvatlas.serve.answers import error
from kvatlas.serve.service import BusyError, ClosedError, LengthError, Service

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

#: Bytes of a body.
MAX_BYTES = 4 * 2**20
#: The rest of a body is not read: the connection ends with the answer.
_CLOSE = {"Connection": "close"}
#: Seconds after which a refused client is advised to try again.
_RETRY = {"Retry-After": "1"}
_TOO_LARGE = f"The body is larger than {MAX_BYTES:,} bytes, the most that is read."
#: Seconds beyond the grace period for connections to be told that their answer ends here.
_FAREWELL = 5


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
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not self.hosts or name in self.hosts:
            return None
        names = ", ".join(self.hosts)
        return JSONResponse(error(f"The Host header is {host!r}; expected {names} without an API key."), 403, _CLOSE)

    def _key(self, headers: Headers, path: str) -> JSONResponse | None:
        given = headers.get("authorization", "")
        guarded = self.api_key and path.startswith("/v1")
        if not guarded or hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            return None
        body = error("The API key is missing or wrong.", "authentication_error")
        return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


def _length(headers: Headers) -> JSONResponse | None:
    length = headers.get("content-length", "0")
    # A body without a length is measured while it is read.
    large = length.isdecimal() and (len(length) > 12 or int(length) > MAX_BYTES)
    return JSONResponse(error(_TOO_LARGE), 413, _CLOSE) if large else None


def add_error_handlers(app: FastAPI) -> None:
    """Register the answers to malformed, refused and failed requests."""

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
        return JSONResponse(error(sentence, param=name or None), 400)

    @app.exception_handler(KvatlasError)
    async def refused(_: Request, refusal: KvatlasError) -> JSONResponse:
        if isinstance(refusal, BusyError):
            return JSONResponse(error(str(refusal), "rate_limit_error", code="rate_limit_exceeded"), 429, _RETRY)
        if isinstance(refusal, ClosedError):
            return JSONResponse(error(str(refusal), "server_error"), 503, _RETRY)
        long = isinstance(refusal, LengthError)
        return JSONResponse(error(str(refusal), code="context_length_exceeded" if long else None), 400)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, refusal: HTTPException) -> JSONResponse:
        kinds = {404: "not_found_error", 503: "server_error"}
        body = error(str(refusal.detail), kinds.get(refusal.status_code, "invalid_request_error"))
        return JSONResponse(body, refusal.status_code, refusal.headers)


class _Server(uvicorn.Server):
    """At the first signal the open answers may finish within the grace period; then they end with a sentence."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            print(f"Stopping: what is under way has {self.grace:g} s to finish.", flush=True)
            threading.Thread(target=self.service.close, args=(self.grace,), daemon=True).start()
        super().handle_exit(sig, frame)

    def fail(self) -> None:
        """End the server, because its engine has failed."""
        print(f"kvatlas: The engine failed ({self.service.failure!r}); the server ends.", file=sys.stderr, flush=True)
        self.should_exit = True


def run(app: FastAPI, service: Service, host: str, port: int, grace: float) -> None:
    """Load the weights, serve until SIGINT or SIGTERM.

    Raises KvatlasError if the address cannot be had, or if the engine fails.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(grace) + _FAREWELL,
    )
    server = _Server(config, service, grace)
    service.on_failure = server.fail
    try:
        sockets = [config.bind_socket()]
    except SystemExit as error:
        raise KvatlasError(f"The address {host}:{port} cannot be had; name another with --host and --port.") from error
    service.start()
    # A reader of the line below may connect at once.
    sockets[0].listen(config.backlog)
    number = sockets[0].getsockname()[1]
    print(f"Serving on http://{f'[{host}]' if ':' in host else host}:{number}/v1 (Ctrl-C stops)", flush=True)
    try:
        server.run(sockets)
    finally:
        service.close()
    if service.failure is not None:
        raise KvatlasError(f"The engine failed: {service.failure!r}.")
