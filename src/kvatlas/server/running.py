"""Running the server: addresses, signals, and a graceful end."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvatlas.core import KvatlasError
from kvatlas.service import Service

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Seconds beyond the grace period for connections to be told that their answer ends here.
_FAREWELL = 5
#: Seconds in which the headers of a request must have come, and connections at a time.
HEADER_SECONDS, MOST_CONNECTIONS = 10.0, 8192
#: Descriptors that are no connections.
_OWN_FILES = 64
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _Protocol(H11Protocol):
    """A connection that has to say what it wants within `HEADER_SECONDS`, from its beginning and after each answer.

    More than `most` at a time are sent away.
    """

    most = MOST_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.late: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        self._await_request()
        super().data_received(data)
        if self._answering() and self.late is not None:
            self.late.cancel()
            self.late = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.late is not None:
            self.late.cancel()
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        if self.late is None and not self._answering():
            self.late = self.loop.call_later(HEADER_SECONDS, self._close_late)

    def _close_late(self) -> None:
        self.late = None
        if not self._answering():
            self.transport.close()


class _Server(uvicorn.Server):
    """At the first signal what is under way may finish within the grace period; then it ends with a sentence."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            print(f"Stopping: what is under way has {self.grace:g} s to finish.", flush=True)
            threading.Thread(target=self.service.close, args=(self.grace,), daemon=True).start()
        super().handle_exit(sig, frame)

    def fail(self) -> None:
        """The engine has failed: whoever started the server is to start it anew."""
        print(f"kvatlas: The engine failed ({self.service.failure!r}); the server ends.", file=sys.stderr, flush=True)
        self.should_exit = True


def _connections() -> int:
    """As many as the system allows files for, the limit of this process raised as far as it may be."""
    try:
        import resource
    except ImportError:
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft - _OWN_FILES)


def run(app: FastAPI, service: Service, host: str, port: int, grace: float) -> None:
    """Load the weights, serve until SIGINT or SIGTERM. KvatlasError: no such address to be had, or a failed engine."""
    _Protocol.most = _connections()
    config = uvicorn.Config(
        app,
        http=_Protocol,
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
    # Who reads the line below may connect at once.
    sockets[0].listen(config.backlog)
    number = sockets[0].getsockname()[1]
    print(f"Serving on http://{f'[{host}]' if ':' in host else host}:{number}/v1 (Ctrl-C stops)", flush=True)
    try:
        server.run(sockets)
    finally:
        service.close()
    if service.failure is not None:
        raise KvatlasError(f"The engine failed: {service.failure!r}.")
