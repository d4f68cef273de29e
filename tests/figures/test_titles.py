"""Titles say what their pictures draw: each is read, and checked against the marks, rows and cells of its figure."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvatlas.core import Map
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.loss_cost import cost_figure
from kvatlas.figures.setting_rows import answer_figure
from kvatlas.report.map_figure import MapOptions, losses_of_means, metric_figure
from kvatlas.report.result import open_result
from kvatlas.report.sentences import effect_title, short_headline
from tests.figures.test_look import answered, costs_of
from tests.figures.titles import Drawn, faults_of, read

UNTRUE = json.loads((Path(__file__).parents[1] / "data" / "untrue_titles.json").read_text("utf-8"))


def title_of(figure: Figure) -> str:
    """Return the bold lines over all panels as one title."""
    lines = [text.get_text() for text in figure.texts if text.get_fontweight() == "bold" and text.get_fontsize() == 9]
    return " ".join(lines)


@pytest.mark.parametrize("shown", UNTRUE, ids=[one["title"].split()[0] for one in UNTRUE])
def test_titles_that_say_what_is_not_drawn_are_refused(shown) -> None:
    """A line that is lower, a rule of which one case is proven, and the smaller of two equally sure effects."""
    title = shown.pop("title")
    found = faults_of(title, Drawn(**shown))
    assert len(found) == 1, title
    assert "no reader" not in found[0]
    shown["title"] = title


def test_the_same_titles_are_true_where_they_are_drawn() -> None:
    """The readers refuse the drawing, and not the words."""
    lower, rule, smaller = (Drawn(**{name: one[name] for name in one if name != "title"}) for one in UNTRUE)
    assert faults_of(UNTRUE[0]["title"], replace(lower, is_falling=True)) == []
    assert faults_of(UNTRUE[1]["title"], replace(rule, pairs=[[True, True]] * 4)) == []
    assert faults_of(UNTRUE[2]["title"], replace(smaller, effects=smaller.effects[:1])) == []


def figure_of(kind: str) -> Figure:
    """Return a figure of settings that are proven, open and beyond, or of too few problems."""
    result = answered(6 if "few" in kind else 60)
    title = short_headline(result.choices, result.comparisons)
    if kind.startswith("forest"):
        return answer_figure(result.choices, "pass@1", title=title)
    if kind.startswith("cost"):
        return cost_figure(result.choices, "memory", costs_of(result), "pass@1", title=title)
    if kind.startswith("means"):
        means = [one.map for one in result.means]
        return metric_figure(result, means, MapOptions(mean=True), losses_of_means(result))
    return map_figure([one.map for one in result.maps])


@pytest.mark.parametrize("kind", ["forest", "forest of few", "cost of few", "means of few", "maps", "maps of few"])
def test_titles_of_figures_are_true(kind: str) -> None:
    figure = figure_of(kind)
    assert faults_of(title_of(figure), read(figure)) == []


def test_a_title_about_one_model_names_that_with_the_box() -> None:
    choices = answered().choices
    title = short_headline([choices[0], replace(choices[1], losses=_undecided(choices[1]), by_memory=None)], [])
    figure = answer_figure([choices[0], replace(choices[1], losses=_undecided(choices[1]), by_memory=None)], "pass@1")
    assert title == "On tiny alone, dynts is proven to lose at most 8 points"
    drawn = replace(read(figure), names=["tiny", "other"])
    assert faults_of(title, drawn) == []
    assert faults_of(title.replace("tiny", "other"), drawn) != []


def _undecided(choice):
    return {id_: replace(loss, is_kept=False, is_broken=False) for id_, loss in (choice.losses or {}).items()}


def test_a_title_about_a_level_counts_the_maps_and_tells_the_largest_of_equally_sure_effects() -> None:
    result = open_result([f"published:dynts_r1_{model}" for model in ("llama", "qwen")])
    title = effect_title(result.effects)
    cells = [{at: cell.estimate.value for at, cell in one.map.cells.items()} for one in result.maps]
    effects = []
    for effect in result.effects:
        for level, contrast in effect.levels:
            p = max(effect.adjusted_p, contrast.p)
            effects.append({"axis": effect.axis, "level": level, "points": 100 * contrast.value, "p": p})
    assert faults_of(title, Drawn(cells=cells, effects=effects)) == []

    # Of two axes with the same p the one that differs more is told.
    first = next(effect for effect in result.effects if effect.is_found)
    largest = max(first.levels, key=lambda pair: abs(pair[1].value))
    doubled = tuple((level, replace(one, value=2 * one.value)) for level, one in first.levels)
    assert effect_title([first, replace(first, axis="other", levels=doubled)]).startswith("Other ")
    assert effect_title([replace(first, axis="other", levels=doubled), first]).startswith("Other ")
    assert abs(largest[1].value) < 2 * abs(largest[1].value)


def test_a_title_of_an_unknown_form_is_refused(llama: list[Map]) -> None:
    drawn = read(map_figure(llama[:1]))
    assert faults_of("Everything is fine", drawn) == ["no reader knows the title 'Everything is fine'"]
    assert np.isfinite(drawn.count("within"))
