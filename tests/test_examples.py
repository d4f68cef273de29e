"""The example of success against depth: its fit covers the truth, and it draws a run over mazes."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.core import KvatlasError, Setting
from tests.stored import maze_run

EXAMPLES = Path(__file__).parents[1] / "examples"
FULL = Setting.from_parameters("full")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("depth_curves")


def test_a_run_over_mazes_is_drawn_with_its_depths(
    curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = maze_run(tmp_path / "run", {("A", FULL): 0.01, ("B", FULL): 0.15}, problems=60)
    monkeypatch.setattr(sys, "argv", ["depth_curves.py", str(run), "--out", str(tmp_path / "curves.png")])
    curves.main()
    assert (tmp_path / "curves.png").is_file()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("A full: L0 ")
    # A chance c of failing at each action is a depth of -1 / log(1 - c), but for the first action, which never fails.
    low, high = (float(word.strip("()")) for word in second.rpartition("L0 ")[2].split()[1::2])
    assert low * 0.9 < -1 / math.log(1 - 0.15) < high
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--by", "n"])
    with pytest.raises(KvatlasError, match="No problem of A tells n"):
        curves.main()


DEPTHS = np.arange(5, 105, 5)


def simulate(generator: np.random.Generator, depth: float, samples: int, spread: float) -> tuple[dict, dict]:
    """Ten problems at each depth; `spread` makes problems of one depth unlike, so that their samples agree."""
    outcomes, depths = {}, {}
    for i, at in enumerate(np.repeat(DEPTHS, 10)):
        chance = math.exp(-at / depth)
        if spread:
            # Keeps the mean chance: some problems are always solved or never, the others as often as before.
            drawn = generator.random()
            chance = chance if drawn > spread else float(generator.random() < chance)
        outcomes[i] = [float(generator.random() < chance) for _ in range(samples)]
        depths[i] = float(at)
    return outcomes, depths


@pytest.mark.parametrize(("depth", "samples", "spread"), [(10.0, 1, 0.0), (85.7, 1, 0.0), (40.0, 4, 0.7)])
def test_500_simulations_cover_the_true_depth_95_times_in_100(
    curves: Any, depth: float, samples: int, spread: float
) -> None:
    generator, hits = np.random.default_rng(11), 0
    for _ in range(500):
        result = curves.fit(*simulate(generator, depth, samples, spread))
        hits += result.low <= depth <= result.high
    assert 0.93 <= hits / 500 <= 0.97


def test_all_right_and_all_wrong_have_open_intervals(curves: Any) -> None:
    depths = {i: float(i + 1) for i in range(50)}
    right = curves.fit({i: [1.0] for i in depths}, depths)
    assert (right.depth, right.high) == (math.inf, math.inf)
    assert right.low > 50
    wrong = curves.fit({i: [0.0] for i in depths}, depths)
    assert wrong.low == wrong.depth == 0
    assert 1 < wrong.high < 5
    assert list(wrong(np.array([1.0, 5.0]))) == [0, 0]


@pytest.mark.parametrize(("outcomes", "depths"), [({}, {}), ({1: [0.5]}, {1: 3.0}), ({1: [1.0]}, {1: 0.0})])
def test_bad_input_is_one_sentence(curves: Any, outcomes: dict, depths: dict) -> None:
    with pytest.raises(KvatlasError, match="0 or 1, at depths above 0"):
        curves.fit(outcomes, depths)
