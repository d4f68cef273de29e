"""A small Hugging Face hub on this machine: folders as repositories, one of them gated. For the hub's real client."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "owner/gated"


@contextmanager
def hub(folders: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serves `folders` by id ("owner/name"); yields the endpoint and the list of files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._serve(body=False)

        def do_GET(self) -> None:
            self._serve(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self, *, body: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            api = parts[0] == "api"
            parts = parts[1:] if api else parts
            parts = parts[1:] if parts[0] in ("models", "datasets") else parts
            id_, rest = "/".join(parts[:2]), parts[2:]
            if id_ == GATED:
                self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
            elif id_ not in folders:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            elif api:
                self._answer(200, json.dumps(self._info(id_, rest)).encode(), {}, body)
            else:
                self._file(folders[id_] / "/".join(rest[2:]), body)

        def _info(self, id_: str, rest: list[str]) -> object:
            files = sorted(path for path in folders[id_].rglob("*") if path.is_file())
            names = [str(path.relative_to(folders[id_])) for path in files]
            if rest and rest[0] == "tree":
                return [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                    for name, path in zip(names, files, strict=True)
                ]
            siblings = []
            for name, path in zip(names, files, strict=True):
                entry: dict[str, object] = {"rfilename": name, "size": path.stat().st_size}
                if name.endswith(".safetensors"):
                    sha = hashlib.sha256(path.read_bytes()).hexdigest()
                    entry["lfs"] = {"sha256": sha, "size": path.stat().st_size, "pointerSize": 134}
                siblings.append(entry)
            return {"id": id_, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}

        def _file(self, path: Path, body: bool) -> None:
            if not path.is_file():
                self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
                return
            content = path.read_bytes()
            large = path.suffix == ".safetensors"
            etag = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest()
            if body:
                fetched.append(path.name)
            self._answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, body)

        def _answer(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()
