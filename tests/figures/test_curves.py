"""Runs with one axis, or none, as line charts."""

import csv
import io

import pytest

from kvatlas.core import Setting
from kvatlas.figures.curves import data_csv, line_figure
from kvatlas.figures.style import Look, save
from kvatlas.stats.maps import POLICY, curves_of_run
from kvatlas.stats.run_data import RunData
from tests.figures.conftest import texts
from tests.stats.synthetic import manifest, traces

BUDGETS = (64, 96, 128)


@pytest.fixture(scope="module")
def budgets():
    settings = [
        Setting.of(policy, kv_budget=budget, local_window=8) for policy in ("dynts", "window") for budget in BUDGETS
    ]
    plan = manifest(settings, axes=(("kv_budget", BUDGETS),), problems=8)
    chance = {"full": 0.9, "dynts": 0.7, "window": 0.3}
    stored = list(traces(plan, lambda setting: chance[setting.policy]))
    return RunData(plan, stored), stored


@pytest.fixture(scope="module")
def policies():
    plan = manifest([Setting.of(name, kv_budget=64) for name in ("dynts", "window", "数学")], axes=(), problems=8)
    return RunData(plan, traces(plan))


def test_one_curve_for_each_model_benchmark_and_policy(budgets):
    run, stored = budgets
    assert run.is_line
    curves = curves_of_run(run)
    assert [(curve.benchmark, curve.policy) for curve in curves] == [
        (benchmark, policy) for benchmark in ("CHAIN6", "CHAIN8") for policy in ("dynts", "window")
    ]
    for curve in curves:
        assert curve.axis == "kv_budget"
        assert [value for value, _ in curve.points] == list(BUDGETS)
        assert list(curve.baselines) == ["full"]
        for budget, cell in curve.points:
            at = (curve.benchmark, Setting.of(curve.policy, kv_budget=budget, local_window=8))
            own = [trace.grade.correct for _, trace in stored if (trace.benchmark, trace.setting) == at]
            assert cell.estimate.value == pytest.approx(sum(own) / len(own))


def test_policies_alone_are_the_axis(policies):
    (item, _) = curves_of_run(policies)
    assert item.axis == POLICY
    assert [value for value, _ in item.points] == ["dynts", "window", "数学", "full"]
    twice = manifest([Setting.of("dynts", kv_budget=budget) for budget in (64, 96)], axes=(), problems=2, samples=1)
    (first, _) = curves_of_run(RunData(twice, traces(twice)))
    assert [value for value, _ in first.points] == ["dynts(kv_budget=64)", "dynts(kv_budget=96)", "full"]


def test_lines_have_bands_names_and_baselines(budgets, tmp_path):
    curves = curves_of_run(budgets[0])
    figure = line_figure(curves)
    assert {"tiny: Pass@1 by KV Budget", "CHAIN6", "CHAIN8"} <= set(words := texts(figure, tmp_path))
    axes = figure.axes[0]
    assert len(axes.collections) == 2
    assert [words.count(name) for name in ("dynts", "window", "full")] == [2, 2, 2]
    low = [100 * cell.estimate.low for _, cell in curves[0].points]
    corners = {tuple(round(v, 3) for v in point) for point in axes.collections[0].get_paths()[0].vertices}
    assert {(float(b), round(v, 3)) for b, v in zip(BUDGETS, low, strict=True)} <= corners
    path, data = save(figure, tmp_path / "c.svg", data=data_csv(curves))
    assert "KV Budget" in path.read_text()
    rows = list(csv.DictReader(io.StringIO(data.read_text())))
    assert len(rows) == 2 * 2 * 3 + 4
    assert float(rows[0]["value"]) == pytest.approx(100 * curves[0].points[0][1].estimate.value, abs=1e-3)


def test_words_get_points_with_bars(policies):
    figure = line_figure(curves_of_run(policies), look=Look(1, dark=True))
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["dynts", "window", "数学", "full"]
    assert len(axes.containers) == 1
    assert figure.get_figwidth() == 3.35
    assert len({round(a.get_position().x0, 3) for a in figure.axes}) == 1
