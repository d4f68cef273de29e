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
    return plan, list(traces(plan, lambda setting: chance[setting.policy]))


@pytest.fixture(scope="module")
def policies():
    plan = manifest([Setting.of(name, kv_budget=64) for name in ("dynts", "window", "数学")], axes=(), problems=8)
    return plan, list(traces(plan))


def test_one_curve_for_each_model_benchmark_and_policy(budgets):
    plan, stored = budgets
    assert RunData(plan).is_line
    curves = curves_of_run(RunData(plan, stored))
    assert [curve.benchmark for curve in curves] == ["CHAIN6", "CHAIN8"]
    for curve in curves:
        assert curve.axes == ((POLICY, ("dynts", "window")), ("kv_budget", BUDGETS))
        assert list(curve.baselines) == ["full"]
        for cell in curve.cells.values():
            own = [t.grade.correct for _, t in stored if (t.benchmark, t.setting) == (curve.benchmark, cell.setting)]
            assert cell.estimate.value == pytest.approx(sum(own) / len(own))


def test_policies_alone_are_the_axis(policies):
    plan, stored = policies
    (item, _) = curves_of_run(RunData(plan, stored))
    assert item.axes == ((POLICY, ("dynts", "window", "数学", "full")), ("", ("pass@1",)))
    twice = manifest([Setting.of("dynts", kv_budget=budget) for budget in (64, 96)], axes=(), problems=2, samples=1)
    (first, _) = curves_of_run(RunData(twice, list(traces(twice))))
    assert first.axes[0][1] == ("dynts(kv_budget=64)", "dynts(kv_budget=96)", "full")


def test_bits_that_are_held_leave_out_settings_of_other_bits():
    settings = [Setting.of("window", local_window=w, **bits) for bits in ({}, {"kv_bits": 4}) for w in (8, 16)]
    plan = manifest(settings, axes=(("kv_bits", (4, 16)), ("local_window", (8, 16))), problems=2)
    for bits in (4, 16):
        curve, _ = curves_of_run(RunData(plan, list(traces(plan)), fix={"kv_bits": bits}))
        assert {cell.setting.on_axes["kv_bits"] for cell in curve.cells.values()} == {bits}
        assert list(curve.baselines) == ["full"]


def test_lines_have_bands_names_and_baselines(budgets, tmp_path):
    curves = curves_of_run(RunData(*budgets))
    figure = line_figure(curves)
    assert {"tiny: Pass@1 by KV Budget", "CHAIN6", "CHAIN8"} <= set(words := texts(figure, tmp_path))
    axes = figure.axes[0]
    assert len(axes.collections) == 2
    assert [words.count(name) for name in ("dynts", "window", "full")] == [2, 2, 2]
    low = [100 * curves[0].cells["dynts", budget].estimate.low for budget in BUDGETS]
    corners = {tuple(round(v, 3) for v in point) for point in axes.collections[0].get_paths()[0].vertices}
    assert {(float(b), round(v, 3)) for b, v in zip(BUDGETS, low, strict=True)} <= corners
    path, data = save(figure, tmp_path / "c.svg", data=data_csv(curves))
    assert "KV Budget" in path.read_text()
    rows = list(csv.DictReader(io.StringIO(data.read_text())))
    assert len(rows) == 2 * 2 * 3 + 4
    assert float(rows[0]["value"]) == pytest.approx(100 * curves[0].cells["dynts", 64].estimate.value, abs=1e-3)


def test_words_get_points_with_bars(policies):
    figure = line_figure(curves_of_run(RunData(*policies)), look=Look(1, dark=True))
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["dynts", "window", "数学", "full"]
    assert len(axes.containers) == 1
    assert figure.get_figwidth() == 3.35
    assert len({round(a.get_position().x0, 3) for a in figure.axes}) == 1
