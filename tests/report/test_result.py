"""The result: the JSON's shape and numbers, and the two texts that `describe` prints of it."""

import json
import math
import re
from dataclasses import replace

import pytest

from kvatlas.core import Grade, KvatlasError, Setting, Status
from kvatlas.figures.panels import BEST, metric_panels, panels_title
from kvatlas.figures.setting_rows import nearest_words
from kvatlas.report.description import every_map, one_page, recommendation
from kvatlas.report.map_figure import MapOptions, plot_sources
from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import BINOMIAL_NOTE
from kvatlas.stats.losses import LossFamily
from kvatlas.text import fixed, p_text
from tests.stats.synthetic import AXES, grid, manifest, run_of, traces
from tests.stored import store_run

FULL = (Setting.from_parameters("full"),)
PUBLISHED = [f"published:dynts_r1_{name}" for name in ("llama", "qwen")]
#: A number with a decimal point, its sign not part of it.
DECIMAL = re.compile(r"(?<![\w.])(\d[\d,]*\.\d+)(?![\w.])")


def of_run(chance, margin=3.0, problems=120, baselines=FULL):
    plan = manifest(grid("dynts", "random"), problems=problems, samples=1, baselines=baselines)
    return analyse([run_of(plan, list(traces(plan, chance)), lose_at_most=margin)])


def loses_with_ratio(item):
    return {0.1: 0.2, 0.3: 0.6}.get(item.values.get("ratio"), 1.0)


def nearly_full(item):
    return 1.0 if item.policy == "full" else 0.99


def numbers(value):
    if isinstance(value, dict | list):
        return [number for item in (value.values() if isinstance(value, dict) else value) for number in numbers(item)]
    return [abs(float(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.fixture(scope="module")
def published():
    return analyse(PUBLISHED)


@pytest.fixture(scope="module")
def run():
    return of_run(loses_with_ratio)


def test_the_documented_keys_are_there_in_percent(published):
    data = published.to_dict()
    for item in (*data["maps"], *data["means"]):
        assert {"model", "benchmark", "metric", "policy", "evidence_of_difference"} <= set(item)
        assert set(item["omnibus"]) == {"statistic", "p", "method"}
        assert all(set(peak) == {"local_window", "ratio", "value", "low", "high"} for peak in item["peaks"])
        assert all(set(cell) == {"local_window", "ratio"} for cell in item["plateau"])
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    first = data["maps"][0]
    assert (first["min"], first["max"], first["mean"]) == (39.3, 49.3, 44.36)
    assert first["axes"] == {"local_window": [500, 1000, 2000, 3000], "ratio": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert (first["cells"], first["problems"], first["samples"]) == (20, 30, 5)
    peaks = [(p["local_window"], p["ratio"], p["value"]) for p in first["peaks"]]
    assert peaks == [(1000, 0.2, 49.3), (2000, 0.3, 49.3)]
    assert first["peaks"][0]["low"] == pytest.approx(30.67, abs=0.05)
    assert (data["means"][0]["benchmark"], data["means"][0]["problems"]) == ("mean of 4", 298)


def test_the_published_maps_show_a_ratio_effect_and_no_peak(published):
    """By the bound none of the eight maps, nor their means, shows a difference; pooled, ratio 0.1 is below the rest."""
    result = published.to_dict()
    assert [item["evidence_of_difference"] for item in (*result["maps"], *result["means"])] == [False] * 10
    # Standard deviations over cells against the binomial standard error of one cell, as published beside the maps.
    spreads = [(round(m["stability"]["spread"], 2), round(m["stability"]["noise"], 2)) for m in result["maps"]]
    assert spreads == [
        (2.75, 4.06), (1.75, 3.63), (1.29, 2.39), (1.05, 1.58), (2.81, 4.06), (1.78, 3.87), (1.13, 2.36), (0.98, 1.59)
    ]  # fmt: skip
    assert [len(item["plateau"]) for item in result["maps"]] == [20] * 8
    assert result["comparisons"] == []
    assert published.notes == ()
    assert result["recommendation"]["all"] == []
    # tests/stats/test_csv_tests.py has the numbers of the pooled effects.
    assert [(effect["axis"], effect["over"], effect["adjusted_p"] < 0.05) for effect in result["effects"]] == [
        ("local_window", "8 maps", False), ("ratio", "8 maps", True)
    ]  # fmt: skip
    text, page = every_map(published), one_page(published)
    assert "In 0 of 8 maps the settings are not exchangeable" in text
    assert text.count("The chi-square test proves no difference between the cells") == 10
    assert "ratio 0.1 (1,962 tokens stay) is below 0.2, 0.3, 0.4 and 0.5 in 8 of 8 maps (2,300" in page
    assert "No setting can be recommended without traces of a full cache" in page
    # A mean is printed as it is given.
    assert ("49.05" in page, "49.0 " in page) == (True, False)
    assert [p_text(p) for p in (0.0004, 0.0312, 1.0)] == ["< 0.001", "0.031", "> 0.5"]


def test_the_published_mean_alone_tells_its_peak_and_what_it_cannot_tell():
    result = analyse(["published:dynts_r1_qwen_mean"])
    (entry,) = result.to_dict()["maps"]
    assert entry["peaks"] == [{"local_window": 2000, "ratio": 0.4, "value": 56.3, "low": None, "high": None}]
    unknown = ("evidence_of_difference", "plateau", "may_lose", "method")
    assert {*(entry[name] for name in unknown), *entry["omnibus"].values()} == {None}
    assert "a mean can only be tested together with the maps of its benchmarks" in every_map(result)


def test_the_long_text_has_five_sections_and_every_sentence_has_its_number():
    text = every_map(analyse(PUBLISHED[:1]))
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# Overview", "# Components/Axes", "# Detailed Analysis", "# Key Observations", "# Interpretation",
    ]  # fmt: skip
    assert "49.3 (30.7–68.1) at local_window 2000, ratio 0.3" in text
    assert text.count(BINOMIAL_NOTE.text) == 1
    for line in text.splitlines():
        if line.startswith("- ") or (line and line[0].isalpha()):
            has_no_number = BINOMIAL_NOTE.text in line or line.startswith("- No setting can be recommended")
            assert has_no_number or any(mark.isdigit() for mark in line), line


def test_comparisons_baselines_and_notes_of_a_run():
    plan = manifest(grid("dynts", "random"))
    kept = [t for t in traces(plan, lambda s: 0.9 if s.policy == "dynts" else 0.3) if t[1].problem != "p0"]
    result = analyse([run_of(plan, kept, partial=True)])
    data = result.to_dict()
    first = data["comparisons"][0]
    assert (first["first"], first["second"], first["problems"], first["note"]) == ("dynts", "random", 22, None)
    assert 40 < first["difference"] < 80
    assert data["maps"][0]["baselines"][0]["setting"] == "full"
    assert all(item["p"] <= item["p_holm"] for item in data["comparisons"])
    text = every_map(result)
    assert [part in text for part in ("Paired comparisons: ", "< 0.001", "PARTIAL")] == [True] * 3


def test_the_p_values_of_maps_that_differ_are_those_of_these_maps():
    analyses = []
    for model, slope in (("alike", 0.0), ("unlike", 1.0)):
        plan = manifest(grid("dynts"), models=[model], benchmarks=["CHAIN6"], problems=60)
        run = traces(plan, lambda s, slope=slope: 0.5 + slope * (dict(s.parameters).get("ratio", 0.3) - 0.3))
        analyses.append(run_of(plan, list(run)))
    result = analyse(analyses)
    by_model = {item["model"]: item for item in result.to_dict()["maps"]}
    assert [by_model[model]["evidence_of_difference"] for model in ("alike", "unlike")] == [False, True]
    (line,) = [line for line in every_map(result).splitlines() if "the settings are not exchangeable" in line]
    p = p_text(by_model["unlike"]["omnibus"]["p"])
    assert line == f"- In 1 of 2 maps the settings are not exchangeable (unlike | CHAIN6 | dynts); p {p}."


def test_findings_stand_first_and_nothing_is_recommended_from_a_vacuous_map():
    plan = manifest(grid("dynts", ratio_over="older"), benchmarks=("CHAIN6",))
    run = [
        (key, replace(item, usage=replace(item.usage, compressions=0), grade=Grade(False, 0.0, None, Status.NO_ANSWER)))
        for key, item in traces(plan)
    ]
    result = analyse([run_of(plan, run)])
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [finding["kind"] for finding in data["findings"]] == ["floor", "unanswered", "uncompressed", "no_choice"]
    assert data["maps"][0]["validity"] == {
        "traces": 216, "bounded": 216, "compressed": 0, "no_answer": 216, "truncated": 0, "settings": 9,
        "identical": [], "same": False, "vacuous": "uncompressed",
    }  # fmt: skip
    audit = data["maps"][0]["estimates"][0]["audit"]
    assert audit == {"problems": 12, "median": 0.0, "worst": 0, "none": 100.0, "no_choice": 100.0}
    (choice,) = data["recommendation"]["all"]
    # Nothing decides such a map, and no cell is the highest.
    assert nearest_words(result.choices[0]) == ""
    (panel,) = metric_panels([one.map for one in result.maps])
    assert not any(cell.bold for cell in panel.cells.values())
    assert BEST not in panel.about
    assert (choice["setting"], choice["by_time"], choice["candidates"]) == (None, None, 9)
    text = every_map(result)
    first = "CHAIN6: 240 of 240 traces are without an answer (240) or truncated (0); they count as wrong."
    # No text was cut off, so the forms of answers are named.
    assert text.splitlines()[3].startswith(f"- {first} Read are \\boxed{{...}} and 'the answer is ...'")
    reason = "none of the 216 traces under a KV budget was compressed"
    assert f"- tiny, CHAIN6: no setting is recommended, because {reason}.\n" in text
    assert "cheapest" not in text


@pytest.mark.parametrize("order", [("AIME24", "MATH500"), ("MATH500", "AIME24")])
def test_the_page_has_every_map_of_benchmarks_that_cannot_be_averaged(order, tmp_path):
    """One definition says which maps stand for all: in the text, and where settings are chosen."""
    ratios = {"AIME24": (0.1, 0.3), "MATH500": (0.1, 0.5)}
    sources = []
    for name in order:
        lines = ["model,benchmark,policy,local_window,ratio,pass_at_1"]
        for place, ratio in enumerate(ratios[name]):
            lines += [f"m,{name},h2o,{window},{ratio},{window + place}.25" for window in (16, 32)]
        sources.append(tmp_path / f"{name}.csv")
        sources[-1].write_text("\n".join(lines) + "\n")
    result = analyse(sources)
    assert [one.map.benchmark for one in result.grids] == list(order)
    page = one_page(result)
    for name in order:
        first, second = ratios[name]
        rows = [re.split(r" *\| *", line) for line in page.splitlines()]
        assert ["", f"m h2o on {name}: local_window \\ ratio", str(first), str(second), ""] in rows
    assert f"Pass@1 in percent, {', '.join(order)}.\n" in page
    # An effect names its map, and there is no choice for a benchmark alone.
    assert [effect.over for effect in result.effects] == [f"m | {name} | h2o" for name in order for _ in range(2)]
    assert result.choices == ()
    assert "differ.\n" in page


def test_maps_that_cannot_be_averaged_or_told_apart():
    maps = read_maps("published:dynts_r1_llama")
    narrow = replace(maps[1], axes=(maps[1].axes[0], ("ratio", (0.1,))))
    result = analyse([maps[0], narrow])
    assert result.means == ()
    assert "No means over benchmarks: A mean needs maps of equal axes" in result.notes[0].text
    assert "mean of" not in every_map(result)
    with pytest.raises(KvatlasError, match="no map"):
        analyse([])


@pytest.mark.parametrize("source", ["run", "published"])
def test_the_page_is_short_and_every_decimal_of_it_stands_in_the_json(source, run, published):
    result = run if source == "run" else published
    page, known = one_page(result), numbers(result.to_dict())
    printed = DECIMAL.findall(page.replace("p < 0.001", "").replace("p > 0.5", ""))
    assert len(printed) > 30
    for text in printed:
        number, places = float(text.replace(",", "")), len(text.partition(".")[2])
        assert any(abs(item - number) <= 0.51 * 10**-places for item in known), text
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", page)) < 500


def test_the_recommended_setting_is_proven_and_what_breaks_the_margin_is_marked(run):
    page, result = one_page(run), run.to_dict()
    (choice,) = result["recommendation"]["all"]
    assert (choice["margin"], choice["shown"]) == (3, True)
    assert "ratio=0.5" in choice["setting"]
    assert choice["loses_low"] <= choice["loses"] <= choice["loses_limit"] <= 3
    assert choice["loses"] == 0
    limit = f"at most {fixed(choice['loses_limit'])}, on these 240 problems and for problems like these"
    assert f"is the cheapest setting proven to lose at most 3 points ({limit}" in page
    assert len(re.findall(r"\d!! ", page)) == 12
    shown = sum(cell["shown"] for item in result["means"] for cell in item["estimates"])
    assert len(re.findall(r"\d\*\* ", page)) == shown > 0
    assert result["recommendation"]["deployable"] == result["recommendation"]["proven_cheapest"] == choice["setting"]


def borderline(benchmarks):
    """By the settings of one policy alone some are proven to keep the margin; the three policies share the level."""
    plan = manifest(grid("dynts", "knorm", "h2o"), benchmarks=benchmarks, problems=40, samples=1)
    chances = {"dynts": 0.98, "knorm": 0.8, "h2o": 0.7}
    return plan, list(traces(plan, lambda one: chances.get(one.policy, 1.0), seed=1))


@pytest.mark.parametrize(("benchmarks", "margin"), [(("CHAIN6",), 14), (("CHAIN6", "CHAIN8"), 7)])
def test_marks_frames_and_recommendation_agree_in_borderline_runs(benchmarks, margin):
    plan, stored = borderline(benchmarks)
    result = analyse([run_of(plan, stored, lose_at_most=margin)])
    data, page = result.to_dict(), one_page(result)
    entries = data["means"] or data["maps"]
    (choice,) = data["recommendation"]["all"]
    decided = {entry.pop("setting"): entry for entry in choice["losses"]}
    assert not choice["shown"]
    assert "problems nothing is proven." in page
    assert not re.search(r"\d\*", page)
    assert len(re.findall(r"\d!! ", page)) == sum(entry["broken"] for entry in decided.values())
    for one, entry in zip(result.means or result.maps, entries, strict=True):
        assert one.map.keeps == frozenset()
        title = panels_title(metric_panels([one.map]))
        assert title.startswith("no setting is proven within") or "proven within" not in title
        for cell in entry["estimates"]:
            loss = decided[cell["setting"]]
            assert {name: loss[name] for name in cell.keys() & loss.keys()} == {
                name: cell[name] for name in cell.keys() & loss.keys()
            }

    # The page of one policy looks them up, too.
    alone = analyse(result.opened_runs, policy="dynts").to_dict()
    assert (alone["means"] or alone["maps"]) == [entry for entry in entries if entry["policy"] == "dynts"]
    assert [loss.pop("setting") for loss in alone["recommendation"]["losses"]] == list(decided)[:9]
    assert alone["recommendation"]["losses"] == list(decided.values())[:9]


def test_policies_in_runs_of_their_own_have_the_limits_of_one_run():
    plan, stored = borderline(("CHAIN6",))

    def of(*policies):
        own = replace(plan, expected=tuple(cell for cell in plan.expected if cell.setting.policy in policies))
        kept = [pair for pair in stored if pair[1].setting.policy in policies]
        return run_of(own, kept, lose_at_most=14)

    whole = analyse([of("full", "dynts", "knorm", "h2o")])
    split = analyse([of("full", policy) for policy in ("dynts", "knorm", "h2o")])
    limits = [[loss.high for one in result.maps for loss in one.losses.values()] for result in (whole, split)]
    assert limits[1] == pytest.approx(limits[0], abs=1e-9)
    assert [one.map.keeps for one in split.maps] == [frozenset()] * 3


def test_where_nothing_is_proven_it_says_whether_more_problems_would_help():
    close = of_run(nearly_full, problems=40)
    (choice,) = close.to_dict()["recommendation"]["all"]
    assert (choice["setting"], choice["loses"], choice["shown"]) == (None, None, False)
    page = one_page(close)
    required = choice["required"]
    limit = next(loss["loses_limit"] for loss in choice["losses"] if loss["setting"] == required["setting"])
    assert f", at most {fixed(limit)}; about {required['needed']:,} problems (now 80) would prove it" in page
    assert "As a trial take " in page
    # In three chains, one for each window, 80 problems without any loss prove nothing, so that there is one.
    sizes = choice["provable"]["problems_needed"]
    assert sizes == pytest.approx([math.log(0.05) / math.log(0.97) / 2] * 2, abs=1.5)
    far = of_run(lambda one: 1.0 if one.policy == "full" else 0.7, problems=40)
    assert far.choices[0].required is None
    assert "More problems would not help: the settings at which testing stopped are proven to lose more" in one_page(
        far
    )
    # A loss above the margin whose lower limit is below it: more problems may decide.
    open_ = of_run(lambda one: 1.0 if one.policy == "full" else 0.92, problems=30)
    assert open_.choices[0].required.problems is None
    page = one_page(open_)
    assert "More problems would not help" not in page
    assert "and nothing would prove 3 points if that is its loss." in page
    assert "As a trial" not in page
    assert of_run(nearly_full, problems=40, margin=30.0).choices[0].shown is True
    # No setting shares a problem with the full cache.
    before = recommendation(replace(far.choices[0], losses={}, family=LossFamily(0.03, {}), savings={}))
    assert before == "tiny, mean of 2: Nothing is proven."


def test_a_third_axis_has_maps_of_its_own_and_one_recommendation_over_all_of_them(tmp_path):
    budgets = (96, 144)
    settings = [
        replace(one, parameters=tuple({**dict(one.parameters), "kv_budget": budget}.items()))
        for budget in budgets
        for one in grid("dynts")
    ]
    plan = manifest(settings, axes=(*AXES, ("kv_budget", budgets)), problems=60)

    def chance(item):
        return 1.0 if item.policy == "full" or (item.values["kv_budget"] == 144 and item.values["ratio"] > 0.1) else 0.4

    folder = store_run(tmp_path / "run", plan, chance)
    result = analyse([folder], lose_at_most=8)
    assert [one.map.policy for one in result.means] == ["dynts(kv_budget=96)", "dynts(kv_budget=144)"]
    kept = [{coord for coord, loss in one.losses.items() if loss.is_kept} for one in result.means]
    assert kept[0] == set()
    assert kept[1] <= {(window, ratio) for window in (8, 16, 32) for ratio in (0.3, 0.5)}
    (choice,) = result.choices
    assert choice.recommended.values["kv_budget"] == 144
    assert choice.recommended.values["ratio"] > 0.1

    # The ratio matters at one of the budgets alone.
    proven = [(effect.axis, effect.over) for effect in result.effects if effect.is_proven]
    assert proven == [("ratio", "tiny | mean of 2 | dynts(kv_budget=144)")]
    assert "ratio 0.1" in one_page(result)

    out = tmp_path / "maps.svg"
    plot_sources([folder], out, ReadOptions(metric=None, lose_at_most=8), MapOptions(mean=True))
    for budget in budgets:
        assert f"dynts, KV budget {budget}" in out.read_text()
    plot_sources([folder], out, ReadOptions(metric=None, fix={"kv_budget": 96}))
    assert "tiny under dynts, KV budget 96: " in out.read_text()
    assert "kv_budget" not in out.read_text()
