"""The main job on an embedded model: forgetting matters, and learned importance knows what to keep.

`tests.goldens` holds the tokens of the quick demo, and tests/predictor what a head learns.
"""

import pytest

from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.pairs import comparisons
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep

pytestmark = pytest.mark.deep

BENCHMARKS = ["LEDGER26", "LEDGER28"]

#: Corners of a grid at a tight budget, on held-out problems: the predictor learned from others.
SPEC = {
    "models": ["embedded:tiny-qwen"],
    "benchmarks": BENCHMARKS,
    "problems": 12,
    "samples": 1,
    "sampling": {"max_new_tokens": 900},
    "settings": [
        {"policy": name, "kv_budget": 128, "ratio_over": "thinking"} for name in ("dynts", "random", "window")
    ],
    "axes": {"local_window": [16, 32], "ratio": [0.1, 0.5]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    folder = tmp_path_factory.mktemp("main") / "run"
    sweep(make_plan(parse_spec(SPEC)), folder)
    return RunData.open(folder)


def test_the_map_has_structure(run: RunData) -> None:
    """On two benchmarks the best cell of dynts is within 10 points of the full cache, its worst cell and every cell
    of window are 25 points below."""
    maps = {(item.benchmark, item.policy): item for item in maps_of_run(run)}
    for benchmark in BENCHMARKS:
        learned, window = maps[benchmark, "dynts"], maps[benchmark, "window"]
        full = learned.baselines["full"].estimate.value
        values = [cell.estimate.value for cell in learned.cells.values()]
        assert max(values) >= full - 0.10
        assert min(values) <= full - 0.25
        assert max(cell.estimate.value for cell in window.cells.values()) <= full - 0.25


def test_learned_importance_beats_random_and_window(run: RunData) -> None:
    """At equal budget, window and ratio, on the same problems, paired."""
    by_name = {(c.first, c.second): c.difference for c in comparisons(run) if not c.note}
    for rival in ("random", "window"):
        difference = by_name["dynts", rival]
        assert difference.value > 0.05
        assert difference.p < 0.01
