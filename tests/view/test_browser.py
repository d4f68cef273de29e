"""The app in a real Chromium: addresses, back, search, a sweep that goes on, two runs, and 200,000 traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvatlas import models
from kvatlas.core import EvictionTrace, Grade, Setting, Status, Usage
from kvatlas.results import Expected, Manifest, Store
from kvatlas.view.app import Watcher, application, named
from tests.report.axe import serious
from tests.report.test_browser import CONTRASTS, HOSTILE, browser, pytestmark
from tests.stats.synthetic import AXES, grid, manifest, trace, traces

__all__ = ["browser", "pytestmark"]
TOKENS = 16_000


@pytest.fixture
def served(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address of the app over some runs; at the end no console message and no other host was asked."""
    ends: list[Callable[[], Any]] = []
    said: list[str] = []
    requests: list[str] = []

    def open_(folders: list[Path], address: str = "#/", width: int = 1280, scheme: str = "light") -> Any:
        views = named(folders, {})
        watcher = Watcher(views)
        server = uvicorn.Server(uvicorn.Config(application(views, "token"), port=0, log_level="warning"))
        socket = server.config.bind_socket()
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        ends.extend([context.close, watcher.stop, lambda: setattr(server, "should_exit", True), thread.join])
        watcher.start()
        thread.start()
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.home = f"http://127.0.0.1:{socket.getsockname()[1]}/token/"
        page.goto(page.home + address)
        return page

    yield open_
    for end in ends:
        end()
    assert said == []
    assert all(url.startswith("http://127.0.0.1:") for url in requests)


def store_of(folder: Path, chance: float = 0.5, text: str = "", name: str = "") -> Path:
    """A run whose traces have tokens of a real tokenizer and lose some of them on the way."""
    benchmarks = (f"CHAIN6{name}", f"CHAIN8{name}")
    plan = manifest(grid("dynts"), models=("embedded:tiny-llama",), benchmarks=benchmarks, problems=4, samples=2)
    plan = replace(plan, spec=SPEC)
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for key, trace in traces(plan, lambda setting: 0.9 if setting.policy == "full" else chance):
            store.add(key, with_tokens(trace, text))
    return folder


SPEC = {
    "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "problems": 4,
    "settings": {"policy": "dynts", "kv_budget": 96, "ratio_over": "thinking"},
    "axes": {"local_window": [8, 16], "ratio": [0.2, 0.5]},
}  # fmt: skip


def with_tokens(item: Any, text: str = "") -> Any:
    words = WORDS if item.setting.policy == "full" else (*WORDS[:40], *reversed(WORDS[40:]))
    left = (
        ()
        if item.setting.policy == "full"
        else tuple(60 if position % 3 == 0 and position < 50 else 0 for position in range(98))
    )
    eviction_trace = EvictionTrace(1, left or (0,) * 98, tuple(int(not number) for number in left or (0,) * 98))
    grade = replace(item.grade, answer=text or item.grade.answer)
    return replace(item, tokens=words[:79], text=text or "so it goes", eviction_trace=eviction_trace, grade=grade)


def _words() -> tuple[int, ...]:
    ids = models.find("embedded:tiny-llama").encode("a wants b : no , yes and so on to the end of it " * 12)
    return tuple(ids[:80])


WORDS = _words()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of(tmp_path_factory.mktemp("served") / "a run")


def heading(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.getElementById('heading').textContent.includes(text)", arg=text)


def test_from_the_runs_to_a_token_and_all_the_way_back(served: Callable[..., Any], run: Path) -> None:
    page = served([run])
    page.click("#runs a >> text=a-run")
    page.wait_for_selector("#verdicts .card")
    page.locator("#maps-panels table.heat >> nth=0 >> td[data-cell] >> nth=2").click()
    page.click("#list-rows a >> nth=0")
    cell = page.evaluate("data.cells[Number(here().parts[2])].name")
    page.select_option("#list-controls select", "lost")
    page.wait_for_function("() => location.hash.includes('what=lost')")
    shown = page.locator("#list-rows tbody tr").count()
    assert shown == page.locator("#list-rows tbody td:has-text('full: right')").count() > 0
    page.click("#list-rows tbody a >> nth=0")
    # The trace is drawn alone first, and again when the one beside it has come.
    page.wait_for_selector("#trace .pair")
    assert cell in page.locator("#trace .facts").inner_text()
    # The full cache's trace stands next to it, and the map of the cell with the cell marked.
    assert page.locator(".pair section").count() == 2
    assert page.locator("#traces-map td.here").count() == 1
    page.locator("#trace pre .token >> nth=4").click()
    assert page.evaluate("here().parts[5]") == "5"
    deep = page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector("#list-rows tbody tr")
    assert page.evaluate("here().query.what") == "lost"
    assert page.locator("#list-rows tbody tr").count() == shown
    for _ in range(3):
        page.go_back()
    page.wait_for_selector("#overview:not([hidden])")
    page.go_back()
    heading(page, "Runs")
    # A new visitor with the address sees the same token.
    other = page.context.new_page()
    other.goto(page.home + deep)
    other.wait_for_selector("#trace .token.at")
    assert other.locator("#trace .info").inner_text().startswith("token 5 ")


ADDRESSES = {
    "#/a-run/map/1": "a-run",
    "#/a-run/cell/3": "tiny-llama | CHAIN6",
    "#/a-run/problem/1/2": "CHAIN8 | p2",
    "#/a-run/trace/3/1/1": "dynts(local_window=16",
    "#/a-run/trace/3/1/1/7?beside=none": "dynts(local_window=16",
    "#/a-run/find?text=so+it": "Search",
}


def test_every_address_can_be_opened_first(served: Callable[..., Any], run: Path) -> None:
    first = served([run])
    for address, words in ADDRESSES.items():
        page = first.context.new_page()
        page.goto(first.home + address)
        heading(page, words)
        assert page.locator("#failure").inner_text() == ""
        assert page.evaluate("location.hash") == address


def test_wrong_addresses_say_so(served: Callable[..., Any], run: Path) -> None:
    page = served([run], "#/nope")
    for address in (
        "#/nope",
        "#/a-run/cell/x",
        "#/a-run/nothing",
        "#/a-run/map/99",
        "#/a-run/problem/0/99",
        "#/%E0%A4%A",
    ):
        page.evaluate(f"location.hash = {address!r}")
        page.wait_for_function("() => document.getElementById('failure').textContent !== ''")
        page.evaluate("location.hash = '#/'")
        page.wait_for_function("() => document.getElementById('failure').textContent === ''")


def test_search_finds_texts_and_says_how_far_it_is(served: Callable[..., Any], run: Path) -> None:
    page = served([run], "#/a-run")
    page.fill("#search input", "IT GOES")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('list-said').textContent.includes('all looked at')")
    assert page.locator("#list-said").inner_text().startswith("160 traces found")
    page.select_option("#list-controls select >> nth=1", "lost")
    page.wait_for_function("() => /^(?!160).*all looked at/.test(document.getElementById('list-said').textContent)")
    lost = page.locator("#list-rows tbody tr").count()
    assert 0 < lost < 160
    page.fill("#search input", "nothing like it")
    page.click("#search button")
    page.wait_for_function("() => document.getElementById('list-said').textContent.startsWith('0 traces found; all')")


def test_a_sweep_that_goes_on_is_followed(served: Callable[..., Any], tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), problems=4)
    every = list(traces(plan))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        page = served([tmp_path / "run"], "#/run")
        page.wait_for_function("() => document.getElementById('live').textContent.startsWith('0 of 160')")
        for key, item in every[:80]:
            store.add(key, item)
        page.wait_for_function("() => document.getElementById('live').textContent.startsWith('80 of 160')")
        page.wait_for_selector("td[data-cell]")
        assert page.locator(".card").count() == 0
        page.locator("td[data-cell] >> nth=1").focus()
        cell = page.evaluate("document.activeElement.dataset.cell")
        for key, item in every[80:]:
            store.add(key, item)
        page.wait_for_selector(".card")
        assert page.locator("#live").inner_text() == "160 traces"
        # Whoever stands on a cell stays there.
        assert page.evaluate("document.activeElement.dataset.cell") == cell


def test_the_keyboard_alone_leads_from_a_run_to_a_token(served: Callable[..., Any], run: Path) -> None:
    page = served([run])
    page.wait_for_selector("#runs a")

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(selector)

    tab_to("#runs a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card")
    tab_to("td[data-cell]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list-rows a")
    tab_to("#list-rows a")
    page.keyboard.press("Enter")
    heading(page, "CHAIN6")
    tab_to("#list-rows tbody a")
    page.keyboard.press("Enter")
    page.wait_for_selector("#trace .token")
    tab_to("#trace input[type=range]")
    page.keyboard.press("Home")
    assert page.locator("#trace output").inner_text().startswith("0 of ")
    tab_to("#trace pre")
    page.keyboard.press("ArrowRight")
    assert page.locator("#trace .info").inner_text().startswith("token 1 ")


def test_the_cache_moves_as_its_evictions_say(served: Callable[..., Any], run: Path) -> None:
    page = served([run], "#/a-run/trace/3/1/1")
    page.wait_for_selector("#trace .pair")
    slider, said = page.locator("#trace .motion input"), page.locator("#trace output")
    tokens = page.locator(".pair section >> nth=0").locator(".token")
    with Store.open(run) as store:
        stored = next(trace for _, trace in store.traces() if trace.setting.policy == "dynts")
    assert stored.eviction_trace is not None
    left = stored.eviction_trace.left[20:]
    for moment in (0, 10, 59, 60, 79, 30):
        slider.evaluate("(node, to) => { node.value = to; node.dispatchEvent(new Event('input')); }", moment)
        shown = tokens.evaluate_all("(nodes) => nodes.map((node) => [...node.classList])")
        assert [index for index, names in enumerate(shown) if "unwritten" not in names] == list(range(min(moment, 79)))
        gone = {index for index, step in enumerate(left) if 0 < step <= moment}
        assert {index for index, names in enumerate(shown) if "gone" in names} == gone
        cached = 20 + moment - sum(0 < step <= moment for step in stored.eviction_trace.left)
        assert f": {cached} cached" in said.inner_text()
    page.click("text=Next compression")
    assert said.inner_text().startswith("60 of 79")
    page.click("text=Departure")
    assert said.inner_text().startswith("40 of 79")
    page.click("text=Whole trace")
    assert page.locator("#trace .unwritten, #trace .gone, #trace .moving").count() == 0
    page.click("#trace .motion button >> text=Play")
    page.wait_for_function("() => document.querySelector('#trace output').textContent.startsWith('3')")
    page.click("#trace .motion button >> text=Pause")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (390, "dark"), (1280, "dark")])
def test_pages_fit_and_axe_finds_nothing_serious(
    served: Callable[..., Any], run: Path, width: int, scheme: str
) -> None:
    page = served([run], "#/", width, scheme)
    for address in ("#/", "#/a-run", "#/a-run/cell/3", "#/a-run/problem/0/1", "#/a-run/trace/3/1/1", "#/a-run/find"):
        page.evaluate(f"location.hash = {address!r}")
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert serious(page) == [], address
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    assert min(page.evaluate(CONTRASTS.replace("td[data-cell]", "#traces-map td[data-cell]"))) >= 4.0
    # Every control has a name, every image too, and no id is there twice.
    page.evaluate("location.hash = '#/a-run/trace/3/1/1'")
    page.wait_for_selector("#trace .token")
    assert page.evaluate(UNNAMED) == []


UNNAMED = """() => [
  ...[...document.querySelectorAll('button, a[href], input, select')].filter((node) => node.offsetParent &&
    !(node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length)),
  ...[...document.querySelectorAll('[role=img], table')].filter((node) => !(node.getAttribute('aria-label') ||
    node.caption)),
  ...[...document.querySelectorAll('[id]')].filter((node) => document.querySelectorAll('#' + node.id).length > 1),
].map((node) => node.outerHTML.slice(0, 120))"""


def test_hostile_traces_and_names_do_nothing(served: Callable[..., Any], tmp_path: Path) -> None:
    folder = store_of(tmp_path / "<img src=x onerror=alert(1)>", text=HOSTILE * 3, name=HOSTILE)
    page = served([folder], "#/")
    name = page.evaluate("live().then(() => state.runs[0].name)")
    for address in ("", "/cell/3", "/problem/0/1", "/trace/3/1/1", "/find?text=harmed"):
        page.evaluate(f"location.hash = '#/{name}{address}'")
        page.wait_for_timeout(300)
        assert page.locator("#failure").inner_text() == ""
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 200,000 traces, one of them of 16,000 tokens."""
    ids = tuple(f"p{number:04d}" for number in range(1000))
    settings = [*grid("dynts", "random"), Setting.of("full")]
    settings = [*settings, Setting.of("window", kv_budget=96, local_window=8)]
    expected = tuple(
        Expected("embedded:tiny-llama", name, setting, f"key-{name}", ids, 5, setting.policy in ("full", "window"))
        for name in ("CHAIN6", "CHAIN8")
        for setting in settings
    )
    folder = tmp_path_factory.mktemp("large") / "large"
    with Store.create(folder) as store:
        store.put_manifest(Manifest(AXES, expected, SPEC, {}))
        item = with_tokens(trace(expected[0], ids[0], 0, True))
        right, wrong = item.grade, replace(item.grade, correct=False)
        store.add_all(
            (
                cell.run_key,
                replace(
                    item,
                    model=cell.model,
                    benchmark=cell.benchmark,
                    setting=cell.setting,
                    problem=problem,
                    sample=number,
                    grade=right if (position + number) % 3 else wrong,
                ),
            )
            for cell in expected
            for position, problem in enumerate(ids)
            for number in range(5)
        )
        long = (WORDS * (TOKENS // len(WORDS) + 1))[:TOKENS]
        left = tuple(5000 if position % 2 and position < 4000 else 0 for position in range(20 + TOKENS - 1))
        eviction_trace = EvictionTrace(1, left, tuple(int(not step) for step in left))
        usage = Usage(20, TOKENS, TOKENS - 20, 5000, 3000.0, 1, 9.0)
        grade = Grade(False, 0.0, None, Status.TRUNCATED)
        first = replace(
            item, tokens=long, eviction_trace=eviction_trace, usage=usage, grade=grade, problem=ids[7], sample=2
        )
        store.add(expected[0].run_key, first)
    return folder


@pytest.mark.slow
def test_two_hundred_thousand_traces_are_there_at_once(served: Callable[..., Any], large: Path) -> None:
    with Store.open(large) as store:
        assert store._connection.execute("SELECT count(*) FROM traces").fetchone() == (200_000,)
    page = served([large], "#/large")
    page.wait_for_selector("#counts dd")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 1000
    # Traces can be read before all are counted.
    begin = time.monotonic()
    page.goto(page.home + "#/large/trace/0/7/2?beside=none")
    page.wait_for_selector("#trace .token")
    assert page.locator("#trace .token").count() == TOKENS
    assert time.monotonic() - begin < 15
    page.wait_for_function("() => state.runs[0].done === 200000", timeout=90_000)
    page.wait_for_timeout(1000)
    spent = page.evaluate(
        """async () => { const begin = performance.now(); await fetched('large/trace/0/7/2.json');
        showTrace(state.trace); document.body.offsetHeight; return performance.now() - begin; }"""
    )
    assert spent < 1000
