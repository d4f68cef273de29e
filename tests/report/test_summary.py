"""The page that `describe` prints: short, and every number of it stands on a map or in the JSON."""

import re
from dataclasses import replace

import pytest

from kvatlas.core import Setting
from kvatlas.figures.panels import metric_panels
from kvatlas.report.describe import describe_sources
from kvatlas.report.description import describe
from kvatlas.report.description_json import to_json
from kvatlas.report.map_figure import plot_sources
from kvatlas.report.summary import one_page
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, setting, traces

#: A number with a decimal point, its sign not part of it.
DECIMAL = re.compile(r"(?<![\w.])(\d[\d,]*\.\d+)(?![\w.])")


FULL = (Setting.of("full"),)


def described(chance, margin=3.0, problems=120, baselines=FULL):
    plan = manifest(grid("dynts", "random"), problems=problems, samples=1, baselines=baselines)
    analysis = RunAnalysis(RunData(plan, list(traces(plan, chance)), lose_at_most=margin))
    return describe(
        analysis.maps, analysis.comparisons, verdicts=analysis.verdicts, choices=analysis.choices, notes=analysis.notes
    )


def numbers(value):
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [abs(float(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


def loses_with_ratio(item):
    return {0.1: 0.2, 0.3: 0.6}.get(item.values.get("ratio"), 1.0)


@pytest.fixture(scope="module")
def run():
    return described(loses_with_ratio)


@pytest.mark.parametrize("source", ["run", "published"])
def test_every_decimal_stands_in_the_json(source, run):
    description = run if source == "run" else describe_sources([f"published:dynts_r1_{n}" for n in ("llama", "qwen")])
    page, known = one_page(description), numbers(to_json(description))
    printed = DECIMAL.findall(page.replace("p < 0.001", ""))
    assert len(printed) > 30
    for text in printed:
        number, places = float(text.replace(",", "")), len(text.partition(".")[2])
        assert any(abs(item - number) <= 0.51 * 10**-places for item in known), text


def test_it_is_a_page(run):
    words = re.findall(r"[^\s|]*\w[^\s|]*", one_page(run))
    assert len(words) < 350
    assert "No trend" not in one_page(run)


def test_the_recommended_setting_is_shown_and_what_breaks_the_margin_is_marked(run):
    page, result = one_page(run), to_json(run)
    (choice,) = result["recommendation"]["all"]
    assert (choice["margin"], choice["shown"]) == (3, True)
    assert "ratio=0.5" in choice["setting"]
    assert choice["loses_low"] <= choice["loses"] <= choice["loses_high"] <= 3
    assert choice["loses"] == 0
    assert "is the cheapest shown to lose at most 3 points; it loses 0.0" in page
    assert page.count("!") - 1 == 12
    assert page.count("*") - 1 == sum(cell["shown"] for item in result["means"] for cell in item["estimates"])


def borderline(benchmarks):
    """By the settings of one policy alone some are shown to keep the margin, over all of a model's settings none is."""
    plan = manifest(grid("dynts", "random", "h2o"), benchmarks=benchmarks, problems=40, samples=1)
    chances = {"dynts": 0.98, "random": 0.8, "h2o": 0.7}
    return plan, list(traces(plan, lambda one: chances.get(one.policy, 1.0), seed=1))


@pytest.mark.parametrize(("benchmarks", "margin"), [(("CHAIN6",), 14), (("CHAIN6", "CHAIN8"), 7)])
def test_marks_frames_and_recommendation_agree_in_borderline_runs(benchmarks, margin):
    plan, stored = borderline(benchmarks)
    analysis = RunAnalysis(RunData(plan, stored, lose_at_most=margin))
    description = describe_sources([analysis])
    result, page = to_json(description), one_page(description)
    entries = result["means"] or result["maps"]
    (choice,) = result["recommendation"]["all"]
    decided = {entry.pop("setting"): entry for entry in choice["losses"]}
    assert not choice["shown"]
    assert "no setting is shown to lose at most" in page
    assert page.count("*") == 1
    assert page.count("!") - 1 == sum(entry["broken"] for entry in decided.values())
    for map_, entry in zip(analysis.means or analysis.maps, entries, strict=True):
        assert map_.keeps == frozenset()
        assert "no cell is shown to lose at most" in metric_panels([map_])[0].notes[-1].text
        for cell in entry["estimates"]:
            loss = decided[str(map_.cells[cell["local_window"], cell["ratio"]].setting)]
            assert loss | cell == cell | {"broken": loss["broken"]}

    # The page of one policy looks them up, too.
    alone = to_json(describe_sources([analysis], policy="dynts"))
    assert (alone["means"] or alone["maps"]) == [entry for entry in entries if entry["policy"] == "dynts"]
    assert [loss.pop("setting") for loss in alone["recommendation"]["losses"]] == list(decided)[:9]
    assert alone["recommendation"]["losses"] == list(decided.values())[:9]


def test_policies_in_runs_of_their_own_have_the_limits_of_one_run(tmp_path):
    plan, stored = borderline(("CHAIN6",))
    runs = []
    for policy in ("dynts", "random", "h2o"):
        own = {policy, "full"}
        with Store.create(tmp_path / policy) as store:
            store.put_manifest(replace(plan, expected=tuple(c for c in plan.expected if c.setting.policy in own)))
            for key, trace in stored:
                if trace.setting.policy in own:
                    store.add(key, trace)
        runs.append(tmp_path / policy)
    whole, split = (
        [
            [cell["loses_low"], cell["loses_high"]]
            for map_ in to_json(describe_sources(sources))["maps"]
            for cell in map_["estimates"]
        ]
        for sources in ([RunAnalysis(RunData(plan, stored))], runs)
    )
    # The quantile is simulated, and a new order of problems draws other numbers.
    assert split == [pytest.approx(limits, abs=0.3) for limits in whole]
    figure, *_ = plot_sources(runs, tmp_path / "maps.svg", lose_at_most=14)
    assert "Outlined" not in figure.read_text("utf-8")


def test_where_nothing_is_shown_it_says_what_would():
    description = described(lambda one: 1.0 if one.policy == "full" else 0.99, problems=40)
    (choice,) = to_json(description)["recommendation"]["all"]
    assert (choice["setting"], choice["loses"], choice["shown"]) == (None, None, False)
    more = choice["nearest"]["more_problems"]
    assert f"{more:,} more problems would show" in one_page(description)
    wide = described(lambda one: 1.0 if one.policy == "full" else 0.99, problems=40, margin=30.0)
    assert to_json(wide)["recommendation"]["all"][0]["shown"] is True


def test_without_a_full_cache_shown_is_unknown():
    description = described(loses_with_ratio, baselines=(setting("window", 32, 0.5),))
    (choice,) = to_json(description)["recommendation"]["all"]
    assert (choice["shown"], choice["loses"]) == (None, None)
    assert "Without traces of the full cache nothing says what it loses" in one_page(description)


def test_effects_have_one_joint_test_with_limits_that_hold_together(run):
    effects = to_json(run)["effects"]
    assert {"axis", "over", "p", "adjusted_p", "levels"} <= set(effects[0])
    ratio = next(effect for effect in effects if effect["axis"] == "ratio")
    assert ratio["over"] == "tiny | mean of 2 | dynts"
    low = ratio["levels"][0]
    assert (low["level"], low["difference"] < -40) == (0.1, True)
    assert low["low"] < low["difference"] < low["high"] < 0
    assert all(effect["p"] <= effect["adjusted_p"] for effect in effects)
    assert re.search(r"dynts: ratio 0\.[15] lies \d+\.\d points", one_page(run))


def test_values_of_csv_maps_are_printed_as_given():
    page = one_page(describe(read_maps("published:dynts_r1_llama")))
    assert "49.05" in page
    assert "49.0 " not in page
