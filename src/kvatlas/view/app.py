"""The app: a page, and the data that it asks for, on this machine alone and under a token."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as Folder
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Response

from kvatlas.core import KvatlasError
from kvatlas.report.escaping import embedded
from kvatlas.report.rendering import rendered
from kvatlas.results.store import Store
from kvatlas.server.limits import Gate
from kvatlas.server.running import LOOPBACK
from kvatlas.view import find
from kvatlas.view.run_view import RunView

#: Seconds between two looks at the stores.
POLL = 1.0
_SCRIPTS = ("requests.js", "routes.js", "view.js")
Number = Annotated[int, Path(ge=0)]


class Watcher(threading.Thread):
    """Follows the stores of runs, each in its turn, until it is stopped; a run that fails keeps what it had."""

    def __init__(self, views: Sequence[RunView]) -> None:
        super().__init__(daemon=True)
        self.views = views
        self.failures: dict[str, str] = {}
        self._end = threading.Event()

    def run(self) -> None:
        """Look at all stores every `POLL` seconds."""
        stores = {view.name: Store.open(view.folder) for view in self.views}
        while not self._end.is_set():
            for view in self.views:
                try:
                    view.refresh(stores[view.name])
                    self.failures.pop(view.name, None)
                except KvatlasError as error:
                    self.failures[view.name] = str(error)
            self._end.wait(POLL)
        for store in stores.values():
            store.close()

    def stop(self) -> None:
        """End after the run that is being looked at."""
        self._end.set()


def page(static: bool = False) -> str:
    """The HTML of the app; `static` without what only a server can do."""
    return rendered("view.html.j2", _SCRIPTS, {"static": static}, "kvatlas.view")


def application(views: Sequence[RunView], token: str, failures: Callable[[], dict[str, str]] = dict) -> FastAPI:
    """The app over runs that somebody refreshes: all of it under `/TOKEN/`, for requests to loopback names alone."""
    app = FastAPI(title="kvatlas view", docs_url=None, redoc_url=None, openapi_url=None)
    by_name = {view.name: view for view in views}
    html = page()

    def check(token_given: Annotated[str, Path(alias="token")]) -> None:
        if not secrets.compare_digest(token_given.encode(), token.encode()):
            raise HTTPException(404)

    router = APIRouter(prefix="/{token}", dependencies=[Depends(check)])

    def run(name: str) -> RunView:
        if name not in by_name:
            raise HTTPException(404, f"There is no run {name!r}; there are: {', '.join(by_name)}.")
        return by_name[name]

    @router.get("/")
    def start() -> Response:
        return Response(html, media_type="text/html", headers=_HEADERS)

    @router.get("/data/runs.json")
    def runs() -> Response:
        return _json([view.summary() | {"failure": failures().get(view.name)} for view in views])

    @router.get("/data/{name}/run.json")
    def whole_run(name: str) -> Response:
        return Response(run(name).document, media_type="application/json", headers=_HEADERS)

    @router.get("/data/{name}/outcomes/{table}.json")
    def outcomes(name: str, table: Number) -> Response:
        with _existing():
            return _json(run(name).outcomes(table))

    @router.get("/data/{name}/cell/{cell}.json")
    def cell(name: str, cell: Number) -> Response:
        with _existing():
            return _json(run(name).cell(cell))

    @router.get("/data/{name}/trace/{cell}/{problem}/{sample}.json")
    def trace(name: str, cell: Number, problem: Number, sample: Number) -> Response:
        with _existing():
            return _json(run(name).trace(cell, problem, sample))

    @router.get("/data/{name}/attention/{cell}/{problem}/{sample}.json")
    def attention(name: str, cell: Number, problem: Number, sample: Number) -> Response:
        with _existing():
            return _json(run(name).attention(cell, problem, sample))

    @router.get("/data/{name}/find.json")
    def search(
        name: str,
        text: Annotated[str, Query(max_length=400)] = "",
        what: str = "",
        table: Annotated[int | None, Query(ge=0)] = None,
        cell: Annotated[int | None, Query(ge=0)] = None,
        start: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        with _existing():
            return _json(find.find(run(name), find.Query(text, what, table, cell), start))

    app.include_router(router)
    app.add_middleware(Gate, hosts=LOOPBACK)
    return app


#: The address holds the token, so nobody else is told it, and nothing keeps what it leads to.
_HEADERS = {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _json(value: Any) -> Response:
    return Response(embedded(value), media_type="application/json", headers=_HEADERS)


@contextmanager
def _existing() -> Iterator[None]:
    """404 for a number that nothing has, and the sentence of a store that cannot be read."""
    try:
        yield
    except (KeyError, IndexError) as error:
        raise HTTPException(404, "There is no such cell, problem, sample or table.") from error
    except KvatlasError as error:
        raise HTTPException(409, str(error)) from error


def named(folders: Sequence[Folder], fix: dict[str, str]) -> list[RunView]:
    """A view for each run, called by its folder in characters that an address can have, no two alike."""
    views: list[RunView] = []
    for folder in folders:
        plain = "".join(mark if mark.isascii() and (mark.isalnum() or mark in "-_.") else "-" for mark in folder.name)
        name = base = plain.strip(".") or "run"
        count = 1
        while name in {view.name for view in views} | {"compare", "find"}:
            count += 1
            name = f"{base}-{count}"
        views.append(RunView(folder, name, fix))
    return views


def serve(views: Sequence[RunView], port: int) -> None:
    """Serve until SIGINT or SIGTERM; the address with its token is printed. KvatlasError: the port cannot be had."""
    token, watcher = secrets.token_urlsafe(24), Watcher(views)
    app = application(views, token, lambda: watcher.failures)
    config = uvicorn.Config(app, host=LOOPBACK[0], port=port, log_level="warning", access_log=False)
    try:
        sockets = [config.bind_socket()]
    except SystemExit as error:
        raise KvatlasError(f"The port {port} cannot be had; name another with --port, 0 takes a free one.") from error
    sockets[0].listen(config.backlog)
    watcher.start()
    print(f"http://{LOOPBACK[0]}:{sockets[0].getsockname()[1]}/{token}/ (Ctrl-C stops)", flush=True)
    try:
        uvicorn.Server(config).run(sockets)
    finally:
        watcher.stop()
