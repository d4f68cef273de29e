"""End to end on mazes: an embedded model under four settings, 150 mazes, one figure with six panels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, sweep

PROBLEMS = 150


def spec(model: str, benchmark: str, problems: int, budget: int) -> dict:
    return {
        "models": [model],
        "benchmarks": [benchmark],
        "problems": problems,
        "samples": 1,
        "sampling": {"temperature": 0.6, "max_new_tokens": 400},
        "baseline": {"policy": "full"},
        "settings": [{"policy": name, "kv_budget": budget, "ratio_over": "thinking"} for name in ("window", "random")],
        "axes": {"local_window": [32], "ratio": [0.1, 0.5]},
    }


@pytest.fixture(scope="module")
def solver() -> tuple[str, str]:
    """An embedded model and a maze benchmark of which it solves some."""
    names = models.embedded()
    for name in names:
        model = models.find(name)
        for benchmark in ("SEQBENCH-5x5", "SEQBENCH-4x4"):
            benchmark_ = find(benchmark)
            room = model.config["max_position_embeddings"] - 400
            known = len(model.encode(benchmark_.prompt(benchmark_.problems(1)[0]))) < room
            if known and _solves(name, benchmark):
                return name, benchmark
    pytest.fail(f"none of the embedded models solves mazes: {', '.join(names)}")


def _solves(model: str, benchmark: str) -> bool:
    import tempfile

    data = spec(model, benchmark, 6, 0) | {"settings": [], "axes": {}}
    with tempfile.TemporaryDirectory() as folder:
        sweep(make_plan(parse_spec(data)), Path(folder), workers=1)
        with Store.open(Path(folder)) as store:
            return sum(trace.grade.correct for _, trace in store.traces()) >= 3


@pytest.mark.slow
def test_four_settings_on_150_mazes_make_six_panels(
    solver: tuple[str, str], tmp_path: Path, succeed: Callable[..., str]
) -> None:
    name, benchmark = solver
    model, benchmark_ = models.find(name), find(benchmark)
    longest = max(len(model.encode(benchmark_.prompt(problem))) for problem in benchmark_.problems(PROBLEMS))
    sweep(make_plan(parse_spec(spec(name, benchmark, PROBLEMS, longest + 64))), tmp_path / "run", workers=1)
    names = ["full", "window ratio=0.5", "random ratio=0.5", "window ratio=0.1"]
    words = [word for name in names for word in ("--only", name)]

    data = json.loads(succeed("compare", tmp_path / "run", *words, "--out", tmp_path / "pairs.png", "--json"))
    assert [pair["problems"] for pair in data["pairs"]] == [PROBLEMS] * 6
    by_name = {(pair["x"], pair["y"]): pair for pair in data["pairs"]}
    against = by_name["full", "window ratio=0.1"]
    # A model that solves mazes gets further with all it has seen than with a tenth of it.
    assert against["below"] > against["above"]
    assert against["difference"]["low"] > 0
    assert all(pair["spearman_given_L"] is not None or pair["spearman"] is None for pair in data["pairs"])
    said = succeed("curves", tmp_path / "run", "--only", "full", "--out", tmp_path / "curves.png")
    assert ": L0 " in said
    succeed(
        "maze", benchmark, "--run", tmp_path / "run", "--only", "window ratio=0.1", "--out", tmp_path / "maze.png"
    )  # fmt: skip
    assert all((tmp_path / f"{kind}.png").stat().st_size > 5000 for kind in ("pairs", "curves", "maze"))
