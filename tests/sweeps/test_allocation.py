"""Adaptive sweeps on a real model: what is given out, resumed, promised, and described."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError
from kvatlas.figures.panels import metric_panels
from kvatlas.models import find
from kvatlas.report.description import every_map, one_page
from kvatlas.report.result import Result, analyse
from kvatlas.results import Manifest, Store
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import TraceTable
from kvatlas.sweeps import Progress, make_plan, parse_spec, sweep
from tests.sweeps.conftest import Build, contents

#: Two good settings and two that lose nearly all: the window forgets everything.
TINY: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN5", "CHAIN6"],
    "problems": 10,
    "samples": 1,
    "sampling": {"temperature": 0.6, "max_new_tokens": 190},
    "settings": [{"policy": "window", "ratio": 0.2, "ratio_over": "thinking"}],
    "axes": {"local_window": [4, 8], "kv_budget": [72, 400]},
    "lose_at_most": 40,
    "allocate": {"kind": "adaptive", "blocks": 5},
}


@pytest.fixture(scope="module")
def adaptive(spec_data: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished adaptive run with what was said on the way."""
    folder, said = tmp_path_factory.mktemp("adaptive") / "run", list[str]()
    sweep(make_plan(parse_spec(spec_data(**TINY))), folder, workers=1, on_message=said.append)
    return folder, said


def test_settings_that_break_the_margin_get_fewer_problems(adaptive: tuple[Path, list[str]]) -> None:
    folder, said = adaptive
    with Store.open(folder) as store:
        manifest = store.manifest()
        cells = TraceTable(manifest, store.columns()).cells()
        traces = len(store.keys())
    problems = {
        (c.expected.setting.values.get("kv_budget"), c.expected.baseline): len(c.expected.problems) for c in cells
    }
    assert problems[72, False] < problems[None, True] <= 10
    assert all(cell.stored == cell.promised for cell in cells)
    assert traces == sum(cell.promised for cell in cells) < 5 * 20
    assert said[0] == "embedded:tiny-llama: block 1 of 5, 5 of 5 settings"
    assert "a cheapest setting that keeps the margin is shown, after block" in said[-1]
    assert manifest.allocation["stopped"] == {"embedded:tiny-llama": said[-1].partition(": ")[2].rstrip(".")}
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))).expected == manifest.expected


def test_its_maps_are_whole_and_say_that_they_are_adaptive(adaptive: tuple[Path, list[str]]) -> None:
    maps = maps_of_run(RunData.open(adaptive[0]))
    assert all("adaptive: cells have" in map_.notes[0].text for map_ in maps)
    for map_ in maps:
        good, bad = (max((map_.cells[w, n].estimate for w in (4, 8)), key=lambda e: e.problems) for n in (400, 72))
        assert bad.problems < good.problems


def test_its_description_says_what_each_setting_loses(adaptive: tuple[Path, list[str]]) -> None:
    description = analyse([str(adaptive[0])])
    result = description.to_dict()
    (mean,) = result["means"]
    assert mean["evidence_of_difference"] is None
    assert {cell["kv_budget"] for cell in mean["estimates"] if cell["shown"]} == {400}
    assert all(cell["loses"] > 40 for cell in mean["estimates"] if cell["kv_budget"] == 72)
    assert result["comparisons"] == []
    (choice,) = result["recommendation"]["all"]
    assert (choice["candidates"], choice["margin"], choice["shown"]) == (4, 40, True)
    assert "kv_budget=400" in choice["setting"]
    assert choice["loses"] <= choice["loses_high"] <= 40
    assert "is the cheapest setting proven to lose at most 40 points" in one_page(description)
    assert "an adaptive sweep decides on the mean over benchmarks" in every_map(description)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_map_of_its_means_outlines_the_settings_that_keep_the_margin(adaptive: tuple[Path, list[str]]) -> None:
    """Those of single benchmarks have no outline: settings are dropped on the mean."""
    result = Result((RunData.open(adaptive[0]),))
    ((outlined),) = [panel.outlined for panel in metric_panels([one.map for one in result.means])]
    assert outlined
    assert {budget for _, budget in outlined} == {400}
    assert not any(panel.outlined for panel in metric_panels([one.map for one in result.maps]))


def test_a_second_start_decides_the_same_and_decodes_nothing_where_its_model_was_moved_to(
    adaptive: tuple[Path, list[str]], spec_data: Build, tmp_path: Path
) -> None:
    """A model is known by its weights: under another name the stored traces count, and nothing is decoded."""
    model, run = tmp_path / "moved", tmp_path / "run"
    shutil.copytree(find("embedded:tiny-llama").folder, model)
    shutil.copytree(adaptive[0], run)
    said: list[str] = []
    plan = make_plan(parse_spec(spec_data(**{**TINY, "models": [f"hf:{model}"]})))
    sweep(plan, run, workers=1, on_trace=lambda _: pytest.fail("decoded"), on_message=said.append)
    # Only where something is decoded there are workers.
    decisions = [line for line in adaptive[1] if " of up to " not in line]
    assert [line.partition(": ")[2] for line in said] == [
        line.removeprefix("embedded:tiny-llama: ") for line in decisions
    ]
    assert contents(run) == contents(adaptive[0])
    with Store.open(run) as store:
        assert {cell.model for cell in store.manifest().expected} == {plan.models[0].name}


def test_interrupted_it_ends_where_an_undisturbed_one_does(
    adaptive: tuple[Path, list[str]], spec_data: Build, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.done >= 30:
            raise KeyboardInterrupt

    plan, said = make_plan(parse_spec(spec_data(**TINY))), list[str]()
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, tmp_path, workers=1, on_trace=stop)
    assert len(contents(tmp_path)) < len(contents(adaptive[0]))
    sweep(plan, tmp_path, workers=1, on_message=said.append)
    assert said[-1] == adaptive[1][-1]
    assert contents(tmp_path) == contents(adaptive[0])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"allocate": "cleverly"}, "allocate.kind: input should be 'full' or 'adaptive', given 'cleverly'"),
        ({"allocate": "adaptive", "baseline": [{"policy": "streaming", "kv_budget": 400}]}, "needs the full cache"),
        (
            {"allocate": "adaptive", "axes": {}, "settings": [{"policy": "full"}], "baseline": []},
            "at least two settings",
        ),
        ({"allocate": "adaptive", "problems": 1}, "needs at least two problems of every benchmark"),
    ],
)
def test_what_cannot_be_allocated_is_one_sentence(
    spec_data: Build, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KvatlasError) as caught:
        sweep(make_plan(parse_spec(spec_data(**changes))), tmp_path, workers=1)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
