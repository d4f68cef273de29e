"""Runs without maps: tables of settings, what they lose, and comparisons in pairs; findings as titles."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.figures.pairwise import names_of
from kvatlas.figures.setting_rows import nearest_words
from kvatlas.report.description import every_map, markdown_table, one_page
from kvatlas.report.map_figure import MapOptions, plot_sources
from kvatlas.report.next_steps import next_steps
from kvatlas.report.result import Result, analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.stats.systems import choose, systems_of
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

POLICIES = ("dynts", "h2o", "random", "rkv", "snapkv")
SPEC = {
    "models": ["tiny"],
    "benchmarks": ["CHAIN6", "CHAIN8"],
    "problems": 12,
    "samples": 2,
    "settings": [{"policy": "dynts", "kv_budget": 96}, {"policy": "random", "kv_budget": 96}],
    "axes": {"local_window": [8, 16, 32], "ratio": [0.1, 0.3, 0.5]},
}


def success(by_policy: dict[str, float]) -> Callable[[Setting], float]:
    return lambda setting: by_policy.get(setting.policy, 0.5)


def described(folder: Path, settings: list[Setting], by_policy: dict[str, float], **options: Any) -> Result:
    return analyse([store_run(folder / "run", manifest(settings, **options), success(by_policy))])


def test_policies_at_one_setting_are_a_table_with_losses_and_every_comparison(tmp_path: Path) -> None:
    settings = [Setting.from_parameters(name, kv_budget=64, local_window=16, ratio=0.3) for name in POLICIES]
    result = described(tmp_path, settings, {"full": 1.0, "dynts": 1.0, "h2o": 0.2}, axes=(), problems=90)
    document = result.to_dict()
    assert document["maps"] == []
    (table,) = document["tables"]
    names = [row["name"] for row in table["settings"]]
    assert set(names[:2]) == {"full", "dynts"}
    assert names[-1] == "h2o"
    by_name = {row["name"]: row for row in table["settings"]}
    assert by_name["full"]["loses"] is None
    assert (by_name["dynts"]["loses"], by_name["dynts"]["shown"]) == (0, True)
    assert (by_name["h2o"]["shown"], by_name["h2o"]["broken"]) == (False, True)
    assert set(by_name["h2o"]["benchmarks"]) == {"CHAIN6", "CHAIN8"}
    assert by_name["h2o"]["loses_low"] < by_name["h2o"]["loses"] < by_name["h2o"]["loses_high"]
    # Every two of six settings, all adjusted together.
    assert len(document["comparisons"]) == 15
    pair = next(one for one in document["comparisons"] if {one["first"], one["second"]} == {"dynts", "h2o"})
    assert abs(pair["difference"]) > 60
    assert pair["p"] <= pair["p_holm"] < 0.05
    (choice,) = document["recommendation"]["all"]
    assert choice["setting"].startswith("dynts(")
    for text in (one_page(result), every_map(result)):
        assert "dynts is proven to stay within 3 points of the full cache" in text or text.startswith("# Overview")
        assert re.search(r"\| h2o +\| ", text)


@pytest.mark.parametrize(
    ("settings", "axes", "rows"),
    [
        ([Setting.from_parameters("dynts", kv_budget=64)], (), 2),
        ([Setting.from_parameters("dynts", kv_budget=budget) for budget in (64, 96)], (("kv_budget", (64, 96)),), 3),
        # Two axes of which no policy varies both.
        (
            [Setting.from_parameters("dynts", kv_budget=64, ratio=ratio) for ratio in (0.1, 0.3)]
            + [Setting.from_parameters("h2o", kv_budget=budget, ratio=0.1) for budget in (96, 128)],
            (("kv_budget", (64, 96, 128)), ("ratio", (0.1, 0.3))),
            5,
        ),
    ],
)
def test_every_run_without_a_map_is_described(tmp_path: Path, settings: list[Setting], axes: Any, rows: int) -> None:
    result = described(tmp_path, settings, {}, axes=axes, problems=4)
    (table,) = result.tables
    assert len(table.rows) == rows
    assert one_page(result).count("\n| dynts") >= 1
    assert "kvatlas view" not in one_page(result) or next_steps(result)


def test_without_a_full_cache_nothing_is_recommended_and_all_is_compared(tmp_path: Path) -> None:
    settings = [Setting.from_parameters(name, kv_budget=64) for name in ("dynts", "h2o")]
    result = described(tmp_path, settings, {}, axes=(), baselines=[], problems=8)
    assert "No setting can be recommended without traces of a full cache beside" in one_page(result)
    assert len(result.comparisons) == 1


@pytest.mark.parametrize(
    ("by_policy", "words"),
    [
        ({"full": 1.0, "dynts": 0.6, "random": 0.2}, ("dynts is ", "above random", "every setting loses more than 3")),
        ({"full": 1.0, "dynts": 1.0, "random": 0.2}, ("is proven to stay within 3 points", "above random")),
        ({"full": 0.5, "dynts": 0.5, "random": 0.5}, ("o setting is proven to stay within 3 points",)),
    ],
)
def test_a_finding_is_the_title_and_never_more_than_is_proven(
    tmp_path: Path, by_policy: dict[str, float], words: tuple[str, ...]
) -> None:
    result = described(tmp_path, grid("dynts", "random"), by_policy, problems=90)
    assert one_page(result).startswith(result.headline)
    for word in words:
        assert word in result.headline
    (choice,) = result.choices
    losses = (choice.losses or {}).values()
    assert ("every setting loses" in result.headline) == all(loss.is_broken for loss in losses)
    assert ("is proven to stay" in result.headline.replace("o setting is proven", "")) == bool(choice.shown)


def test_a_loss_below_zero_is_a_gain(tmp_path: Path) -> None:
    result = described(tmp_path, grid("dynts"), {"full": 0.3, "dynts": 0.9}, problems=30)
    assert "It gained" in one_page(result)
    assert "lost -" not in one_page(result)


def test_settings_are_named_by_what_their_own_policy_varies(tmp_path: Path) -> None:
    settings = [*grid("dynts"), *(replace(one, policy="rkv") for one in grid("dynts"))]
    odd = [
        Setting.from_parameters(one.policy, **one.values, **({"mix": 0.2} if one.policy == "rkv" else {}))
        for one in settings
    ]
    text = one_page(described(tmp_path, odd, {"full": 1.0}, problems=6))
    assert "mix" not in text


def test_next_steps_are_specs_that_run(tmp_path: Path) -> None:
    from kvatlas.sweeps import read_spec

    plan = replace(manifest(grid("dynts", "random"), problems=40), spec=SPEC)

    def steps(by_policy: dict[str, float], name: str) -> dict[str, Any]:
        result = analyse([store_run(tmp_path / name, plan, success(by_policy))])
        found = {}
        for step in next_steps(result):
            path = tmp_path / f"{step.name}.yaml"
            path.write_text(step.spec)
            found[step.name] = read_spec(path)
        return found

    lost = steps({"full": 1.0, "dynts": 0.2, "random": 0.2}, "lost")
    assert [entry.fixed_values["kv_budget"] for entry in lost["larger-budget"].settings] == [128, 128]
    assert lost["higher-ratio"].axes["ratio"] == [0.1, 0.3, 0.5, 0.7, 0.9]
    # A spec may name a single setting without a list.
    alone = replace(manifest(grid("dynts"), problems=40), spec={**SPEC, "settings": SPEC["settings"][0]})
    result = analyse([store_run(tmp_path / "alone", alone, success({"full": 1.0, "dynts": 0.2}))])
    assert "larger-budget" in [step.name for step in next_steps(result)]
    close = steps({"full": 0.97, "dynts": 0.96, "random": 0.2}, "close")
    assert "more-problems" not in close or close["more-problems"].problems > 40
    (run,) = analyse([tmp_path / "lost"]).opened_runs
    assert next_steps(analyse([replace(run, manifest=replace(run.manifest, spec={}))])) == []


def test_a_next_step_names_the_problems_that_a_loss_of_0_takes_also_from_few(tmp_path: Path) -> None:
    plan = replace(manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=3, samples=1), spec=SPEC)
    result = analyse([store_run(tmp_path / "run", plan, success({"full": 1.0, "dynts": 1.0}))])
    step = next(step for step in next_steps(result) if step.name == "more-problems")
    required = result.choices[0].required
    assert required is not None
    assert required.problems is not None
    assert required.problems >= 98
    assert f"About {required.problems:,} problems in all would prove" in step.reason


def test_clusters_that_a_proof_takes_are_called_so(tmp_path: Path) -> None:
    """A spec counts problems, of which a cluster has two."""
    from kvatlas.sweeps import read_spec

    clusters = {"CHAIN6": {f"p{index}": str(index // 2) for index in range(80)}}
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=80, samples=1)
    plan = replace(plan, spec=SPEC, clusters=clusters)
    result = analyse([store_run(tmp_path / "run", plan, success({"full": 1.0, "dynts": 1.0}))])
    step = next(step for step in next_steps(result) if step.name == "more-problems")
    required = result.choices[0].required
    assert required is not None
    assert required.problems_now == 40
    assert f"About {required.problems:,} clusters in all would prove" in step.reason
    path = tmp_path / "more.yaml"
    path.write_text(step.spec)
    assert read_spec(path).problems == 2 * required.problems
    assert f"about {required.problems} clusters (now 40) would prove it" in one_page(result)
    assert "On these 80 problems in 40 clusters nothing is proven." in one_page(result)
    assert nearest_words(result.choices[0]).endswith(f"; about {required.problems:,} clusters would decide it")


def test_only_maps_of_a_metric_name_what_would_prove_a_setting(tmp_path: Path) -> None:
    plan = manifest(grid("dynts", "random"), benchmarks=("CHAIN6",), problems=6, samples=1)
    folder = store_run(tmp_path / "run", plan, success({"full": 1.0, "dynts": 1.0, "random": 1.0}))
    out = tmp_path / "map.svg"
    shown = {}
    for name, metric, against in (("metric", None, None), ("cost", "mean_kv_tokens", None), ("pair", None, "random")):
        plot_sources([folder], out, ReadOptions(metric=metric), MapOptions(against=against))
        shown[name] = "None is proven within the margin" in out.read_text()
    assert shown == {"metric": True, "cost": False, "pair": False}


def test_the_page_of_a_policy_is_of_its_settings_alone(tmp_path: Path) -> None:
    settings = [
        Setting.from_parameters(policy, kv_budget=64, local_window=window, ratio=0.3)
        for policy in ("rkv", "h2o", "window")
        for window in (8, 16)
    ]
    axes = (("local_window", (8, 16)),)
    folder = store_run(tmp_path / "run", manifest(settings, problems=3, axes=axes), success({"full": 1.0, "h2o": 0.9}))
    for policy in ("rkv", "h2o", "window"):
        result = analyse([folder], policy=policy)
        (choice,) = result.choices
        assert choice.required is None or choice.required.setting.policy == policy
        assert result.comparisons
        for comparison in result.comparisons:
            assert f"{policy}(" in f"{comparison.first} {comparison.second}"
        assert f"take {policy} " in one_page(result) or "As a trial" not in one_page(result)
    with pytest.raises(KvatlasError, match="no setting of the policy 'rvk'; there are: rkv, h2o, window, full"):
        one_page(analyse([folder], policy="rvk"))


def test_a_policy_of_a_file_is_chosen_by_each_of_its_names(tmp_path: Path) -> None:
    settings = [replace(one, policy="mine.py:Sinks") for one in grid("dynts")]
    by_axes = store_run(tmp_path / "maps", manifest([*settings, *grid("random")], problems=6), success({"full": 1.0}))
    only_ratio = [replace(one, policy="mine.py:Sinks") for one in grid("dynts") if one.values["local_window"] == 8]
    axes = (("ratio", (0.1, 0.3)),)
    on_a_line = store_run(tmp_path / "lines", manifest(only_ratio, problems=6, axes=axes), success({"full": 1.0}))
    for policy in ("mine.py", "mine.py:Sinks", "Sinks"):
        result = analyse([by_axes], policy=policy)
        assert {one.map.policy for one in result.maps} == {"Sinks"}
        assert result.comparisons
        options = ReadOptions(policy=policy)
        assert plot_sources([on_a_line], tmp_path / f"{policy.partition(':')[0]}.svg", options, MapOptions())


def test_classes_of_one_name_in_two_files_are_never_called_alike(tmp_path: Path) -> None:
    settings = [replace(one, policy=f"{file}.py:Sinks") for file in ("one", "two") for one in grid("dynts")]
    result = described(tmp_path, settings, {"full": 1.0}, problems=6)
    page = one_page(result)
    assert re.search(r"(one|two)\.py:Sinks local_window", page)
    assert not re.search(r"(?<!one\.py:)(?<!two\.py:)Sinks", page)
    (run,) = result.runs
    systems = systems_of([run], "pass@1")
    with pytest.raises(KvatlasError, match=r"must fit one: one\.py:Sinks.*; two\.py:Sinks"):
        choose(systems, ["Sinks local_window=8 ratio=0.1"])
    chosen = choose(systems, [f"{file}.py:Sinks local_window=8 ratio=0.1" for file in ("one", "two")])
    assert names_of(chosen) == ["one.py:Sinks", "two.py:Sinks"]


def test_settings_behind_the_end_of_the_tests_are_told_and_have_no_next_step(tmp_path: Path) -> None:
    """Ratio 0.3 keeps more than ratio 0.1 by its own numbers, and its failure ends the chain of its window alone."""

    def is_right(setting: Setting) -> float:
        values = setting.values
        return float(not (values.get("local_window") == 8 and values.get("ratio") == 0.3))

    cells = [
        Setting.from_parameters("dynts", kv_budget=128, local_window=window, ratio=ratio)
        for window in (8, 64)
        for ratio in (0.1, 0.3, 0.7)
    ]
    axes = (("local_window", (8, 64)), ("ratio", (0.1, 0.3, 0.7)))
    plan = manifest([*cells, Setting.from_parameters("full")], axes=axes, benchmarks=("CHAIN6",), problems=100)
    run = store_run(tmp_path / "run", replace(plan, spec=SPEC), is_right)
    result = analyse([run], lose_at_most=10)
    (choice,) = result.choices
    untested = {
        (choice.settings[id_].values["local_window"], choice.settings[id_].values["ratio"]): end
        for id_, end in choice.untested.items()
    }
    assert set(untested) == {(8, 0.1)}
    assert {str(end) for end in untested.values()} == {str(cells[1])}
    assert "1 is not tested: a chain goes from most to fewest tokens" in one_page(result)
    assert "is not proven: dynts at local_window 8, ratio 0.3." in one_page(result)


def test_columns_of_a_table_stand_under_each_other() -> None:
    lines = markdown_table(["a", "long name"], [["12.5", "x|y"], ["1", ""]]).split("\n")
    assert lines == [
        "| a    | long name |",
        "|------|-----------|",
        "| 12.5 | x\\|y      |",
        "| 1    |           |",
    ]
