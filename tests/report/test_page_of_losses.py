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

from kvatlas import registry
from kvatlas.autopsy.autopsies import Autopsy, SavingToken, writing
from kvatlas.autopsy.summary import ARMS
from kvatlas.benchmarks import find
from kvatlas.core import EvictionTrace, Grade, Setting, Status, Trace
from kvatlas.engine.memory_plan import MARGIN
from kvatlas.figures import colours
from kvatlas.models import ModelHandle
from kvatlas.models.token_texts import token_texts
from kvatlas.report.app.page import write_report
from kvatlas.report.app.run_source import open_runs
from kvatlas.report.app.traces import differing_parts
from kvatlas.report.result import open_result
from kvatlas.results import Store
from kvatlas.text import fixed
from tests.report.chromium import NEEDS_CHROMIUM, heading
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
STEPS = "a = 1 , a1 .\nb = 2 , b2 .\nc = a + b : a1 , b2 , 1 + 2 = 3 , c3 .\n" + "a1 , b2 .\n" * 60
RIGHT = f"{STEPS}d = c + a : c3 , a1 , 3 + 1 = 4 , d4 .\n</think>c = 3 , d = 4"
FORGOTTEN = f"{STEPS}d = c + a : c unknown .\n</think>c = 3 , d = 9"


# -- maps --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run in which settings lose little or much."""

    def chance(setting: Setting) -> float:
        if setting.policy == "full":
            return 1.0
        return 0.3 if setting.values["ratio"] == 0.1 else 0.995

    plan = manifest(grid("dynts"), models=("embedded:tiny-llama",), problems=200)
    folder = tmp_path_factory.mktemp("losing")
    write_report(open_result([store_run(folder / "run", plan, chance)]), folder / "report.html", per_cell=0)
    return folder / "report.html"


def test_maps_show_points_lost_and_the_metric_on_demand(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(losing.as_uri())
    page.wait_for_selector("#maps-panels table.heat")
    cells = page.evaluate("""() => [...document.querySelectorAll('#maps-panels td[data-cell]')].map((node) => [
      data.cells[node.dataset.cell].difference[0], node.firstChild.textContent, node.style.backgroundColor
    ])""")
    for difference, text, colour in cells:
        assert text == fixed(-difference).replace("-", "−")
        # Losses within the margin have one quiet colour, larger ones a red.
        is_silent = -difference <= page.evaluate("data.margin")
        assert (colour == "var(--silent)") == is_silent
    assert {colour == "var(--silent)" for _, _, colour in cells} == {True, False}
    silent = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--silent').trim()")
    assert silent == colours.LIGHT.within_margin
    # The full cache is said once, with its Pass@1; other baselines lose points.
    assert page.locator(".beside button").all_inner_texts()[0].startswith("full: Pass@1 ")

    page.select_option("#view label:has-text('Show') select", "value")
    page.wait_for_function("() => location.hash.includes('show=value')")
    page.wait_for_function("() => !document.querySelector('#maps-panels td').style.backgroundColor.includes('silent')")
    shown = page.locator("#maps-panels td[data-cell] >> nth=0").inner_text()
    assert shown.startswith(fixed(page.evaluate("data.cells[data.maps[0].cells[0][0]].value")))


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


def test_a_decision_has_what_a_card_saves_by_the_formula_of_the_plan(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(f"{losing.as_uri()}#/{'run'}/decide")
    page.wait_for_selector("#decision-parts table")
    document = page.evaluate("data.decision")
    llama = {"weights": 2 * 8_030_261_248, "token": 32 * 8 * 128 * 2 * 2}
    # The share of a memory that is filled is the one of `kvatlas plan`; 16,384 tokens take 2 GiB.
    assert document["filled"] == MARGIN
    assert document["sizes"][0]["token_bytes"] == llama["token"] == 131_072

    share = document["models"][0]["settings"][0]["memory"]

    def fitting(memory: float, request_bytes: float) -> int:
        return int((MARGIN * memory * 2**30 - llama["weights"]) // request_bytes)

    def check(memory: float, bandwidth: float, tokens: int) -> None:
        rows = page.locator("#decision-parts section >> nth=0").locator("tbody tr").all()
        texts = [row.locator("td").all_inner_texts() for row in rows]
        for column, kept in enumerate((1, share)):
            request_bytes = kept * tokens * llama["token"]
            count = fitting(memory, request_bytes)
            rate = count * 0.7 * bandwidth * 1e12 / (llama["weights"] + count * request_bytes)
            assert int(texts[1][column].replace(",", "")) == count
            assert float(texts[2][column].replace(",", "")) == pytest.approx(rate, rel=0.005)

    check(80, 3.35, 16_384)
    # A card of one's own, and shorter requests.
    for index, number in enumerate(("48", "0.9", "8000")):
        page.locator("#decision-controls input").nth(index).fill(number)
        page.keyboard.press("Tab")
    check(48, 0.9, 8_000)
    assert page.locator("#decision-controls select >> nth=2").input_value() == ""
    page.select_option("#decision-controls select >> nth=2", "NVIDIA H200")
    check(141, 4.8, 8_000)


def test_a_decision_says_what_is_computed_and_what_was_measured(visit: Callable[..., Any], losing: Path) -> None:
    page = visit(f"{losing.as_uri()}#/run/decide")
    page.wait_for_selector("#decision-parts table")
    saved, lost = (section.inner_text() for section in page.locator("#decision-parts section").all())
    assert saved.startswith("What is saved: computed for R1-Llama 8B, which was not run")
    # The tiny model's losses under the sizes of another one, by its name.
    assert "were measured on tiny-llama; the sizes are computed for R1-Llama 8B" in saved
    choice = open_result([losing.parent / "run"]).choices[0]
    for loss in choice.losses[choice.offered.id].claims.values():
        assert loss.is_kept
        assert fixed(100 * loss.limit) in lost
    for text in ("problems like these", "at most 5 %", "Several turns and tools", "Long prompts", "Other models"):
        assert text in lost
    # The heading speaks of the measured model alone.
    heading(page, "on tiny-llama: proven to lose at most ")
    assert "R1-Llama" not in page.locator("#heading").inner_text()


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


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelHandle) -> Path:
    """A run whose settings lose the full cache's answers: they evict the only statement of c, and need it later."""

    def with_texts(trace: Trace) -> Trace:
        text = RIGHT if trace.setting.policy == "full" else FORGOTTEN
        tokens = tuple(tiny_llama.tokenizer.encode(text, add_special_tokens=False))
        is_right = trace.setting.policy == "full"
        evicted_at = [0] * (20 + len(tokens))
        if not is_right:
            # The tokens of the statement `c3` leave at a compression after 120 new tokens.
            pieces = token_texts(tiny_llama.tokenizer, tokens)
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
    return store_run(tmp_path_factory.mktemp("forgetful") / "run", plan, change=with_texts)


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


def test_the_held_out_result_of_an_autopsy_stands_beside_the_rules(
    served: Callable[..., Any], forgetful: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(forgetful, tmp_path / "run")
    with Store.open(folder) as store:
        cell = store.manifest().expected[1]
    arms = dict.fromkeys(ARMS, (False,) * 16) | {"cause": (True,) * 11 + (False,) * 5}
    saving = (SavingToken(60, "", 79, 9.0, 5, 17),)
    with writing(folder) as add:
        key = (cell.run_key, cell.setting.id, cell.benchmark, cell.problems[0], "0")
        add(Autopsy(key, "forgotten value", 70, reproduced=True, tokens=saving, held_out=arms))
    page = served([folder], "#/run/trace/1/0/0")
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
