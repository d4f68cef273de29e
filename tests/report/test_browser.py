"""The report in a real Chromium, opened from disk: no error, no request, and all that people do with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.core import EvictionTrace, Grade, Status, Trace
from kvatlas.report.page import write_report
from kvatlas.results import Store
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.report.axe import serious
from tests.stats.synthetic import grid, manifest, traces

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed (apt-get install chromium)"
)
HOSTILE = (
    "</script><script>window.harmed=1</script><img src=x onerror='window.harmed=2'>\u202e\x00\x1b[2J&lt;b&gt; {{7*7}} "
)

#: The contrast (WCAG 2.2) of every cell's text to its ground.
CONTRASTS = """() => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const channels = (colour) => colour.match(/\\d+/g).slice(0, 3).map((c) => linear(c / 255));
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return [...document.querySelectorAll('td[data-cell]')].map((cell) => {
    const held = getComputedStyle(cell);
    const [a, b] = [held.color, held.backgroundColor].map((c) => light(channels(c))).sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
}"""


#: Whether each column is scrolled to where it parts from the other.
PARTING_SHOWN = """() => [...document.querySelectorAll('.pair pre')].map((pre) => {
  const parts = pre.querySelector('.parts').getBoundingClientRect(), box = pre.getBoundingClientRect();
  return parts.top >= box.top && parts.bottom <= box.bottom;
})"""


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
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; at the end there must have been no console message, no page error, no request but the file's."""
    contexts = []
    said: list[str] = []
    requests: list[str] = []

    def open_(path: Path, width: int = 1280, scheme: str = "light", unfold: bool = True) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        if unfold:
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert len([url for url in requests if url.startswith("file:")]) == len(contexts)


@pytest.fixture(scope="module")
def real(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small real sweep: real tokens, real evictions."""
    page = tmp_path_factory.mktemp("browser") / "report.html"
    write_report(RunAnalysis(RunData.open(finished)), page)
    return page


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a sweep of the embedded model, whose head and attention can be measured."""
    folder = tmp_path_factory.mktemp("measured")
    spec = {
        "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN5"], "problems": 2, "samples": 1,
        "sampling": {"max_new_tokens": 300},
        "settings": {"policy": "dynts", "kv_budget": 96, "ratio_over": "thinking"},
        "axes": {"local_window": [8, 16], "ratio": [0.2, 0.5]},
    }  # fmt: skip
    sweep(make_plan(parse_spec(spec)), folder / "run", workers=1)
    write_report(RunAnalysis(RunData.open(folder / "run")), folder / "report.html", measure=2)
    return folder / "report.html"


def test_it_opens_from_disk_with_everything_drawn(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    assert page.locator("table.heat").count() == 6
    assert page.locator("table.heat td[data-cell]").count() == 6 * 4
    assert page.locator("svg.chart").count() == 2
    assert page.locator(".chart path.front").count() == 2
    assert page.locator("table.outcomes tbody tr").count() == 3
    assert page.locator("#provenance").inner_text().startswith("Provenance")
    # The script hash of the policy is the page's own: a script added later does not run.
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), {innerHTML: '<i>x</i>'}))")
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def test_hover_and_focus_tell_what_a_cell_rests_on(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator("table.heat >> nth=2").locator("td[data-cell] >> nth=1").hover()
    for text in (
        "3 problems, 2 samples each",
        "tokens cached on average",
        "tokens per answer",
        "% truncated",
        "s per answer",
    ):
        assert text in tip.inner_text()
    assert "local_window=8, ratio=0.5" in tip.inner_text()
    page.locator("h1").hover()
    assert tip.is_hidden()
    page.locator(".chart circle.dot.on >> nth=0").focus()
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_keyboard_leads_from_a_map_to_a_token(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    table = page.locator("table.heat >> nth=2")
    table.locator("td[tabindex='0']").focus()
    first = page.evaluate("document.activeElement.dataset.cell")
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    second = page.evaluate("document.activeElement.dataset.cell")
    assert first != second
    assert page.evaluate("document.activeElement === document.querySelectorAll('table.heat')[2].rows[1].cells[2]")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "trace"
    assert page.locator("#traces-list button[aria-current=true]").count() == 1
    cell = page.evaluate(f"data.cells[{second}].name")
    assert page.locator("#trace .facts").inner_text().count(cell) == 1
    page.locator("#trace pre").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.locator("#trace .info").inner_text().startswith("token 2 ")
    assert page.locator(".token.at").count() == 1


def test_tokens_have_the_colours_of_their_recorded_eviction(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    with Store.open(real.parent / "run") as store:
        stored = {(t.benchmark, str(t.setting), t.problem, t.sample): t for _, t in store.traces()}
    shown = page.evaluate(
        "data.traces.map((t, i) => [i, home(t.cell).split(' | ')[1], data.cells[t.cell].name, t.problem, t.sample])"
    )
    assert len(shown) == len(stored) == 108
    compressed = [item for item in shown if (f := stored[tuple(item[1:])].eviction_trace) and any(f.left)]
    assert compressed
    for index, *name in compressed[:6]:
        trace = stored[tuple(name)]
        page.evaluate(f"openTrace(data.traces[{index}])")
        classes = page.evaluate(
            "[...document.querySelectorAll('.token')].map((t) => t.className.replace('token', '').trim())"
        )
        texts = page.evaluate("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
        assert len(classes) == len(trace.tokens)
        assert "".join(texts).startswith(trace.text)
        assert trace.eviction_trace is not None
        left = trace.eviction_trace.left[trace.usage.prompt_tokens :]
        for position, kind in enumerate(classes[:-1]):
            assert kind.startswith("e") == (left[position] > 0)
        assert classes[-1] == "in"


def test_sort_filter_and_walk_from_a_problem_to_its_trace(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    names = page.locator("table.outcomes tbody th").all_inner_texts()
    assert names == ["CHAIN4-0000", "CHAIN4-0001", "CHAIN4-0002"]
    page.locator("table.outcomes thead button >> nth=0").click()
    assert page.locator("table.outcomes tbody th").all_inner_texts() == names[::-1]
    page.locator("table.outcomes thead button >> nth=1").click()
    shares = [int(text.split()[0]) for text in page.locator("table.outcomes tbody td:nth-child(2)").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    page.fill("#problems-controls input[type=search]", "0002")
    assert page.locator("table.outcomes tbody th").all_inner_texts() == ["CHAIN4-0002"]
    page.fill("#problems-controls input[type=search]", "nothing like it")
    assert "0 of 3 problems" in page.locator("#problems-table").inner_text()
    page.fill("#problems-controls input[type=search]", "")
    page.select_option("#problems-controls select >> nth=0", "1")
    assert page.locator("table.outcomes tbody th").all_inner_texts()[0].startswith("CHAIN5")
    before = page.locator("table.outcomes thead th").count()
    page.select_option("#problems-controls select >> nth=1", "window")
    assert page.locator("table.outcomes thead th").count() < before
    button = page.locator("table.outcomes td button.has >> nth=0")
    problem = button.get_attribute("aria-label").split(", ")[-1].split(":")[0]
    button.click()
    assert problem in page.locator("#trace h3").inner_text()
    page.check("#problems-controls input[type=checkbox]")
    assert "of 3 problems" in page.locator("#problems-table").inner_text()


def test_maps_show_costs_and_share_their_colours_on_demand(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    first = "table.heat >> nth=2 >> td[data-cell] >> nth=0"
    page.select_option("#maps-controls select >> nth=-2", "kept")
    assert "Colour scales differ" in page.locator("#maps-scale").inner_text()
    page.select_option("#maps-controls select >> nth=-1", "all")
    assert page.locator("#maps-scale").inner_text() == ""
    for measure in ("kept", "seconds", "output", "truncated", "difference"):
        page.select_option("#maps-controls select >> nth=-2", measure)
        number = page.locator(first).get_attribute("data-cell")
        text = page.locator(first).inner_text().split("\n")[0]
        assert text == page.evaluate(f"measures.{measure}.text(data.cells[{number}])")
    # Every cell's text has the contrast that readers need.
    ratios = page.evaluate(CONTRASTS)
    assert min(ratios) >= 4.0


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_narrow_and_dark_pages_fit_and_can_be_read(
    opened: Callable[..., Any], real: Path, width: int, scheme: str
) -> None:
    page = opened(real, width, scheme)
    page.evaluate("openTrace(data.traces.find((trace) => trace.steps.length))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    dark = scheme == "dark"
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    assert (sum(map(int, ink[4:-1].split(","))) > 500) == dark
    page.locator("td[data-cell] >> nth=3").hover()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_it_prints_without_its_controls(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert page.locator("#maps-controls").is_hidden()
    assert page.locator("table.heat >> nth=0").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


def test_measured_attention_colours_tokens_and_has_a_chart(opened: Callable[..., Any], measured: Path) -> None:
    page = opened(measured)
    assert page.evaluate("data.traces.filter((trace) => trace.measured).length") == 2
    page.evaluate("openTrace(data.traces.find((trace) => trace.measured))")
    thinking = page.evaluate("traceView.trace.measured.attention.length")
    assert thinking == page.evaluate("traceView.trace.thinking")
    assert page.locator(".scatter circle").count() == thinking
    for mode in ("predicted", "attention"):
        page.select_option("#trace select", mode)
        assert page.locator(".token.h6, .token.h5, .token.h4").count() > 0
    mean = page.evaluate(
        "traceView.trace.measured.attention.reduce((a, b) => a + b) / traceView.trace.measured.attention.length"
    )
    assert mean == pytest.approx(1.0, abs=0.01)
    assert "Question" in page.locator("#trace .facts").inner_text()
    assert "Reference" in page.locator("#trace .facts").inner_text()


def test_two_settings_side_by_side_and_what_the_departing_step_missed(
    opened: Callable[..., Any], measured: Path
) -> None:
    page = opened(measured)
    with Store.open(measured.parent / "run") as store:
        stored = {(str(t.setting), t.problem): t for _, t in store.traces()}
    shown = page.evaluate(
        "data.traces.map((t, i) => [i, data.cells[t.cell].name, t.problem]).filter(([i]) => data.traces[i].departs)"
    )
    assert shown
    for index, name, problem in shown:
        trace, full = stored[name, problem], stored["full", problem]
        departs = page.evaluate(f"data.traces[{index}].departs")
        at = departs["at"]
        assert trace.tokens[:at] == full.tokens[:at]
        assert trace.tokens[at] != full.tokens[at]
        assert trace.eviction_trace is not None
        prompt = trace.usage.prompt_tokens
        gone = {position for position, left in enumerate(trace.eviction_trace.left) if 0 < left <= at}
        assert {prompt + missed for missed, _ in departs["missed"]} <= gone
        paid = attention_of_the_newest(full, at)
        assert departs["share"] == pytest.approx(sum(paid[position] for position in gone), abs=1e-3)
        first, part = departs["missed"][0]
        assert part == pytest.approx(max(paid[position] for position in gone if position >= prompt), abs=1e-3)
        assert part == pytest.approx(paid[prompt + first], abs=1e-3)
    page.evaluate(f"openTrace(data.traces[{index}])")
    assert f"After {at} new tokens it departs" in page.locator(".departure").inner_text()
    assert page.locator("#trace .token.missed").count() == len(departs["missed"])
    page.click("text=Read both side by side")
    assert page.locator(".pair section").count() == 2
    assert page.locator(".pair .token.parts").count() == 2
    assert f"The first {at} tokens are the same" in page.locator(".parting").inner_text()
    assert page.evaluate(PARTING_SHOWN) == [True, True]
    page.click(".departure button >> nth=0")
    assert page.locator(".pair .token.at").count() == 1
    # Of one setting with itself there is nothing to compare.
    assert page.locator("#trace select >> nth=1").locator("option").count() == 1 + 4


def test_measured_attention_stands_beside_a_trace_without(opened: Callable[..., Any], measured: Path) -> None:
    page = opened(measured)
    page.evaluate("openTrace(data.traces.find((trace) => trace.measured && data.cells[trace.cell].short !== 'full'))")
    page.select_option("#trace select >> nth=1", "full")
    page.evaluate(
        "delete sameSample(traceView.trace).find((trace) => data.cells[trace.cell].short === 'full').measured"
    )
    page.select_option("#trace select >> nth=0", "attention")
    assert page.locator(".pair section >> nth=0").locator(".token.h6, .token.h5, .token.h4").count() > 0
    assert page.locator(".pair .token.kept, .pair .token.in").count() == 0


def test_a_cell_of_a_mean_opens_a_trace_of_its_own_model(opened: Callable[..., Any], tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), models=("m1", "m2"), benchmarks=("b1", "b2"), problems=2, samples=1)
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan):
            store.add(key, trace)
    write_report(RunAnalysis(RunData.open(tmp_path / "run")), tmp_path / "report.html", measure=0)
    page = opened(tmp_path / "report.html")
    for model in ("m2", "m1"):
        page.select_option("#maps-controls select >> nth=0", model)
        page.click("#maps-panels td[data-cell] >> nth=0")
        assert page.evaluate("data.cells[traceView.trace.cell].model") == model
    assert page.locator("#trace[aria-live]").count() == 0
    assert page.locator("table.list").count() == page.locator("table.list > caption").count() == 2
    # The comparisons fit the page, their p-values too.
    assert (
        page.evaluate(
            "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)"
            "(document.querySelector('#comparisons .scroll'))"
        )
        == 0
    )
    assert page.evaluate("[fixed(-0.04), signed(-0.04), signed(0.04), signed(-0.05), signed(3), fixed(51.25)]") == [
        "0.0", "0.0", "0.0", "−0.1", "+3.0", "51.3",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_marks_can_be_read(opened: Callable[..., Any], real: Path, scheme: str) -> None:
    page = opened(real, scheme=scheme)
    assert serious(page) == []
    page.evaluate("for (const one of document.querySelectorAll('.outcomes td button')) one.className = 'r'")
    assert min(page.evaluate(CONTRASTS.replace("td[data-cell]", ".outcomes td button"))) >= 4.5


def attention_of_the_newest(trace: Trace, new: int) -> Any:
    """What the newest of so many tokens attends to, by transformers' own eager attention: mean of layers and heads."""
    import torch
    from transformers import AutoModelForCausalLM

    handle = models.find(trace.model)
    problem = next(problem for problem in find(trace.benchmark).problems(2) if problem.id == trace.problem)
    ids = [*handle.encode(find(trace.benchmark).prompt(problem)), *trace.tokens[:new]]
    model = AutoModelForCausalLM.from_pretrained(handle.folder, attn_implementation="eager")
    with torch.inference_mode():
        result = model(torch.tensor([ids]), output_attentions=True).attentions
    return torch.stack([layer[0, :, -1] for layer in result]).mean((0, 1)).tolist()


def hostile_report(folder: Path, text: str, name: str = "") -> Path:
    plan = manifest(grid("dynts"), models=(f"m{name}",), benchmarks=(f"b{name}",), problems=2, samples=1)
    with Store.create(folder / "run") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan):
            grade = Grade(trace.grade.correct, 1.0, text, Status.OK)
            store.add(
                key, replace(trace, text=text * 3, grade=grade, eviction_trace=EvictionTrace(1, (0,) * 22, (1,) * 22))
            )
    write_report(RunAnalysis(RunData.open(folder / "run")), folder / "report.html")
    return folder / "report.html"


def test_hostile_text_is_shown_and_does_nothing(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(hostile_report(tmp_path, HOSTILE, HOSTILE))
    page.locator("td[data-cell] >> nth=0").hover()
    page.locator("td[data-cell] >> nth=0").click()
    assert "</script><script>window.harmed=1</script>" in page.locator("#trace pre").inner_text()
    assert "⟨U+202E⟩⟨U+0000⟩⟨U+001B⟩[2J&lt;b&gt; {{7*7}}" in page.locator("#trace pre").inner_text()
    page.wait_for_timeout(200)
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_a_megabyte_in_one_trace_does_not_break_the_page(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(hostile_report(tmp_path, "𝕏\u2066<b>" * 60_000))
    page.locator("td[data-cell] >> nth=0").click()
    assert "more characters are in the run" in page.locator("#trace").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_all_traces_of_a_cell_are_a_page_away(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.report.page.TRACES_LIMIT", 20_000)
    plan = manifest(grid("dynts"), problems=3)
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan):
            store.add(key, trace)
    write_report(
        RunAnalysis(RunData.open(tmp_path / "run")), tmp_path / "the report.html", per_cell=1, trace_pages=True
    )
    page = browser.new_page()
    page.goto((tmp_path / "the report.html").as_uri())
    page.click("text=Each benchmark")
    page.locator("table.heat >> nth=1 >> td[data-cell] >> nth=0").click()
    page.click("text=All traces of this cell")
    page.wait_for_load_state()
    assert page.locator("#traces-list li").count() == 6
    assert "CHAIN6 | dynts(" in page.locator("h1").inner_text()
    page.click("text=Back to the report")
    page.wait_for_load_state()
    assert page.locator("table.heat").count() == 3
    page.close()
