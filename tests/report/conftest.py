"""A browser, pages opened in it, and a run with real tokens."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import EvictionTrace, Trace
from kvatlas.models import ModelHandle
from kvatlas.report.app.local_server import AppServer
from kvatlas.report.app.run_source import open_runs
from tests.report.chromium import CHROMIUM, heading
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

SPEC = {
    "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "problems": 4,
    "settings": {"policy": "dynts", "kv_budget": 96, "ratio_over": "thinking"},
    "axes": {"local_window": [8, 16], "ratio": [0.2, 0.5]},
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its own sandbox to root, as whom containers often run.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; at the end there were no console message, no page error, and no request but the page's own."""
    contexts: list[Any] = []
    said: list[str] = []
    requests: list[str] = []

    def open_(address: str) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith(("file:", "data:image/", "http://127.0.0.1:")) for url in requests)


@pytest.fixture
def opened(visit: Callable[..., Any]) -> Callable[..., Any]:
    """Opens a report from disk on its page of maps, with all that is folded and on other pages."""

    def open_(path: Path) -> Any:
        page = visit(path.as_uri())
        page.wait_for_selector("table.heat", state="attached")
        page.evaluate("location.hash = to(state.run, 'maps')")
        heading(page, "Maps")
        page.wait_for_selector("table.outcomes", state="attached")
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        page.evaluate("for (const each of document.querySelectorAll('[data-tab]')) each.hidden = false")
        return page

    return open_


@pytest.fixture
def served(visit: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Opens an address of the app over some runs, which are followed."""
    ends: list[Callable[[], Any]] = []

    def open_(folders: list[Path], address: str = "#/") -> Any:
        server = AppServer(open_runs(folders, {}))
        threads = [threading.Thread(target=job, daemon=True) for job in (server.serve_forever, server.follow)]
        for thread in threads:
            thread.start()
        ends.extend([server.shutdown, server.server_close, *(thread.join for thread in threads)])
        page = visit(server.address + address)
        page.home = server.address
        return page

    yield open_
    for end in ends:
        end()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelHandle) -> Path:
    """A run whose traces have tokens of a real tokenizer and lose some of them on the way."""
    words = tuple(tiny_llama.encode("a wants b : no , yes and so on to the end of it " * 12)[:80])

    def with_tokens(item: Trace) -> Trace:
        full = item.setting.policy == "full"
        own = words if full else (*words[:40], *reversed(words[40:]))
        left = tuple(60 if not full and position % 3 == 0 and position < 50 else 0 for position in range(98))
        eviction_trace = EvictionTrace(1, left, tuple(int(not number) for number in left))
        return replace(item, tokens=own[:79], text="so it goes", eviction_trace=eviction_trace)

    plan = replace(manifest(grid("dynts"), models=("embedded:tiny-llama",), problems=4, samples=2), spec=SPEC)
    folder = tmp_path_factory.mktemp("served") / "a run"
    return store_run(folder, plan, lambda setting: 0.9 if setting.policy == "full" else 0.5, with_tokens)
