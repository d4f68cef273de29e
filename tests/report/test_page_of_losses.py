"""Losses on the pages: maps of points lost, the part for a decision, and how an answer was lost."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kvatlas import models, registry
from kvatlas.autopsy.autopsies import Autopsy, SavingToken, writing
from kvatlas.autopsy.summary import ARMS
from kvatlas.benchmarks import find
from kvatlas.core import EvictionTrace, Grade, Setting, Status, Trace
from kvatlas.engine.memory_plan import MARGIN
from kvatlas.figures import colours
from kvatlas.figures.marks import state_of
from kvatlas.models import ModelHandle
from kvatlas.models.token_texts import token_texts
from kvatlas.report.app.page import write_report
from kvatlas.report.app.run_source import open_runs
from kvatlas.report.app.traces import differing_parts
from kvatlas.report.description import say
from kvatlas.report.result import open_result
from kvatlas.results import Store
from kvatlas.text import fixed
from tests.report.chromium import AXE_FAULTS, NEEDS_CHROMIUM, assert_fits_without_faults, heading, load_axe
from tests.report.conftest import SPEC
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

pytestmark = NEEDS_CHROMIUM
#: Where a token stands in its pane, as a share of the pane's height, and its distance from the top of the page.
PLACES = """() => [...document.querySelectorAll('.pair pre')].map((pre) => {
  const token = pre.querySelector('.parts').getBoundingClientRect(), box = pre.getBoundingClientRect();
  return [(token.top - box.top) / box.height, token.top];
})"""
#: A chain in which c is computed early and needed at the end; the answer of a trace without it is wrong.
STEPS = "a = 1 , a1 .\nb = 2 , b2 .\nc = a + b : a1 , b2 , 1 + 2 = 3 , c3 .\n"
LINE = "a1 , b2 .\n"
RIGHT = "d = c + a : c3 , a1 , 3 + 1 = 4 , d4 .\n</think>c = 3 , d = 4"
FORGOTTEN = "d = c + a : c unknown .\n</think>c = 3 , d = 9"


# -- maps --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run in which settings lose little or much."""

    def chance(setting: Setting) -> float:
        if setting.policy == "full":
            return 1.0
        return 0.3 if setting.values["ratio"] == 0.1 else 0.995

    plan = replace(manifest(grid("dynts"), models=("embedded:tiny-llama",), problems=200), spec=SPEC)
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(1536, 0)) for cell in plan.expected))
    folder = tmp_path_factory.mktemp("losing")
    write_report(open_result([store_run(folder / "run", plan, chance)]), folder / "report.html", per_cell=0)
    return folder / "report.html"


def test_maps_show_points_lost_and_the_metric_on_demand(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(f"{losing.as_uri()}#/run/maps")
    page.wait_for_selector("#maps-panels table.heat")
    cells = page.evaluate("""() => [...document.querySelectorAll("#maps-panels table")].flatMap((table, index) => {
      const { cells, states } = data.maps[index];
      return cells.flatMap((row, y) => row.map((number, x) => {
        const node = table.rows[y].cells[x + 1], { difference } = data.cells[number];
        return [difference[0], node.firstChild.textContent, node.style.backgroundColor, states[y][x]];
      }));
    })""")
    for difference, text, colour, state in cells:
        assert text == fixed(-difference).replace("-", "−")
        # What is proven has a colour: a quiet one within the margin, a red one beyond it. What is open has none.
        if state in ("open", "untested"):
            assert colour == ""
        else:
            assert (colour == "var(--silent)") == (state == "within")
    assert {"within", "beyond", "open"} <= {state for *_, state in cells}
    silent = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--silent').trim()")
    assert silent == colours.LIGHT.within_margin
    # The full cache is said once, with its Pass@1; other baselines lose points.
    assert page.locator(".beside button").all_inner_texts()[0].startswith("full: Pass@1 ")

    page.select_option("#view label:has-text('Show') select", "value")
    page.wait_for_function("() => location.hash.includes('show=value')")
    page.wait_for_function("() => document.querySelector('#maps-panels td').style.backgroundColor.startsWith('rgb')")
    shown = page.locator("#maps-panels td[data-cell] >> nth=0").inner_text()
    assert shown.startswith(fixed(page.evaluate("data.cells[data.maps[0].cells[0][0]].value")))


#: The name, the state, the box and the words of each row.
ROWS = """() => [...document.querySelectorAll("table.forest tbody tr")].map((row) => [
  row.querySelector("button").textContent,
  [...row.querySelectorAll(".mark")].pop().getAttribute("class").replace("mark ", ""),
  row.classList.contains("pick"),
  row.querySelector(".strip + .unseen").textContent,
])"""


def test_the_forest_has_a_row_a_setting_and_a_box_around_the_recommended_one_alone(
    visit: Callable[..., Any], losing: Path
) -> None:
    page = visit(losing.as_uri())
    page.wait_for_selector("table.forest")
    rows = page.evaluate(ROWS)
    (choice,) = open_result([losing.parent / "run"]).choices
    by_name = {
        f"local window {s.values['local_window']}, ratio {s.values['ratio']}": id_ for id_, s in choice.settings.items()
    }
    assert {name for name, *_ in rows} == by_name.keys()
    # By what they save, the most first, each with its state and its interval.
    saved = [choice.savings[by_name[name]].memory for name, *_ in rows]
    assert saved == sorted(saved)
    for name, state, is_pick, said in rows:
        loss = choice.losses[by_name[name]]
        assert state == state_of(loss, choice.margin, by_name[name] in choice.untested)
        assert is_pick == (by_name[name] == choice.recommended.id)
        assert said.startswith(f"95 %: {fixed(100 * loss.low)} to {fixed(100 * loss.high)}".replace("-", "−"))
    assert {state for _, state, *_ in rows} >= {"within", "beyond"}
    # A mark and the margin's line stand where the axis says.
    places = page.evaluate("""() => [...document.querySelectorAll("table.forest tbody tr")].map((row) => {
      const centre = (node) => { const box = node.getBoundingClientRect(); return (box.left + box.right) / 2; };
      return [centre([...row.querySelectorAll(".mark")].pop()), centre(row.querySelector("line.edge"))];
    })""")
    for (name, *_), (mark, edge) in zip(rows, places, strict=True):
        assert (mark <= edge + 0.6) == (choice.losses[by_name[name]].value <= choice.margin)


def test_where_nothing_is_proven_no_colour_no_box_and_one_limit(visit: Callable[..., Any], tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), models=("embedded:tiny-llama",), problems=12, samples=1)
    result = open_result([store_run(tmp_path / "run", plan, lambda setting: 1.0 if setting.policy == "full" else 0.8)])
    write_report(result, tmp_path / "report.html", per_cell=0)
    page = visit((tmp_path / "report.html").as_uri())
    page.wait_for_selector("table.forest")
    assert {state for _, state, *_ in page.evaluate(ROWS)} <= {"open", "untested"}
    assert page.locator(".pick, .boxed").count() == 0
    card = page.locator(".card.unproven")
    (limit,) = re.findall(r"at most ([\d.]+)", card.locator("dl").inner_text())
    # The card, its words and the terminal name one limit.
    assert f"at most {limit}" in card.locator("details p").inner_text()
    assert f"at most {limit}" in say("recommendations", result)[0]
    page.evaluate("location.hash = '#/run/maps'")
    page.wait_for_selector("#maps-panels table.heat")
    assert not any(
        page.evaluate("[...document.querySelectorAll('#maps-panels td')].map((n) => n.style.backgroundColor)")
    )


def test_controls_stand_below_the_first_result_and_fit_a_phone(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(losing.as_uri())
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("#verdicts .card")
    card = page.locator("#verdicts .card >> nth=0").bounding_box()
    assert page.locator("#search").is_hidden()
    for select in page.locator("#view select").all():
        box = select.bounding_box()
        if box is not None:
            assert box["y"] > card["y"] + card["height"]
            assert box["x"] + box["width"] <= 390


# -- for a decision ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def computed(losing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the same run, as if its model were large enough to fill a card by its memory."""
    page = tmp_path_factory.mktemp("computed") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvatlas.report.app.documents.LARGE", 0)
        write_report(open_result([losing.parent / "run"]), page, per_cell=0)
    return page


def test_a_decision_has_what_a_card_saves_by_the_formula_of_the_plan(visit: Callable[..., Any], computed: Path) -> None:
    page = visit(f"{computed.as_uri()}#/run/decide")
    page.wait_for_selector("#decision-parts table")
    document = page.evaluate("data.decision")
    model = document["models"][0]
    # The share of a memory that is filled is the one of `kvatlas plan`; sizes are those of the model that was run.
    assert document["filled"] == MARGIN
    handle = models.find("embedded:tiny-llama")
    assert model["weights"] == handle.weight_bytes
    share = page.evaluate("offered(data.decision.models[0]).memory")

    def check(memory: float, bandwidth: float) -> None:
        rows = page.locator("#decision-parts section >> nth=0").locator("table >> nth=1").locator("tbody tr").all()
        texts = [row.locator("td").all_inner_texts() for row in rows]
        for column, kept in enumerate((1, share)):
            request_bytes = kept * model["tokens"] * model["token_bytes"]
            count = int((MARGIN * memory * 2**30 - model["weights"]) // request_bytes)
            rate = count * 0.7 * bandwidth * 1e12 / (model["weights"] + count * request_bytes)
            assert int(texts[1][column].replace(",", "")) == pytest.approx(count, abs=1)
            assert float(texts[2][column].replace(",", "")) == pytest.approx(rate, rel=0.005)

    check(80, 3.35)
    # A card of one's own.
    for index, number in enumerate(("48", "0.9")):
        page.locator("#decision-controls input").nth(index).fill(number)
        page.keyboard.press("Tab")
    check(48, 0.9)
    assert page.locator("#decision-controls select >> nth=2").input_value() == ""
    page.select_option("#decision-controls select >> nth=2", "NVIDIA H200")
    check(141, 4.8)


def test_a_decision_says_what_was_measured_and_computes_nothing_from_a_toy(
    visit: Callable[..., Any], losing: Path
) -> None:
    page = visit(f"{losing.as_uri()}#/run/decide")
    page.wait_for_selector("#decision-parts table")
    saved, lost, unmeasured = (section.inner_text() for section in page.locator("#decision-parts section").all())
    assert saved.startswith("What is saved: measured on tiny-llama")
    # No card and no model that was not run is named.
    text = page.locator("main").inner_text()
    assert "H100" not in text
    assert "R1-" not in text
    assert "is computed for models of a gigabyte or more that were run" in saved
    choice = open_result([losing.parent / "run"]).choices[0]
    for loss in choice.losses[choice.offered.id].claims.values():
        assert loss.is_kept
        assert fixed(100 * loss.limit) in lost
    for words in ("problems like these", "at most 5 %"):
        assert words in lost
    for words in ("Several turns and tools", "Long prompts", "Other models"):
        assert words in unmeasured
    heading(page, "on tiny-llama: proven to lose at most ")


def test_a_decision_is_one_screen_and_one_page_of_paper(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(f"{losing.as_uri()}#/run/decide")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_selector("#decision-parts table")
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    printed = page.pdf(format="A4", margin=dict.fromkeys(("top", "right", "bottom", "left"), "12mm"))
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


def test_a_run_without_a_full_cache_has_no_part_for_a_decision(visit: Callable[..., Any], tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), baselines=(), problems=4)
    write_report(open_result([store_run(tmp_path / "run", plan)]), tmp_path / "report.html")
    page = visit((tmp_path / "report.html").as_uri())
    page.wait_for_selector("table.heat")
    assert "Decide" not in page.locator("#pages").inner_text()


def test_the_cards_are_data() -> None:
    known = json.loads((files("kvatlas.report.app") / "cards.json").read_text("utf-8"))
    names = [card["name"] for card in known["cards"]]
    assert len(set(names)) == len(names)
    assert known["usual_card"] in names
    assert all(1 <= card["memory"] <= 1000 and 0.01 <= card["bandwidth"] <= 100 for card in known["cards"])


# -- traces ------------------------------------------------------------------------------------------------------------


def store_forgetful(folder: Path, model: ModelHandle, lines: int) -> Path:
    """Store a run whose settings lose the full cache's answers: they evict the only statement of c, and need it so many
    lines later."""

    def with_texts(trace: Trace) -> Trace:
        is_right = trace.setting.policy == "full"
        text = STEPS + LINE * lines + (RIGHT if is_right else FORGOTTEN)
        tokens = tuple(model.tokenizer.encode(text, add_special_tokens=False))
        evicted_at = [0] * (20 + len(tokens))
        if not is_right:
            # The tokens of the statement `c3` leave at a compression after 120 new tokens.
            pieces = token_texts(model.tokenizer, tokens)
            statement = range(text.index("c3"), text.index("c3") + 2)
            for index, end in enumerate(accumulate(map(len, pieces))):
                if statement.start < end and end - len(pieces[index]) < statement.stop:
                    evicted_at[20 + index] = 120
        evictions = EvictionTrace(1, tuple(evicted_at), tuple(int(not step) for step in evicted_at))
        grade = Grade(is_right, float(is_right), text.partition("</think>")[2], Status.OK)
        usage = replace(trace.usage, output_tokens=len(tokens), prompt_tokens=20)
        return replace(trace, text=text, tokens=tokens, grade=grade, usage=usage, eviction_trace=evictions)

    plan = manifest(grid("dynts"), models=("embedded:tiny-llama",), benchmarks=("CHAIN6",), problems=4, samples=1)
    ids = tuple(problem.id for problem in find("CHAIN6").problems(4))
    plan = replace(plan, spec=SPEC, expected=tuple(replace(cell, problems=ids) for cell in plan.expected))
    return store_run(folder, plan, change=with_texts)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelHandle) -> Path:
    """A run whose statements stand far before they are needed."""
    return store_forgetful(tmp_path_factory.mktemp("forgetful") / "run", tiny_llama, 60)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelHandle) -> Path:
    """A run of the same kinds of answers with an autopsy of the first lost one.

    Its traces have a quarter of the lines, and still scroll.
    """
    folder = store_forgetful(tmp_path_factory.mktemp("examined") / "run", tiny_llama, 18)
    with Store.open(folder) as store:
        cell = store.manifest().expected[1]
    arms = dict.fromkeys(ARMS, (False,) * 16) | {"cause": (True,) * 11 + (False,) * 5}
    saving = (SavingToken(60, "", 79, 9.0, 5, 17),)
    with writing(folder) as add:
        key = (cell.run_key, cell.setting.id, cell.benchmark, cell.problems[0], "0")
        add(Autopsy(key, "forgotten value", 70, reproduced=True, tokens=saving, held_out=arms))
    return folder


def test_a_lost_answer_shows_the_evicted_value_that_it_needed(served: Callable[..., Any], forgetful: Path) -> None:
    page = served([forgetful], "#/run/trace/3/1/0")
    page.wait_for_selector("#trace .pair")
    said = page.locator(".autopsy").inner_text()
    assert re.search(r"It needs c = 3 after \d+ new tokens, and every statement of it was evicted before\.", said)
    needed = page.locator(".pair section >> nth=0").locator(".token.needed").all_text_contents()
    assert "".join(needed).strip() == "c3"
    page.click(".autopsy button >> nth=0")
    assert "evicted after 120 new tokens" in page.locator("#trace .info").inner_text()
    page.click(".autopsy button >> text=Where it goes wrong")
    assert page.locator(".token.at.missed-at").count() == 1
    # Nothing of it stands in the full cache's pane, nor on the page of its own trace.
    assert page.locator(".pair section >> nth=1").locator(".needed").count() == 0


def test_lines_stand_side_by_side_with_the_departure_at_a_third(served: Callable[..., Any], forgetful: Path) -> None:
    page = served([forgetful], "#/run/trace/3/1/0")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("location.hash = '#/run/trace/3/2/0'")
    page.wait_for_function("() => state.trace?.index === 2 && document.querySelectorAll('.pair .parts').length === 2")
    page.wait_for_timeout(300)
    (share, top), (other_share, other_top) = page.evaluate(PLACES)
    assert 0.25 < share < 0.42
    assert 0.25 < other_share < 0.42
    assert top == other_top
    # Both panes stand on the first screen.
    assert page.locator(".pair pre >> nth=0").bounding_box()["y"] < 500
    page.evaluate("""() => {
      const box = document.querySelector(".pair pre");
      box.scrollTop = box.scrollHeight;
    }""")
    page.wait_for_function(
        "() => new Set([...document.querySelectorAll('.pair pre')].map((b) => b.scrollTop)).size === 1"
    )


def test_a_trace_opens_where_the_statement_and_the_departure_are_both_seen(
    served: Callable[..., Any], tmp_path: Path, tiny_llama: ModelHandle
) -> None:
    page = served([store_forgetful(tmp_path / "run", tiny_llama, 12)])
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("location.hash = '#/run/trace/3/2/0'")
    page.wait_for_selector(".pair .parts")
    page.wait_for_timeout(300)
    ends = page.evaluate("""() => {
      const box = document.querySelector(".pair pre").getBoundingClientRect();
      const inside = (node) => {
        const own = node.getBoundingClientRect();
        return [own.top - box.top, Math.min(box.bottom, innerHeight) - own.bottom];
      };
      return [".needed", ".parts"].flatMap((name) => inside(document.querySelector(`.pair pre ${name}`)));
    }""")
    assert min(ends) >= 0


def test_lost_answers_are_listed_by_their_causes(served: Callable[..., Any], forgetful: Path) -> None:
    page = served([forgetful], "#/run/find?what=lost")
    page.wait_for_function("() => document.getElementById('list-said').textContent.includes('all looked at')")
    table = page.evaluate("data.outcomes[0]")
    lost = (len(table["rows"]) - 1) * len(table["problems"])
    assert page.locator("#list-rows h2").all_inner_texts() == [f"Forgotten value: {lost} answers"]
    headings = page.locator("#list-rows thead th").all_inner_texts()
    assert headings == ["Trace", "Grade", "Expected", "Written", "How it was lost", "Cell"]
    row = page.locator("#list-rows tbody tr >> nth=0").inner_text()
    assert "c = 3 , d = 9" in row
    assert re.search(r"It needs c = 3 after \d+ new tokens", row)
    assert page.locator("#list-rows tbody tr").count() == lost


def test_axe_finds_nothing_in_any_state_of_a_trace_nor_on_paper(
    served: Callable[..., Any], examined: Path, forgetful: Path
) -> None:
    """Each state at three widths, and dark at one of them; a long trace, whose tokens stand in blocks; paper."""
    page = served([examined, shutil.copytree(forgetful, examined.parent / "long")], "#/run/trace/1/0/0")
    load_axe(page)
    # Colours have their last values at once.
    page.emulate_media(reduced_motion="reduce")

    def check(state: str, width_in_the_dark: int) -> None:
        # A pane scrolls, which asks for more than one that does not.
        panes = page.locator("#trace pre")
        assert any(panes.evaluate_all("(nodes) => nodes.map((node) => node.scrollHeight > node.clientHeight)"))
        page.emulate_media(color_scheme="dark")
        assert_fits_without_faults(page, "dark", state, widths=[width_in_the_dark])
        page.emulate_media(color_scheme="light")
        assert_fits_without_faults(page, "light", state)

    # The trace with evicted tokens as it opens, at a moment of its replay, whole, and without another beside it.
    page.wait_for_selector("#trace .pair .token.gone")
    check("as it opens", 390)
    page.click("text=Next compression")
    check("in motion", 1440)
    page.click("text=Whole trace")
    check("whole", 390)
    page.evaluate("location.hash = '#/run/trace/1/0/0?beside=none'")
    page.wait_for_function("() => state.trace && !document.querySelector('.pair')")
    check("alone", 1440)

    page.evaluate("location.hash = '#/long/trace/1/0/0'")
    page.wait_for_selector("#trace .pair .chunk")
    assert_fits_without_faults(page, "long", widths=[1440])

    # The width of A4.
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 794, "height": 1123})
    for name in ("", "/decide"):
        page.evaluate(f"location.hash = '#/run{name}'")
        page.wait_for_timeout(200)
        assert page.evaluate(AXE_FAULTS) == [], ("print", name)


def test_the_answer_is_three_pages_of_paper_without_an_empty_heading(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(losing.as_uri())
    page.wait_for_selector("table.forest")
    page.wait_for_selector("#observations li", state="attached")
    printed = page.pdf(format="A4", margin=dict.fromkeys(("top", "right", "bottom", "left"), "12mm"))
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 3
    page.emulate_media(media="print")
    seen = page.evaluate("""() => [...document.querySelectorAll("[data-tab]")].filter((node) => node.offsetHeight)
      .map((node) => [node.id, node.innerText.split("\\n").filter(Boolean).length])""")
    assert {name for name, _ in seen} == {"verdict", "forest", "decision", "maps", "summary"}
    assert all(lines > 1 for _, lines in seen)


def test_the_held_out_result_of_an_autopsy_stands_beside_the_rules(served: Callable[..., Any], examined: Path) -> None:
    page = served([examined], "#/run/trace/1/0/0")
    page.wait_for_selector("#trace .pair")
    said = page.locator(".autopsy").inner_text()
    assert "It needs c = 3" in said
    assert "the answer is right 11 times with it" in said
    assert "luck" not in said


def test_a_trace_is_read_without_the_feature(
    served: Callable[..., Any], forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.features._addresses, "autopsy.page", "kvatlas.not_there.file:name")
    page = served([forgetful], "#/run/trace/3/1/0")
    page.wait_for_selector("#trace .pair")
    assert page.locator(".autopsy, .token.needed").count() == 0
    assert page.locator(".facts mark").count() > 0


def test_the_words_in_which_answer_and_reference_differ_are_marked(
    served: Callable[..., Any], forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = differing_parts("B5 = 4 , A3 = 4 : 8", "B5 = 0 , A3 = 4 : 4")
    assert ["4", True] in parts["answer"]
    assert ["0", True] in parts["reference"]
    assert "".join(text for text, _ in parts["answer"]) == "B5 = 4 , A3 = 4 : 8"
    assert "".join(text for text, differs in parts["answer"] if not differs).startswith("B5 =  , A3")
    page = served([forgetful], "#/run/trace/3/1/0")
    page.wait_for_selector("#trace .facts mark")
    rows = page.locator("#trace .facts >> nth=0").locator("dd").all()
    run = open_runs([forgetful], {})[0]
    with Store.open(forgetful) as store:
        run.refresh(store)
    document = run.trace(3, 1, 0)
    for row, name in zip(rows, ("answer", "reference"), strict=True):
        marked = [text for text, differs in document["wrong_parts"][name] if differs and text.strip()]
        assert row.locator("mark").all_text_contents() == marked
    # Empty parameters are not shown.
    assert "predictor" not in page.locator("#trace .facts >> nth=1").inner_text()
