"""The app served on this machine alone, under a token, while sweeps write."""

import re
import secrets
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from kvatlas.core import KvatlasError, described
from kvatlas.report.app.page import app_page, json_for_script, measures_of_runs
from kvatlas.report.app.run_source import AppRun
from kvatlas.results.store import Store

#: Seconds between two looks at the stores.
POLL = 1.0
ADDRESS = "127.0.0.1"
#: The names under which clients may call: a page of another name that leads here names its own host.
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
#: The address holds the token, so no other page learns it and nothing keeps its documents.
_HEADERS = {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_NOTHING = "There is no such run, cell, problem, sample or table."


class AppServer(ThreadingHTTPServer):
    """The app over runs: all of it under `/TOKEN/`, for requests to loopback names alone.

    A thread of its own follows the stores, from `follow` on; a run that fails keeps its documents, and its line says
    so. Raises KvatlasError for a port that is taken; port 0 takes a free one.
    """

    daemon_threads = True
    #: Connections that wait: a browser opens several at once.
    request_queue_size = 64

    def __init__(self, runs: Sequence[AppRun], port: int = 0, token: str = "") -> None:
        self.runs = {run.name: run for run in runs}
        self.token = token or secrets.token_urlsafe(24)
        self.page = app_page("server", measures=measures_of_runs(runs))
        self.failures: dict[str, str] = {}
        self._end = threading.Event()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise KvatlasError(
                f"The port {port} cannot be had; name another with --port, 0 takes a free one."
            ) from error

    @property
    def address(self) -> str:
        """The address of the app, with its token."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def follow(self) -> None:
        """Look at the stores every `POLL` seconds until the server is closed."""
        stores: dict[str, Store] = {}
        followed = dict(self.runs)
        with ExitStack() as opened:
            while not self._end.is_set():
                for name, run in list(followed.items()):
                    try:
                        if name not in stores:
                            # Found now, so that the first trace does not wait for tokenizers and problems.
                            _ = run.materials
                            stores[name] = opened.enter_context(Store.open(run.folder))
                        run.refresh(stores[name])
                        self.failures.pop(name, None)
                    except KvatlasError as error:
                        self.failures[name] = str(error)
                    except Exception as error:
                        # A mistake of ours: without a word the page would stand still and look like the run.
                        traceback.print_exc()
                        self.failures[name] = f"The run is not followed any more ({described(error)})."
                        del followed[name]
                self._end.wait(POLL)

    def server_close(self) -> None:
        """Free the port and stop following."""
        self._end.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that leave before their answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def answer(self, target: str, host: str) -> tuple[int, str, str]:
        """Return the status, the media type and the text of the answer to a request."""
        if not _HOST.fullmatch(host):
            return _failure(403, f"Unknown Host header {host!r}; expected 127.0.0.1, localhost or [::1].")

        address, _, query = target.partition("?")
        token, _, path = address.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return _failure(404, "There is nothing here.")
        if path == "":
            return 200, "text/html", self.page

        try:
            return 200, "application/json", json_for_script(self._document(path, query))
        except LookupError:
            return _failure(404, _NOTHING)
        except KvatlasError as error:
            return _failure(409, str(error))

    def _document(self, path: str, query: str) -> Any:
        if path == "data/runs.json":
            return [run.summary() | {"failure": self.failures.get(name)} for name, run in self.runs.items()]
        found = re.fullmatch(r"data/([^/]+)/(.+)\.json", path)
        if found is None:
            raise LookupError(path)

        name, address = found.groups()
        run = self.runs[name]
        if address != "find":
            return run.answer(address)

        given = {name: values[-1] for name, values in parse_qs(query).items()}
        table = _request_number(given.get("table"))
        start = _request_number(given.get("start"))
        return run.find(given.get("text", "")[:400], given.get("what", ""), table, start or 0)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: Seconds after which a silent connection ends.
    timeout = 60
    server: AppServer

    def do_GET(self) -> None:
        """Answer a request."""
        status, kind, text = self.server.answer(self.path, ", ".join(self.headers.get_all("Host", ())))
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no log: addresses hold the token."""


def _failure(status: int, sentence: str) -> tuple[int, str, str]:
    return status, "application/json", json_for_script({"detail": sentence})


def _request_number(text: str | None) -> int | None:
    if text is None or text == "":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise LookupError(text)
    return int(text)


def serve_runs(runs: Sequence[AppRun], port: int) -> None:
    """Serve until SIGINT or SIGTERM; the address with its token is printed."""
    with AppServer(runs, port) as server, suppress(KeyboardInterrupt):
        threading.Thread(target=server.follow, daemon=True).start()
        print(f"{server.address} (Ctrl-C stops)", flush=True)
        server.serve_forever()
