"""Pairwise maps read back: axes, texts and bins; and the curves of runs without maps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvatlas.core import SERVED, KvatlasError, Note, NoteKind, Setting
from kvatlas.figures.pairwise import check_panels, names_of, pairwise_figure
from kvatlas.policies import all_values
from kvatlas.stats.maps import POLICY, curves_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import fitting_systems, pairs_of, systems_of
from tests.figures.conftest import texts
from tests.stats.synthetic import manifest, run_of, system, traces
from tests.stored import maze_run

FULL, WINDOW = Setting.from_parameters("full"), Setting.from_parameters("window", ratio=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    solvers = {("A", FULL): 0.01, ("A", WINDOW): 0.15, ("B", FULL): 0.04, ("C", SERVED): 0.08}
    return RunData.open(maze_run(tmp_path_factory.mktemp("pairs"), solvers, problems=90))


def test_four_systems_make_six_panels_in_two_rows(run: RunData, tmp_path: Path) -> None:
    four = systems_of([run])
    pairs = pairs_of(four)
    figure = pairwise_figure(four, pairs, "progress", [Note(NoteKind.PARTIAL, "PARTIAL: one is missing")])
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    assert len(panels) == 6
    assert len({round(axes.get_position().y0, 6) for axes in panels}) == 2
    assert len({round(axes.get_position().x0, 6) for axes in panels}) == 3
    assert [(axes.get_xlabel(), axes.get_ylabel().replace("\n", " ")) for axes in panels[:2]] == [
        ("A full", "A window, ratio 0.1"),
        ("A full", "B full"),
    ]
    for axes in panels:
        assert axes.get_xlim() == axes.get_ylim()
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert [list(line.get_xdata()) for line in dashed] == [[0, axes.get_xlim()[1]]]
    shown = " ".join(texts(figure, tmp_path))
    for _, _, result in pairs:
        ahead = "x" if result.difference.value > 0 else "y"
        ends = sorted(round(100 * abs(end)) for end in (result.difference.low, result.difference.high))
        points = round(100 * abs(result.difference.value))
        assert f"{ahead} ahead by {points} points" in shown
        assert f"({ends[0]} to {ends[1]})" in shown
        assert f"above the line {100 * result.above:.0f} %, below {100 * result.below:.0f} %" in shown
    assert "PARTIAL: one is missing" in shown
    assert "90 problems in each panel" in shown


def test_zero_and_one_are_bins_of_their_own_and_the_others_equal(run: RunData, tmp_path: Path) -> None:
    two = systems_of([run])[:2]
    x = np.array([0.0, 0.0, 1e-6, 0.2, 0.2000001, 0.6, 0.9999, 1.0, 1.0, 1.0])
    pair = replace(pairs_of(two)[0][2], x=x, y=np.zeros(10))
    figure = pairwise_figure(two, [(0, 1, pair)], "progress")
    counts = {
        (round(t.get_position()[0] - 0.5), t.get_text()) for t in figure.axes[0].texts if t.get_text().isdecimal()
    }
    assert counts == {(0, "2"), (1, "2"), (2, "1"), (3, "1"), (5, "1"), (6, "3")}
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["0", ".2", ".4", ".6", ".8", "1"]


def test_names_are_as_short_as_they_can_be() -> None:
    def names(*pairs: tuple[str, Setting]) -> list[str]:
        return names_of([system(model, setting, [1]) for model, setting in pairs])

    assert names(("hf:lab/A", FULL), ("embedded:b", FULL)) == ["A", "b"]
    assert names(("hf:lab/A", FULL), ("hf:lab/A", WINDOW)) == ["full", "window"]
    two = [Setting.from_parameters("window", ratio=r, kv_budget=9) for r in (0.1, 0.2)]
    assert names(("A", two[0]), ("A", two[1])) == ["ratio=0.1", "ratio=0.2"]
    assert names(("A", FULL), ("A", two[0]), ("A", two[1])) == ["full", "window ratio=0.1", "window ratio=0.2"]
    assert names(("A", FULL), ("openai/g", SERVED)) == ["A full", "openai/g"]
    assert names(("hf:x/A", FULL), ("hf:y/A", FULL)) == ["hf:x/A", "hf:y/A"]
    assert names(("hf:x/A", FULL), ("hf:y/A", FULL), ("B", WINDOW))[:2] == ["hf:x/A full", "hf:y/A full"]


def test_too_many_panels_are_refused() -> None:
    many = [system(str(i), FULL, [0.1, i / 9]) for i in range(9)]
    with pytest.raises(
        KvatlasError, match=r"9 systems make 36 panels, .* at most 28 \(8 systems\); name .* compare RUN full"
    ):
        pairwise_figure(many, pairs_of(many), "progress")
    with pytest.raises(KvatlasError, match="84 systems make 3,486 panels"):
        check_panels([many[0]] * 84)


def test_what_all_systems_have_in_common_stands_once(tmp_path: Path) -> None:
    outcomes = [[n % modulus == 0 for n in range(12)] for modulus in (2, 3)]
    settings = [Setting.from_parameters("window", local_window=window, ratio=0.1) for window in (8, 16)]
    systems = [system("A", setting, values) for setting, values in zip(settings, outcomes, strict=True)]
    figure = pairwise_figure(systems, pairs_of(systems), "progress")
    words = " ".join(texts(figure, tmp_path))
    assert "window, ratio 0.1" in words
    assert figure.axes[0].get_xlabel() == "local window 8"
    assert len(fitting_systems(systems, "window local_window=8")) == 1
    assert len(fitting_systems(systems, "window")) > 1


# Runs with one axis, or none.

BUDGETS = (64, 96, 128)


@pytest.fixture(scope="module")
def budgets():
    settings = [
        Setting.from_parameters(policy, kv_budget=budget, local_window=8)
        for policy in ("dynts", "window")
        for budget in BUDGETS
    ]
    plan = manifest(settings, axes=(("kv_budget", BUDGETS),), problems=8)
    chance = {"full": 0.9, "dynts": 0.7, "window": 0.3}
    stored = list(traces(plan, lambda setting: chance[setting.policy]))
    return run_of(plan, stored), stored


@pytest.fixture(scope="module")
def policies():
    plan = manifest(
        [Setting.from_parameters(name, kv_budget=64) for name in ("dynts", "window", "数学")], axes=(), problems=8
    )
    return run_of(plan, traces(plan))


def test_one_curve_for_each_model_benchmark_and_policy(budgets):
    run, stored = budgets
    assert not run.has_maps
    curves = curves_of_run(run)
    assert [curve.benchmark for curve in curves] == ["CHAIN6", "CHAIN8"]
    for curve in curves:
        assert curve.axes == ((POLICY, ("dynts", "window")), ("kv_budget", BUDGETS))
        assert list(curve.baselines) == ["full"]
        for cell in curve.cells.values():
            own = [t.grade.correct for _, t in stored if (t.benchmark, t.setting) == (curve.benchmark, cell.setting)]
            assert cell.estimate.value == pytest.approx(sum(own) / len(own))


def test_policies_alone_are_the_axis(policies):
    (item, _) = curves_of_run(policies)
    assert item.axes == ((POLICY, ("dynts", "window", "数学", "full")), ("", ("pass@1",)))
    twice = manifest(
        [Setting.from_parameters("dynts", kv_budget=budget) for budget in (64, 96)], axes=(), problems=2, samples=1
    )
    (first, _) = curves_of_run(run_of(twice, traces(twice)))
    assert first.axes[0][1] == ("dynts(kv_budget=64)", "dynts(kv_budget=96)", "full")


def test_bits_that_are_held_leave_out_settings_of_other_bits():
    settings = [
        Setting.from_parameters("window", local_window=w, **bits) for bits in ({}, {"kv_bits": 4}) for w in (8, 16)
    ]
    plan = manifest(settings, axes=(("kv_bits", (4, 16)), ("local_window", (8, 16))), problems=2)
    for bits in (4, 16):
        curve, _ = curves_of_run(run_of(plan, list(traces(plan)), fix={"kv_bits": bits}))
        assert {all_values(cell.setting)["kv_bits"] for cell in curve.cells.values()} == {bits}
        assert list(curve.baselines) == ["full"]


def test_pairs_of_one_model_name_it_and_the_benchmark(run: RunData, tmp_path: Path) -> None:
    two = [system for system in systems_of([run]) if system.model == "A"]
    figure = pairwise_figure(two, pairs_of(two), "progress")
    about = " ".join(texts(figure, tmp_path))
    assert "A; SEQBENCH-6x6-B1; 90 problems; in brackets: 95 % intervals" in about
    assert "full is ahead by" in about
    assert "proven" in about


def test_a_system_is_said_to_be_ahead_only_where_it_is_proven(tmp_path: Path) -> None:
    alike = [system(name, FULL, [n % 2 for n in range(8)]) for name in "XY"]
    words = texts(pairwise_figure(alike, pairs_of(alike), "pass@1"), tmp_path)
    assert "Pass@1: neither X nor Y is proven to be ahead" in " ".join(words)
    # Values of 0 and 1 alone are a table of four.
    figure = pairwise_figure(alike, pairs_of(alike), "pass@1")
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["0", "1"]
