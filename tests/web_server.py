"""A real HTTP server on this machine that answers what a test says."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Method, path, headers and body of a request to status, headers and body of its answer.
Reply = Callable[[str, str, Mapping[str, str], bytes], tuple[int, Mapping[str, str], bytes]]


@contextmanager
def answering(reply: Reply) -> Iterator[str]:
    """Serve the replies; yields the address. A reply with status 0 ends the connection without an answer."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, headers, content = reply(self.command, self.path, dict(self.headers), body)
            if not code:
                return
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # Looks often whether it shall end.
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
