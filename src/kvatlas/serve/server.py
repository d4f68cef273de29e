"""The server around the application: limits by host, key and size, errors in the form of OpenAI's API, and signals."""

import errno
import hmac
import logging
import socket
import sys
import threading
import time
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

from kvatlas.core import KvatlasError, described, reason
from kvatlas.serve.protocol import error_body
from kvatlas.serve.service import BusyError, ClosedError, LengthError, Service
from kvatlas.text import visible

_log = logging.getLogger("kvatlas.serve")

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

#: The largest body in bytes.
MAX_BYTES = 4 * 2**20
#: The connection ends with the answer, because the rest of the body is not read.
_CLOSE = {"Connection": "close"}
#: Seconds after which a refused client should try again.
_RETRY = {"Retry-After": "1"}
_TOO_LARGE = f"The body is larger than {MAX_BYTES:,} bytes, the limit."
#: Seconds after the grace period in which open answers end with an error.
_FAREWELL = 5


class RequestLimits:
    """The limits before the application. `hosts` are the accepted host names; if empty, all are.

    A server on a loopback address without a key accepts only its own names, so that a web page whose host name leads
    to the loopback address is refused (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, api_key: str | None = None, hosts: Collection[str] = ()) -> None:
        self.app = app
        self.api_key = api_key
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        # A body without a length is measured while it is read.
        large = length.isdecimal() and (len(length) > 12 or int(length) > MAX_BYTES)
        refused = self._host_refusal(headers) or self._key_refusal(headers, scope["path"])
        refused = refused or (JSONResponse(error_body(_TOO_LARGE), 413, _CLOSE) if large else None)
        size = 0
        # The status of an application that fails before it answers.
        status = 500
        began = time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BYTES:
                raise HTTPException(413, _TOO_LARGE, _CLOSE)
            return message

        try:
            await (refused or self.app)(scope, limited, noted)
        finally:
            if scope["path"] != "/health":
                path = visible(scope["path"])[:200]
                _log.info("%s %s %d %.3f s", scope["method"], path, status, time.perf_counter() - began)

    def _host_refusal(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not self.hosts or name in self.hosts:
            return None
        names = ", ".join(self.hosts)
        return JSONResponse(
            error_body(f"The Host header is {host!r}; expected {names} without an API key."), 403, _CLOSE
        )

    def _key_refusal(self, headers: Headers, path: str) -> JSONResponse | None:
        given = headers.get("authorization", "")
        guarded = self.api_key and path.startswith("/v1")
        if not guarded or hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            return None
        body = error_body("The API key is missing or wrong.", "authentication_error")
        return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


def add_error_handlers(app: FastAPI) -> None:
    """Register the error answers of the application."""

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, refusal: RequestValidationError) -> JSONResponse:
        first = refusal.errors()[0]
        name = ".".join(str(key) for key in first["loc"] if key != "body")
        if first["type"] == "value_error":
            sentence = str(first["msg"]).removeprefix("Value error, ") + "."
            name = sentence.partition(" ")[0]
        elif first["type"] == "json_invalid":
            sentence = f"The body is no JSON: {first['ctx']['error']} at character {name}."
            name = ""
        elif first["type"] == "extra_forbidden":
            sentence = f"{name} is not known."
        else:
            sentence = f"{name or 'The body'}: {first['msg']}."
        return JSONResponse(error_body(sentence, param=name or None), 400)

    @app.exception_handler(KvatlasError)
    async def refused(_: Request, refusal: KvatlasError) -> JSONResponse:
        if isinstance(refusal, BusyError):
            return JSONResponse(error_body(str(refusal), "rate_limit_error", code="rate_limit_exceeded"), 429, _RETRY)
        if isinstance(refusal, ClosedError):
            return JSONResponse(error_body(str(refusal), "server_error"), 503, _RETRY)
        code = "context_length_exceeded" if isinstance(refusal, LengthError) else None
        return JSONResponse(error_body(str(refusal), code=code), 400)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, refusal: HTTPException) -> JSONResponse:
        kinds = {404: "not_found_error", 503: "server_error"}
        body = error_body(str(refusal.detail), kinds.get(refusal.status_code, "invalid_request_error"))
        return JSONResponse(body, refusal.status_code, refusal.headers)


class _GracefulServer(uvicorn.Server):
    """A server that gives open answers a grace period after the first signal, then ends them with an error."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service = service
        self.grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            print(f"Stopping: open answers have {self.grace:g} s to finish.", flush=True)
            threading.Thread(target=self.service.close, args=(self.grace,), daemon=True).start()
        super().handle_exit(sig, frame)

    def fail(self) -> None:
        """End the server, because its engine has failed."""
        print("kvatlas: The engine has failed; the server ends.", file=sys.stderr, flush=True)
        self.should_exit = True


def serve_forever(app: FastAPI, service: Service, host: str, port: int, grace: float) -> None:
    """Load the weights and serve until SIGINT or SIGTERM.

    Raises KvatlasError if the address cannot be bound, or if the engine fails.
    """
    patience = int(grace) + _FAREWELL
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience)

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)

    server = _GracefulServer(config, service, grace)
    service.on_failure = server.fail
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        fault = "is not free; name another with --host and --port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fault = "is no address of this machine; give --host 127.0.0.1, or 0.0.0.0 for all of its addresses"
        raise KvatlasError(f"The address {host}:{port} {fault} ({reason(error)}).") from error

    service.start()
    # Readers of the line below may connect at once.
    listening.listen(config.backlog)
    # The port is another one than `port` if that is 0.
    bound_port = listening.getsockname()[1]
    url_host = f"[{host}]" if ":" in host else host
    print(f"Serving on http://{url_host}:{bound_port}/v1 (Ctrl-C stops)", flush=True)

    try:
        server.run([listening])
    finally:
        service.close()
    if service.failure is not None:
        failure = service.failure
        sentence = str(failure) if isinstance(failure, KvatlasError) else f"{described(failure)}."
        raise KvatlasError(f"The engine has failed: {sentence}")
