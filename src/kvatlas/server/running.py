"""Running the server: addresses, signals, and a graceful end."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvatlas.core import KvatlasError
from kvatlas.service import Service

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Seconds beyond the grace period for connections to be told that their answer ends here.
_FAREWELL = 5


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


def run(app: FastAPI, service: Service, host: str, port: int, grace: float) -> None:
    """Load the weights, serve until SIGINT or SIGTERM. KvatlasError: no such address to be had, or a failed engine."""
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
