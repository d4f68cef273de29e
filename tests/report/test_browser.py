"""The app in a real Chromium, as a file opened from disk and served over stores."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas import add_column
from kvatlas.autopsy.autopsies import Autopsy, SavingToken, writing
from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import parse_plan, read_maze
from kvatlas.core import EvictionTrace, Grade, Setting, Status, Trace
from kvatlas.report.app.page import write_report
from kvatlas.report.result import open_result
from kvatlas.results import Store
from tests.report.chromium import NEEDS_CHROMIUM, assert_fits_without_faults, heading, load_axe
from tests.stats.synthetic import grid, manifest, traces
from tests.stored import store_run

pytestmark = NEEDS_CHROMIUM
HOSTILE = (
    "</script><script>window.harmed=1</script><img src=x onerror='window.harmed=2'>\u202e\x00\x1b[2J&lt;b&gt; {{7*7}} "
)


# -- a file ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small real sweep: real tokens, real evictions."""
    page = tmp_path_factory.mktemp("browser") / "report.html"
    write_report(open_result([finished]), page)
    return page


def test_it_opens_from_disk_with_everything_drawn_and_tells_what_a_cell_rests_on(
    opened: Callable[..., Any], real: Path
) -> None:
    page = opened(real)
    draws_mazes(page)
    # Each map is on its page, and beside its sentences.
    for place in ("#maps-panels", "#sentences"):
        assert page.locator(f"{place} table.heat").count() == 6
        assert page.locator(f"{place} table.heat td[data-cell]").count() == 6 * 4
    # A row of the forest is a setting with its control in its place.
    rows = page.locator("table.forest tbody tr")
    assert rows.count() == len(page.evaluate("data.cards.flatMap((card) => card.rows)")) > 3
    assert page.locator("table.outcomes tbody tr").count() == 3
    assert page.locator("#provenance").inner_text().startswith("Provenance")
    assert page.locator("#provenance-table tr").count() > 3
    assert page.locator("#observations li").count() > 3
    # The script hash of the policy is the page's own: a script added later does not run.
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), {innerHTML: '<i>x</i>'}))")
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator("table.heat >> nth=2").locator("td[data-cell] >> nth=1").hover()
    for text in ("local_window=8, ratio=0.5", "3 problems, 2 samples each", "tokens cached on average", "s per answer"):
        assert text in tip.inner_text()
    page.locator("h1").hover()
    assert tip.is_hidden()
    page.locator(".forest button >> nth=0").focus()
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    for name in ("Answer", "Maps", "Traces", "Compare", "Evidence"):
        page.click(f"#pages a >> text={name}")
        page.wait_for_selector(f"#pages a[aria-current] >> text={name}")


def draws_mazes(page: Any) -> None:
    """The page draws a maze with the walk of its plan."""
    problem = find("SEQBENCH-6x6-B1").problems(4)[3]
    maze, plan = read_maze(problem.question.splitlines()), parse_plan(problem.answer)
    drawn = page.evaluate(
        """(texts) => {
          const maze = mazeOf(texts[0], [["reference", texts[1]], ["answer", null]]);
          const walk = maze.querySelector(".walk.reference").getAttribute("points").split(" ").length;
          return [...[".floor", ".locked", ".walk"].map((name) => maze.querySelectorAll(name).length), walk];
        }""",
        [problem.question, problem.answer],
    )
    walked = sum(name in ("start", "move_to") for name, _ in plan)
    assert drawn == [len(maze.doors), len(maze.locked_doors), 1, walked]
    assert page.evaluate("mazeOf(state.runs[0].name, [])") is None


def test_sort_filter_and_walk_from_a_problem_to_its_trace(opened: Callable[..., Any], real: Path) -> None:
    page = opened(real)

    def names() -> Any:
        return page.locator("table.outcomes tbody th").all_inner_texts()

    every = names()
    assert every == ["CHAIN4-0000", "CHAIN4-0001", "CHAIN4-0002"]
    page.locator("table.outcomes thead button >> nth=0").click()
    assert names() == every[::-1]
    page.locator("table.outcomes thead button >> nth=1").click()
    shares = [int(text.split()[0]) for text in page.locator("table.outcomes tbody td:nth-child(2)").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    page.fill("#problems-controls input[type=search]", "0002")
    assert names() == ["CHAIN4-0002"]
    page.fill("#problems-controls input[type=search]", "")
    page.check("#problems-controls input[type=checkbox]")
    assert "of 3 problems" in page.locator("#problems-said").inner_text()
    page.uncheck("#problems-controls input[type=checkbox]")
    page.select_option("#problems-controls select >> nth=0", "1")
    page.wait_for_function("() => document.querySelector('.outcomes tbody th').textContent.startsWith('CHAIN5')")
    before = page.locator("table.outcomes thead th").count()
    page.select_option("#problems-controls select >> nth=1", "window")
    assert page.locator("table.outcomes thead th").count() < before
    button = page.locator("table.outcomes td button.has >> nth=0")
    problem = button.get_attribute("aria-label").split(", ")[-1].split(":")[0]
    button.click()
    page.wait_for_selector("#trace h3")
    assert problem in page.locator("#trace h3").inner_text()


def test_hostile_text_is_shown_and_does_nothing(
    opened: Callable[..., Any], served: Callable[..., Any], tmp_path: Path
) -> None:
    plan = manifest(grid("dynts"), models=(f"m{HOSTILE}",), benchmarks=(f"b{HOSTILE}",), problems=2, samples=1)
    evictions = EvictionTrace(1, (0,) * 22, (1,) * 22)

    def harm(trace: Trace) -> Trace:
        grade = Grade(trace.grade.correct, 1.0, HOSTILE, Status.OK)
        return replace(trace, text=HOSTILE * 3, grade=grade, eviction_trace=evictions)

    folder = store_run(tmp_path / "<img src=x onerror=alert(1)>", plan, change=harm)
    write_report(open_result([folder]), tmp_path / "report.html")
    for page in (opened(tmp_path / "report.html"), served([folder])):
        page.wait_for_function("() => state.runs.length === 1")
        pages = {"/maps": "Maps", "/problem/0/1": "p1", "/find?text=harmed": "Search", "/cell/3": "b"}
        for address, there in pages.items():
            # Lead to the address, and wait for the heading of its page.
            page.evaluate("(address) => lead(`#/${state.runs[0].name}${address}`)", address)
            heading(page, there)
            assert page.locator("#failure").inner_text() == ""
        page.click("#list-rows a >> nth=0")
        page.wait_for_selector("#trace pre")
        text = page.locator("#trace pre").inner_text()
        assert "</script><script>window.harmed=1</script>" in text
        assert "⟨U+202E⟩⟨U+0000⟩⟨U+001B⟩[2J&lt;b&gt; {{7*7}}" in text
        page.locator("#traces-map td[data-cell] >> nth=0").hover()
        page.wait_for_timeout(200)
        assert page.evaluate("window.harmed") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2


# -- a server ----------------------------------------------------------------------------------------------------------


def test_from_the_runs_to_a_token_and_all_the_way_back(served: Callable[..., Any], run: Path) -> None:
    # The second run differs only by its name.
    other = run.parent / "another run"
    if not other.exists():
        shutil.copytree(run, other)
    page = served([run, other])
    page.click("#runs a >> text=a-run")
    page.wait_for_selector("#verdicts .card")
    page.click("#pages a >> text=Maps")
    page.select_option("#view label:has-text('Show') select", "value")
    page.wait_for_function("() => location.hash.includes('show=value')")
    chosen = page.locator("#maps-panels table.heat >> nth=0 >> td[data-cell] >> nth=2")
    colour = chosen.evaluate("(node) => node.style.backgroundColor")
    chosen.click()
    # A click changes no colour.
    there = page.locator("#list-map td.here")
    assert there.evaluate("(node) => node.style.backgroundColor") == colour != ""
    page.click("#list-rows a >> nth=0")
    page.wait_for_selector("#list-controls select")
    cell = page.evaluate("data.cells[Number(here().parts[2])].name")
    page.select_option("#list-controls select", "lost")
    page.wait_for_function("() => location.hash.includes('what=lost')")
    page.wait_for_function("() => document.querySelector('#list-controls select').value === 'lost'")
    shown = page.locator("#list-rows tbody tr").count()
    assert shown == page.locator("#list-rows tbody td:has-text('full: right')").count() > 0
    page.click("#list-rows tbody a >> nth=0")
    # The trace is drawn alone first, and again when the one beside it has come.
    page.wait_for_selector("#trace .pair")
    assert cell in page.locator("#trace .facts >> nth=1").inner_text()
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
    heading(page, "Maps")
    for _ in range(3):
        page.go_back()
    heading(page, "Runs")
    # A new visitor with the address sees the same token.
    visitor = page.context.new_page()
    visitor.goto(page.home + deep)
    visitor.wait_for_selector("#trace .token.at")
    assert visitor.locator("#trace .info").inner_text().startswith("token 5 ")


def test_wrong_addresses_say_so(served: Callable[..., Any], run: Path) -> None:
    page = served([run])
    for address in ("/nope", "/a-run/cell/x", "/a-run/nothing", "/a-run/map/99", "/%E0%A4%A"):
        page.evaluate(f"location.hash = '#{address}'")
        page.wait_for_function("() => document.getElementById('failure').textContent !== ''")
        page.evaluate("location.hash = '#/'")
        page.wait_for_function("() => document.getElementById('failure').textContent === ''")


def test_a_sweep_that_goes_on_is_followed(served: Callable[..., Any], tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), problems=4)
    every = list(traces(plan))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        page = served([tmp_path / "run"], "#/run/maps")
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
        page.wait_for_selector(".card", state="attached")
        assert page.locator("#live").inner_text() == "160 traces"
        # The focus stays on its cell.
        page.wait_for_function("(cell) => document.activeElement.dataset.cell === cell", arg=cell)


def test_the_keyboard_alone_leads_from_a_run_to_a_token(served: Callable[..., Any], run: Path) -> None:
    # A server of one run opens it.
    page = served([run])
    page.wait_for_selector(".card")

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(selector)

    # A row of the answer's forest leads to its cell, beside which its map stands.
    tab_to(".forest button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list-map td[data-cell]")
    tab_to("td[data-cell]")
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement === document.querySelector('#list-map table.heat').rows[1].cells[2]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list-rows a")
    page.wait_for_function("() => document.activeElement.id === 'main'")
    tab_to("#list-rows a")
    page.keyboard.press("Enter")
    heading(page, "CHAIN6")
    page.wait_for_selector("#list-rows tbody a")
    tab_to("#list-rows tbody a")
    page.keyboard.press("Enter")
    page.wait_for_selector("#trace .token")
    page.wait_for_function("() => document.activeElement.id === 'main'")
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
    left = stored.eviction_trace.evicted_at[20:]
    for moment in (0, 59, 60, 30):
        slider.evaluate("(node, to) => { node.value = to; node.dispatchEvent(new Event('input')); }", moment)
        shown = tokens.evaluate_all("(nodes) => nodes.map((node) => [...node.classList])")
        assert [index for index, names in enumerate(shown) if "unwritten" not in names] == list(range(min(moment, 79)))
        gone = {index for index, step in enumerate(left) if 0 < step <= moment}
        assert {index for index, names in enumerate(shown) if "gone" in names} == gone
        cached = 20 + moment - sum(0 < step <= moment for step in stored.eviction_trace.evicted_at)
        assert f": {cached} cached" in said.inner_text()
    page.click("text=Next compression")
    assert said.inner_text().startswith("60 of 79")
    page.click("text=Departure")
    assert said.inner_text().startswith("40 of 79")
    page.click("text=Whole trace")
    assert page.locator("#trace .unwritten, #trace .gone, #trace .moving").count() == 0
    # Each token has the colour of its eviction; the last one only stands in the text.
    kinds = tokens.evaluate_all("(nodes) => nodes.map((node) => node.className.replace('token', '').trim())")
    assert [kind.startswith("e") for kind in kinds[:-1]] == [step > 0 for step in left]
    assert "in" in kinds[-1]
    page.click("#trace .motion button >> text=Play")
    page.wait_for_function("() => document.querySelector('#trace output').textContent.startsWith('3')")
    page.click("#trace .motion button >> text=Pause")


def test_the_tokens_that_would_have_saved_an_answer_are_marked_in_place(
    served: Callable[..., Any], run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "examined")
    with Store.open(folder) as store:
        # The first trace of the first setting with compressions, whose every third token left after 60 new ones.
        setting = store.manifest().expected[1].setting
        keys = [(key, trace) for key, trace in store.traces() if trace.setting == setting]
    saving = tuple(SavingToken(position, "", 79 - position, 9.0, 5, 17) for position in (21, 30))
    right = {"nothing": 3, "random": 5, "kind": 4, "cause": 11, "no_compression": 16}
    right |= {"cause_until_death": 8, "no_compression_until_death": 9}
    arms = {arm: (True,) * count + (False,) * (16 - count) for arm, count in right.items()}
    with writing(folder) as add:
        for run_key, trace in keys:
            key = (run_key, trace.setting.id, trace.benchmark, trace.problem, str(trace.sample))
            add(Autopsy(key, "forgotten value", 70, reproduced=True, tokens=saving, held_out=arms))
        # Of fewer than ten answers no shares are told.
        for problem in ("one more", "another"):
            add(Autopsy((*key[:3], problem, "0"), "loop", 70, reproduced=True, tokens=saving, held_out=arms))
    page = served([folder], "#/examined/trace/1/0/0?beside=none")
    page.wait_for_selector("#trace .autopsy")
    said = page.locator(".autopsy").inner_text()
    assert "after 60 new tokens, these evicted tokens restore the right answer" in said
    assert "right 11 times with them, 4 times with as many others of their kinds, 3 times with neither." in said
    nodes = page.locator("#trace pre .token")
    names = nodes.evaluate_all("(nodes) => nodes.map((node) => [...node.classList])")
    assert [index for index, classes in enumerate(names) if "saving" in classes] == [1, 10]
    page.click(".autopsy button >> nth=1")
    assert page.locator("#trace .token.at.saving").count() == 1
    assert "token 11 " in page.locator("#trace .info").inner_text()
    page.goto(f"{page.home}#/examined")
    page.wait_for_selector("#autopsies p")
    sentence = page.locator("#autopsies").inner_text()
    assert f"Of 10 answers of tiny-llama on {key[2]}" in sentence
    assert "69 % of the answers right under random numbers that the search did not use" in sentence
    assert "as many others of their kinds 25 %, nothing 19 %" in sentence


def test_pages_fit_and_axe_finds_nothing(served: Callable[..., Any], run: Path) -> None:
    """Each page at three widths, by turns light or dark."""
    page = served([run], "#/")
    load_axe(page)
    pages = ("", "/decide", "/maps", "/compare", "/evidence", "/cell/3", "/problem/0/1", "/find", "/trace/3/1/1")
    for number, address in enumerate(("#/", *(f"#/a-run{name}" for name in pages))):
        page.emulate_media(color_scheme=("light", "dark")[number % 2])
        page.evaluate(f"location.hash = {address!r}")
        page.wait_for_timeout(150)
        assert_fits_without_faults(page, address)


def test_the_first_screen_has_the_forest_beside_the_answer_and_a_phone_soon_below(visit, real: Path) -> None:
    page = visit(real.as_uri())
    page.wait_for_selector("#verdicts .card")

    def box_of(selector: str) -> dict[str, float]:
        return page.evaluate("(one) => document.querySelector(one).getBoundingClientRect().toJSON()", selector)

    page.set_viewport_size({"width": 1440, "height": 900})
    card = box_of("#verdicts .card")
    forest = box_of("table.forest")
    assert forest["bottom"] < 900 > card["bottom"]
    assert forest["right"] < card["left"]
    page.set_viewport_size({"width": 390, "height": 844})
    assert box_of("table.forest")["top"] < 1.5 * 844
    assert box_of("table.forest .strip")["width"] > 300


def test_two_traces_stand_line_beside_line_at_every_place(served: Callable[..., Any], run: Path) -> None:
    """The shorter one has empty lines at its end, so that both scroll as far, and by whole lines."""
    page = served([run], "#/a-run/trace/3/1/1")
    page.wait_for_selector("#trace .pair .parts")
    page.evaluate("""() => {
      const [short] = document.querySelectorAll(".pair pre");
      for (const node of [...short.querySelectorAll(".token")].slice(50)) node.remove();
      for (const box of document.querySelectorAll(".pair pre")) box.style.height = "6em";
    }""")
    boxes = "[...document.querySelectorAll('.pair pre')]"
    page.wait_for_function(f"() => new Set({boxes}.map((box) => box.scrollHeight)).size === 1")
    for end in (0, 1):
        page.evaluate(f"() => {{ const box = {boxes}[{end}]; box.scrollTop = box.scrollHeight * {end}; }}")
        page.wait_for_function(f"() => new Set({boxes}.map((box) => box.scrollTop)).size === 1")
    assert page.evaluate(f"{boxes}[0].getBoundingClientRect().top === {boxes}[1].getBoundingClientRect().top")


def test_a_page_that_lacks_traces_says_so_and_shows_every_question(
    opened: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    write_report(open_result([finished]), tmp_path / "report.html", per_cell=0)
    page = opened(tmp_path / "report.html")
    page.evaluate("location.hash = to(state.run, 'problem', 0, 2)")
    page.wait_for_selector("#list-map .question")
    said = page.locator("#list-said").inner_text()
    assert f"This file holds none of the {page.evaluate('data.outcomes[0].rows.length * 2')} traces" in said
    assert "kvatlas view" in said
    assert find("CHAIN4").problems(3)[2].question.split()[0] in page.locator("#list-map .question").inner_text()
    assert page.locator("#live").inner_text().endswith("(0 in this file)")


@pytest.mark.usefixtures("column_list")
def test_a_run_of_single_settings_is_a_table_that_sorts(opened: Callable[..., Any], tmp_path: Path) -> None:
    add_column("prompt_length", "traces.prompt_tokens", unit="tokens", digits=3, title="prompt length")
    settings = [Setting.from_parameters(name, kv_budget=64) for name in ("dynts", "h2o", "random", "rkv", "snapkv")]
    folder = store_run(tmp_path / "run", manifest(settings, axes=(), problems=4))
    write_report(open_result([folder]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    page.evaluate("location.hash = to(state.run)")
    page.wait_for_selector("#settings-table tbody tr")
    rows = page.locator("#settings-table tbody tr")
    assert rows.count() == 6
    values = [float(text) for text in page.locator("#settings-table tbody td:nth-child(2)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    page.click("#settings-table thead button >> text=Setting")
    assert page.locator("#settings-table tbody th").all_inner_texts() == [
        "dynts", "full", "h2o", "random", "rkv", "snapkv",
    ]  # fmt: skip
    # The maps say no more than the table.
    assert page.locator("#maps").is_hidden()
    # A column that a user adds is there, in the hover and the measures, too.
    assert page.locator("#settings-table thead button").all_inner_texts()[-2:] == ["Seconds", "Prompt length"]
    assert page.locator("#settings-table tbody td:last-child").all_inner_texts() == ["20"] * 6
    assert page.evaluate("cellFacts(data.cells[0])").pop() == "prompt length: 20 tokens"
    assert page.evaluate("Object.keys(measures)").pop() == "prompt_length"


def test_equal_values_have_an_axis_that_can_be_read(opened: Callable[..., Any], tmp_path: Path) -> None:
    folder = store_run(
        tmp_path / "run", manifest([Setting.from_parameters("dynts", kv_budget=64)], axes=(), problems=4)
    )
    write_report(open_result([folder]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    ticks = page.locator("table.forest tfoot text").all_text_contents()
    assert len(ticks) == len(set(ticks)) > 2
    assert all(re.fullmatch(r"−?\d+", text) for text in ticks)


def test_the_answer_says_what_to_try_next_with_a_spec_to_copy(opened: Callable[..., Any], tmp_path: Path) -> None:
    spec = {
        "models": ["tiny"], "benchmarks": ["CHAIN6", "CHAIN8"], "problems": 12, "samples": 2,
        "settings": [{"policy": "dynts", "kv_budget": 96}],
        "axes": {"local_window": [8, 16, 32], "ratio": [0.1, 0.3, 0.5]},
    }  # fmt: skip
    plan = replace(manifest(grid("dynts")), spec=spec)
    folder = store_run(tmp_path / "run", plan, lambda setting: 0.95 if setting.policy == "full" else 0.5)
    write_report(open_result([folder]), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    page.evaluate("location.hash = to(state.run)")
    page.wait_for_selector("#next-steps details")
    shown = [text.strip() for text in page.locator("#next-steps pre").all_text_contents()]
    assert shown == [step["spec"].strip() for step in page.evaluate("data.next")] != []
    assert "kvatlas sweep" in page.locator("#next-steps code >> nth=1").text_content()
    # A finding stands in the title, and the forest near it.
    assert page.locator("h1").inner_text() == page.evaluate("data.headline")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = false")
    assert page.locator("table.forest >> nth=0").bounding_box()["y"] < 900
