"""Metrics as people name them: what a run has is known on every command that takes `--metric`, also of one cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.core import Setting
from kvatlas.stats.metrics import COSTS, METRICS
from tests.cli.test_maps import store
from tests.command_line import Call
from tests.stats.synthetic import manifest
from tests.wanderers import maze_run

GRADED = (*METRICS, "pass@2", "avg@1", "maj@2")
NAMES = "pass@1, progress, pass@K, avg@K, maj@K (K up to 2)"
COMMANDS = ("map", "report", "describe", "export", "compare")
#: What these commands say of one cell, whatever its metric.
TOO_FEW = {"describe": "A map needs two axes", "export": "A map needs two axes", "compare": "two or more systems"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setting = Setting.of("window", kv_budget=96, local_window=8, ratio=0.3)
    plan = manifest([setting], models=["embedded:tiny-llama"], benchmarks=["CHAIN6"], baselines=(), problems=4, axes=())
    return store(tmp_path_factory.mktemp("cell") / "run", plan)


def words(command: str, run: Path, metric: str, out: Path) -> tuple[object, ...]:
    more = {"report": ("--attention", 0, "--traces", 0), "describe": ()}.get(command, ())
    names = {"map": "a.svg", "report": "a.html", "export": "a.csv", "compare": "a.svg"}
    to = ("--out", out / names[command]) if command in names else ()
    return (command, run, "--metric", metric, *to, *more)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("metric", GRADED)
def test_a_grade_of_one_cell(kvatlas: Call, cell: Path, tmp_path: Path, command: str, metric: str) -> None:
    code, _, err = kvatlas(*words(command, cell, metric, tmp_path))
    if command in TOO_FEW:
        assert (code, err.count("\n")) == (2, 1)
        assert TOO_FEW[command] in err
    else:
        assert (code, err) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("metric", COSTS)
def test_a_cost_of_one_cell_is_drawn_or_told_where(
    kvatlas: Call, cell: Path, tmp_path: Path, command: str, metric: str
) -> None:
    code, _, err = kvatlas(*words(command, cell, metric, tmp_path))
    if command == "map":
        assert (code, err) == (0, "")
        row = (tmp_path / "a.data.csv").read_text().splitlines()[1].split(",")
        assert metric in row
        assert "percent" not in (tmp_path / "a.svg").read_text()
    else:
        assert (code, err.count("\n")) == (2, 1)
        assert f"{metric!r} is a cost and no grade: `kvatlas map --metric {metric}` draws it; valid here are: " in err
        assert NAMES in err


def test_a_cost_along_an_axis_shows_the_numbers_of_the_cells(kvatlas: Call, tmp_path: Path) -> None:
    settings = [Setting.of("window", kv_budget=96, local_window=8, ratio=ratio) for ratio in (0.1, 0.3)]
    run = store(tmp_path / "run", manifest(settings, axes=(("ratio", (0.1, 0.3)),), benchmarks=["CHAIN6"], problems=3))
    assert kvatlas("map", run, "--metric", "mean_kv_tokens", "--out", tmp_path / "a.svg")[0] == 0
    assert "Mean cached tokens per sequence." in (tmp_path / "a.svg").read_text()
    lines = (tmp_path / "a.data.csv").read_text().splitlines()
    assert [line.split(",")[3:6] for line in lines[1:]] == [
        ["0.1", "mean_kv_tokens", "60.5"], ["0.3", "mean_kv_tokens", "60.5"], ["", "mean_kv_tokens", "60.5"],
    ]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_metric_is_told_with_all_valid_names(
    kvatlas: Call, cell: Path, tmp_path: Path, command: str
) -> None:
    code, _, err = kvatlas(*words(command, cell, "watts", tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert f"Unknown metric 'watts'; valid are: {NAMES}, and for maps the costs {', '.join(COSTS)}." in err


def test_what_a_benchmark_measures_itself_is_known_to_maps_too(kvatlas: Call, tmp_path: Path) -> None:
    solvers = {("A", Setting.of("full")): 0.05, ("A", Setting.of("window", ratio=0.1)): 0.2}
    run = maze_run(tmp_path / "run", solvers, problems=6)
    for command in ("map", "report"):
        assert kvatlas(*words(command, run, "recall", tmp_path))[0] == 0
    code, _, err = kvatlas(*words("map", run, "watts", tmp_path))
    assert code == 2
    assert f"valid are: {NAMES}, precision, progress_valid, recall, valid, and for maps the costs" in err
