"""Connections that say nothing, or never enough, and too many of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI

from kvatlas.server import running

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where an application with one endpoint is served by our protocol; three connections, a second for headers."""
    monkeypatch.setattr(running, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(running._Protocol, "most", 3)
    app = FastAPI()
    app.get("/health")(lambda: "well")
    config = uvicorn.Config(app, http=running._Protocol, port=0, log_level="error")
    server, listening = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def get(connection: socket.socket) -> str:
    """The status line of an answer that was read to its end."""
    connection.sendall(GET)
    said = b""
    while not said.endswith(b'"well"'):
        piece = connection.recv(1000)
        assert piece
        said += piece
    return said.decode().splitlines()[0]


def test_headers_that_do_not_come_end_the_connection(port: int) -> None:
    silent, slow, served = connect(port), connect(port), connect(port)
    slow.sendall(GET[:-2])
    assert get(served) == "HTTP/1.1 200 OK"
    served.sendall(GET[:20])
    # A byte now and then does not help.
    for _ in range(3):
        time.sleep(0.2)
        slow.sendall(b"x")
    assert (silent.recv(100), served.recv(100)) == (b"", b"")
    assert slow.recv(100) == b""


def test_connections_beyond_the_limit_are_sent_away_until_others_end(port: int) -> None:
    stored = [connect(port) for _ in range(3)]
    assert get(stored[0]) == "HTTP/1.1 200 OK"
    assert connect(port).recv(1000).startswith(b"HTTP/1.1 503 ")
    for item in stored:
        item.close()
    time.sleep(0.3)
    assert get(connect(port)) == "HTTP/1.1 200 OK"
